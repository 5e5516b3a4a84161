"""Solves the exact model with CP-SAT, as a stream of improving schedules and bounds."""

from __future__ import annotations

import math
import queue
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from debubble.ir import DebubbleError, Kind, Number, Schedule, SolverError
from debubble.search.effort import MODEL_PRICE, Effort, solver_of, status_of
from debubble.search.exact.cp_model import ScheduleModel, build, schedule_of
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import simulate

HALVES_OF_KIND = {Kind.F: ("F",), Kind.I: ("I",), Kind.W: ("W",), Kind.B: ("I", "W")}
"""The orders of micro-batches that an operation of each compute kind belongs to."""
HORIZON_FACTOR = 4
"""The horizon as a multiple of the value to beat: with a generous horizon a first solution and good bounds are found at
once; with one as short as the value the solver is stuck in a hard feasibility problem."""


def solve(problem: OrderProblem, best: Incumbent, *, effort: Effort, seed: int = 0) -> Iterator[Incumbent]:
    """Improve an incumbent, or prove it optimal; yields it whenever its schedule or bound has improved.

    Args:
        problem: The operations to order.
        best: The incumbent.  Its fused backwards stay fused; if the problem may split them, nothing is proven then.
        effort: The effort available to CP-SAT.
        seed: Random seed of CP-SAT.

    Raises:
        SolverError: The model turns out to exclude the incumbent.
    """
    fused = {(op.stage, op.micro_batch) for op in best.schedule.operations if op.kind is Kind.B}
    is_complete = (
        problem.split_covers_fused and not problem.has_fused_and_explicit_recompute and not (fused and problem.split)
    )
    ordered = is_complete or keeps_order(best.schedule)
    model = build(problem, horizon=HORIZON_FACTOR * best.value, fused=fused, ordered=ordered)
    hint(model, best.schedule)
    model.cp.add(model.objective >= math.floor(best.bound / model.unit))
    effort.spend(MODEL_PRICE * problem.stages * problem.micro_batches)
    begin = effort.spent
    for schedule, bound in _stream(solver_of(effort, seed=seed), model, effort):
        known = min(max(best.bound, bound * model.unit), best.value) if is_complete else best.bound
        candidate = replace(best, bound=known)
        if schedule is not None:
            try:
                value = problem.value(schedule)
            except DebubbleError:
                value = best.value
            if value < best.value:
                candidate = replace(candidate, schedule=schedule, value=value, source="cp-sat")
        if candidate != best:
            best = replace(candidate, seconds=best.seconds + effort.spent - begin)
            begin = effort.spent
            yield best


def prove(solver: Any, model: ScheduleModel, horizon: Number, effort: Effort) -> Number:
    """Solve a model, and return the proven lower bound on its objective.

    The bound is at most `horizon`, the time of a known schedule.  Raises SolverError if the model is infeasible.
    """
    require_sound(status_of(solver, model.cp, effort))
    if not model.problem.split_covers_fused:
        return 0
    bound: Number = math.ceil(solver.best_objective_bound - 1e-6) * model.unit
    return min(bound, horizon)


def require_sound(status: str) -> None:
    """Raise SolverError if CP-SAT finds a model infeasible of which an incumbent is a solution."""
    if status in ("INFEASIBLE", "MODEL_INVALID"):
        raise SolverError(
            f"CP-SAT calls a model {status.lower()} that holds a schedule already known: a fault of debubble's, so"
            " nothing is concluded from it."
        )


@contextmanager
def tolerate_wrong_models() -> Iterator[None]:
    """Turn a SolverError of a model that is wrong into a warning."""
    try:
        yield
    except SolverError as error:
        warnings.warn(str(error), stacklevel=3)


def keeps_order(schedule: Schedule) -> bool:
    """Tell whether micro-batches run F, I (or B) and W (or B) of every stage in their order."""
    last: dict[tuple[int, str], int] = {}
    for order in schedule.orders:
        for op in order:
            for half in HALVES_OF_KIND.get(op.kind, ()):
                if last.get((op.stage, half), -1) > op.micro_batch:
                    return False
                last[op.stage, half] = op.micro_batch
    return True


def hint(model: ScheduleModel, schedule: Schedule) -> None:
    """Add a schedule's times as hints."""
    timeline = simulate(schedule, model.problem.costs)
    for operation in timeline.operations:
        if operation.op in model.starts:
            model.cp.add_hint(model.starts[operation.op], round(operation.start / model.unit))
    operations = schedule.operations
    for op, literal in model.present.items():
        if op.kind is not Kind.L:
            model.cp.add_hint(literal, op in operations)


def _stream(solver: Any, model: ScheduleModel, effort: Effort) -> Iterator[tuple[Schedule | None, int]]:
    """Yield (schedule, bound) for every solution, and (None, bound) at the end."""
    from ortools.sat.python import cp_model

    solutions: queue.Queue[tuple[Schedule, float] | None] = queue.Queue()

    class Collect(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            solutions.put((schedule_of(model, self.value), self.best_objective_bound))

    status: list[str] = []

    def run_solver() -> None:
        try:
            status.append(status_of(solver, model.cp, effort, Collect()))
        finally:
            solutions.put(None)

    thread = threading.Thread(target=run_solver, daemon=True)
    thread.start()
    try:
        while (item := solutions.get()) is not None:
            yield item[0], math.ceil(item[1] - 1e-6)
    finally:
        solver.stop_search()
        thread.join()
    if status:
        require_sound(status[0])
        yield None, math.ceil(solver.best_objective_bound - 1e-6)
