"""OptPipe's mixed-integer program solved: by SCIP or HiGHS, which OR-Tools has, or by Gurobi where it is licensed.

Source: OptPipe, sections 4.1.3 and 4.3: the solver begins with a schedule, and gives better and better ones.

Work is counted in simplex iterations, and what one solve may do is limited in nodes of its tree: so the same effort
gives the same schedule on every machine, and the clock only limits.
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

GROWTH = 4
"""Factor of nodes from one solve to the next."""
TOLERANCE = 1e-6
"""Relative error of a solver's bound."""

_SOLVERS = {"SCIP": mathopt.SolverType.GSCIP, "HIGHS": mathopt.SolverType.HIGHS, "GUROBI": mathopt.SolverType.GUROBI}


@dataclass(frozen=True, kw_only=True)
class MilpResult:
    """A solver's answer: the best schedule that it found, if any, and a time that no schedule can beat.

    `complete` is True if it came to the end of its tree.
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
    """Solve the program, from a schedule such as AdaOffload's (section 4.1.3) if there is one.

    It stops after so many nodes of the tree (0: when it is done), or at the effort's deadline.  Raises InputError
    if the solver is not there, and InfeasibleError if it proves that nothing fits.
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
    return _answer(program, result)


def _answer(program: MilpModel, result: Any) -> MilpResult:
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
    """Better and better schedules, in solves of ever more nodes that each begin with the last one's schedule.

    The first of the stream is `start`; the last solve may take more than the effort.  Raises what `solve_milp` does.
    """
    problem, best, bound, nodes = program.problem, None, 0.0, 1
    if start is not None:
        best = Incumbent(schedule=start, value=problem.value(start), bound=0, source="start")
        yield best
    while not effort.over:
        answer = solve_milp(
            program, effort=effort, backend=backend, start=None if best is None else best.schedule, nodes=nodes
        )
        bound, found = max(bound, answer.bound), answer.incumbent
        if found is not None and (best is None or found.value <= best.value):
            best = found
        if best is not None:
            best = replace(best, bound=max(best.bound, min(bound, best.value)))
            yield best
        if answer.complete or (best is not None and best.optimal):
            return
        nodes *= GROWTH
