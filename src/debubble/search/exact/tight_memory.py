"""Exact search for problems with tight memory and no offload; proves optimality if times are coarse.

CP-SAT gets the full problem first, and closes it in seconds if times have a large common divisor (p = 8, m = 32, F = I
= W at any limit).  Otherwise it solves the problem with rounded times, whose best order local search improves, and the
*skeleton* gives a bound: W counts only on the first device, whose memory is the bottleneck.  The skeleton has two
thirds of the operations, and models what the analytic bounds do not: that micro-batches on their way up and down have
to pass each other on every device.  Its order of F and I, with W inserted again, is the best start if it is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from debubble.ir import Number, Schedule
from debubble.search.annealing.search import improve, verify
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort, solver_of
from debubble.search.exact.cp_model import ScheduleModel, build, grid, schedule_of
from debubble.search.exact.cp_sat import HORIZON_FACTOR, prove, solve, tolerate_wrong_models
from debubble.search.problem import Incumbent, OrderProblem

MAX_PAIRS = 1024
"""CP-SAT is used for problems with at most this many pairs (stages x micro-batches)."""
MAX_CLOSED_PAIRS = 64
"""CP-SAT closes problems with at most this many pairs for any times."""
FULL_MODEL_EFFORT = 2.1
"""Effort for the full problem; coarse times need a third of it at p = 8, m = 32."""
SKELETON_EFFORT = 3.0
"""Effort for the skeleton."""
SKELETON_GRID_STEPS = 2**10
"""Grid steps of the longest time in the skeleton if times are not fractions: finer ones take minutes."""
MAX_COARSE_STEPS = 2
"""Times are coarse if the mean time of F, I and W is at most this many grid steps."""

Completion = Callable[[Schedule], Schedule | None]


def improve_tight(
    problem: OrderProblem, best: Incumbent, *, steps: int, complete: Completion | None = None
) -> Iterator[Incumbent]:
    """Improve schedule and bound of a problem without offload and recomputation, by exact and then local search.

    `complete` places the W of a schedule between its F and I, whose order it keeps; without it the skeleton is not
    tried.  Yields improving schedules and bounds.
    """
    if problem.stages * problem.micro_batches <= MAX_PAIRS:
        with tolerate_wrong_models():
            for better in _solve_exactly(problem, best, complete):
                best = better
                yield best
    if not best.optimal:
        yield from improve(problem, best, steps=steps, seed=0)


def _solve_exactly(problem: OrderProblem, best: Incumbent, complete: Completion | None) -> Iterator[Incumbent]:
    """Run CP-SAT on the full problem if that may close it, otherwise on its skeleton and with rounded times."""
    if problem.stages * problem.micro_batches <= MAX_CLOSED_PAIRS or has_coarse_times(problem):
        for better in solve(problem, best, effort=Effort(FULL_MODEL_EFFORT)):
            best = better
            yield best
    if not best.optimal and complete is not None:
        best = _from_skeleton(problem, best, complete)
        yield best
    if best.optimal or has_coarse_times(problem):
        return
    coarse = with_rounded_times(problem)
    start = replace(best, value=coarse.value(best.schedule), bound=lower_bound(coarse))
    for rounded_best in solve(coarse, start, effort=Effort(FULL_MODEL_EFFORT)):
        improved = verify(problem, rounded_best.schedule, best, below=best.value)
        if improved is not None:
            best = replace(improved, source="cp-sat")
            yield best


def _from_skeleton(problem: OrderProblem, best: Incumbent, complete: Completion) -> Incumbent:
    """Adopt the skeleton's order if it is better, and its bound if `with_late_release` leaves the problem unchanged."""
    relaxed, horizon, effort = with_late_release(problem), HORIZON_FACTOR * best.value, Effort(SKELETON_EFFORT)
    model, solver = _skeleton(relaxed, horizon, lower_bound(relaxed), effort)
    bound = prove(solver, model, horizon, effort)
    if relaxed == problem:
        best = replace(best, bound=min(max(best.bound, bound), best.value))
    if not solver.response_proto.solution:
        return best
    completed = complete(schedule_of(model, solver.value))
    better = None if completed is None else verify(problem, completed, best, below=best.value)
    return best if better is None else replace(better, source="cp-sat")


def with_late_release(problem: OrderProblem) -> OrderProblem:
    """The restricted problem in which W frees everything if it frees anything, so that each forward has one corner.

    It is easier to solve, and its orders fit the original problem, in which memory is freed no later.
    """
    costs = problem.costs
    sizes = zip(costs.activation, costs.activation_after_input, strict=True)
    late = tuple(max(retained, remains) if remains else 0 for retained, remains in sizes)
    if late == costs.activation_after_input:
        return problem
    return replace(problem, costs=costs.replace(activation_after_input=late))


def has_coarse_times(problem: OrderProblem) -> bool:
    """Tell whether all times are multiples of a large part of their mean."""
    times = _times(problem)
    return sum(times) <= MAX_COARSE_STEPS * len(times) * grid([*times, *problem.costs.communication])


def _times(problem: OrderProblem) -> tuple[Number, ...]:
    costs = problem.costs
    return (*costs.forward, *costs.backward_input, *costs.backward_weight)


def with_rounded_times(problem: OrderProblem) -> OrderProblem:
    """Round all times to multiples of the mean time of F, I and W, a grid on which CP-SAT is fast."""
    costs, times = problem.costs, _times(problem)
    unit = sum(times) / len(times)
    minimums = {"forward": 1, "backward_input": 1, "backward_weight": 1, "communication": 0}
    rounded = {
        name: [max(minimum, round(time / unit)) for time in getattr(costs, name)] for name, minimum in minimums.items()
    }
    return replace(problem, costs=costs.replace(**rounded))


def _skeleton(problem: OrderProblem, horizon: Number, known: Number, effort: Effort) -> tuple[ScheduleModel, Any]:
    """The skeleton's model, and a solver for it."""
    model = build(problem, horizon=horizon, weights=(0,), steps=SKELETON_GRID_STEPS)
    model.cp.add(model.objective >= math.floor(known / model.unit))
    solver = solver_of(effort)
    # Core-based search: the bound rises until a schedule meets it.
    solver.parameters.optimize_with_core = True
    return model, solver
