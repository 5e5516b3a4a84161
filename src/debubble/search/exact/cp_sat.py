"""Solves the exact model with CP-SAT: a stream of better schedules and bounds."""

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
from debubble.search.effort import MODEL, Effort, solver_of, status_of
from debubble.search.exact.cp_model import ScheduleModel, build, schedule_of
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import simulate

HALVES = {Kind.F: ("F",), Kind.I: ("I",), Kind.W: ("W",), Kind.B: ("I", "W")}
"""Orders of micro-batches that a compute operation is part of."""
HORIZON_FACTOR = 4
"""Horizon, in the value to beat: where any order fits below it, a first solution and good bounds come at once; with a
horizon as short as the value the solver stays in a hard search for feasibility."""


def solve(
    problem: OrderProblem,
    best: Incumbent,
    *,
    effort: Effort,
    seed: int = 0,
) -> Iterator[Incumbent]:
    """Improve an incumbent, or prove it optimal: yield it anew whenever schedule or bound got better.

    Args:
        problem: The operations to order.
        best: The incumbent.  Its whole backwards stay whole; in a problem that may split them, nothing is then proven.
        effort: How much CP-SAT may do.
        seed: Seed of CP-SAT.

    Raises:
        SolverError: The model turns out not to hold the incumbent.
    """
    whole = {(op.stage, op.micro_batch) for op in best.schedule.operations if op.kind is Kind.B}
    everything = problem.halves_cover_wholes and not problem.recomputes_in_two_ways and not (whole and problem.split)
    model = build(
        problem,
        horizon=HORIZON_FACTOR * best.value,
        whole=whole,
        ordered=everything or keeps_order(best.schedule),
    )
    hint(model, best.schedule)
    model.cp.add(model.objective >= math.floor(best.bound / model.unit))
    effort.spend(MODEL * problem.stages * problem.micro_batches)
    begin = effort.spent
    for schedule, bound in _stream(solver_of(effort, seed=seed), model, effort):
        known = min(max(best.bound, bound * model.unit), best.value) if everything else best.bound
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
    """Solve a model, and return the bound on its objective that this proves.

    It is at most `horizon`, a time that some schedule is known to take.  Raises SolverError if the model holds none.
    """
    require_sound(status_of(solver, model.cp, effort))
    if not model.problem.halves_cover_wholes:
        return 0
    bound: Number = math.ceil(solver.best_objective_bound - 1e-6) * model.unit
    return min(bound, horizon)


def require_sound(status: str) -> None:
    """Raise SolverError if CP-SAT says that there is no solution where an incumbent is one."""
    if status in ("INFEASIBLE", "MODEL_INVALID"):
        raise SolverError(
            f"CP-SAT calls a model {status.lower()} that holds a schedule already known: a fault of debubble's, so"
            " nothing is concluded from it."
        )


@contextmanager
def tolerate_wrong_models() -> Iterator[None]:
    """Go on, with a warning, without the answer of a model that turns out to be wrong."""
    try:
        yield
    except SolverError as error:
        warnings.warn(str(error), stacklevel=3)


def keeps_order(schedule: Schedule) -> bool:
    """Tell whether the micro-batches pass F, I (or B) and W (or B) of every stage in their order."""
    last: dict[tuple[int, str], int] = {}
    for order in schedule.orders:
        for op in order:
            for half in HALVES.get(op.kind, ()):
                if last.get((op.stage, half), -1) > op.micro_batch:
                    return False
                last[op.stage, half] = op.micro_batch
    return True


def hint(model: ScheduleModel, schedule: Schedule) -> None:
    """Start from a schedule's own times."""
    timeline = simulate(schedule, model.problem.costs)
    for operation in timeline.operations:
        if operation.op in model.starts:
            model.cp.add_hint(model.starts[operation.op], round(operation.start / model.unit))
    operations = schedule.operations
    for op, literal in model.present.items():
        if op.kind is not Kind.L:
            model.cp.add_hint(literal, op in operations)


def _stream(solver: Any, model: ScheduleModel, effort: Effort) -> Iterator[tuple[Schedule | None, int]]:
    """(schedule or None, bound) of every solution found, and at the end of the bound proven."""
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
