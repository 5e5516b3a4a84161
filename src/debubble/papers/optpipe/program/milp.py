"""Solver of OptPipe's MILP: SCIP or HiGHS, which OR-Tools includes, or Gurobi where it is licensed.

Source: OptPipe, sections 4.1.3 and 4.3: the solver is warm-started and reports improving schedules.

Effort is measured in simplex iterations, and every solve has a limit of branch-and-bound nodes, so the same effort
gives the same schedule on every machine; the clock only enforces the deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal

from ortools.math_opt.python import mathopt

from debubble.interrupts import solve_interruptibly
from debubble.ir import InfeasibleError, InputError, Schedule
from debubble.papers.optpipe.program.milp_model import MilpModel
from debubble.search.effort import ITERATION_PRICE, ROW_PRICE, Effort
from debubble.search.problem import Incumbent

Backend = Literal["SCIP", "HIGHS", "GUROBI"]

NODE_LIMIT_GROWTH = 4
"""Factor by which the node limit grows from one solve to the next."""
TOLERANCE = 1e-6
"""Relative tolerance of the solver's bound."""

_SOLVERS = {"SCIP": mathopt.SolverType.GSCIP, "HIGHS": mathopt.SolverType.HIGHS, "GUROBI": mathopt.SolverType.GUROBI}


@dataclass(frozen=True, kw_only=True)
class MilpResult:
    """The result of a solve: the incumbent, if any, and a lower bound of the objective.

    `complete` is True if the solver finished its search tree.
    """

    incumbent: Incumbent | None
    bound: float
    complete: bool
    nodes: int
    iterations: int


@cache
def best_backend() -> Backend:
    """Gurobi where it is installed and licensed, else SCIP."""
    try:
        mathopt.solve(mathopt.Model(), mathopt.SolverType.GUROBI)
    except (RuntimeError, ValueError):
        return "SCIP"
    return "GUROBI"


def solve_milp(
    program: MilpModel, *, effort: Effort, backend: Backend = "SCIP", start: Schedule | None = None, nodes: int = 0
) -> MilpResult:
    """Solve the MILP, warm-started from a schedule such as AdaOffload's (section 4.1.3) if `start` is set.

    The solve stops after `nodes` nodes (0: no limit), or at the effort's deadline.  Raises InputError if the solver is
    not available, and InfeasibleError if it proves that nothing fits.
    """
    if program.reductions.triangles == "lazy":
        program.relaxation()
    seconds = effort.deadline.remaining
    limit = timedelta(seconds=max(1e-3, seconds)) if math.isfinite(seconds) else None
    parameters = mathopt.SolveParameters(time_limit=limit, node_limit=nodes or None)
    parameters.gscip.bool_params["misc/catchctrlc"] = False
    hints = [] if start is None else [program.hint(start)]
    try:
        result = solve_interruptibly(
            partial(
                mathopt.solve,
                program.model,
                _SOLVERS[backend],
                params=parameters,
                model_params=mathopt.ModelSolveParameters(solution_hints=hints),
            )
        )
    except RuntimeError as error:
        raise InputError(f"{backend} cannot be used here ({error}); SCIP and HIGHS always can.") from None
    effort.deadline.check()
    effort.spend(ROW_PRICE * program.rows + ITERATION_PRICE * program.rows * result.solve_stats.simplex_iterations)
    return _result(program, result)


def _result(program: MilpModel, result: Any) -> MilpResult:
    reason = result.termination.reason.name
    if reason == "INFEASIBLE":
        raise InfeasibleError("The MILP has no solution: nothing fits the memory limit.")
    bound = max(0.0, float(result.dual_bound()) * (1 - TOLERANCE))
    incumbent = None
    if result.has_primal_feasible_solution():
        schedule = program.schedule(result.variable_values())
        value = program.problem.value(schedule)
        met = reason == "OPTIMAL" and float(value) <= result.objective_value() * (1 + TOLERANCE)
        incumbent = Incumbent(schedule=schedule, value=value, bound=value if met else min(bound, value), source="milp")
        bound = float(value) if met else bound
    stats = result.solve_stats
    return MilpResult(
        incumbent=incumbent,
        bound=bound,
        complete=reason == "OPTIMAL",
        nodes=stats.node_count,
        iterations=stats.simplex_iterations,
    )


def milp_incumbents(
    program: MilpModel, *, effort: Effort, start: Schedule | None = None, backend: Backend = "SCIP"
) -> Iterator[Incumbent]:
    """Improving schedules from solves with growing node limits, each warm-started from the previous incumbent.

    The first one is `start`; the last solve may exceed the effort.  Raises the errors of `solve_milp`.
    """
    problem, best, bound, nodes = program.problem, None, 0.0, 1
    if start is not None:
        best = Incumbent(schedule=start, value=problem.value(start), bound=0, source="start")
        yield best
    while not effort.over:
        result = solve_milp(
            program, effort=effort, backend=backend, start=None if best is None else best.schedule, nodes=nodes
        )
        bound, incumbent = max(bound, result.bound), result.incumbent
        if incumbent is not None and (best is None or incumbent.value <= best.value):
            best = incumbent
        if best is not None:
            best = replace(best, bound=max(best.bound, min(bound, best.value)))
            yield best
        if result.complete or (best is not None and best.optimal):
            return
        nodes *= NODE_LIMIT_GROWTH
