"""Exact search where memory is tight and nothing is moved; orders are proven optimal where times are coarse.

CP-SAT gets the whole problem first, and closes it in seconds where times have a large common divisor (p = 8, m = 32, F
= I = W at any limit).  Elsewhere it solves the problem with rounded times, whose best order local search improves,
and the *skeleton* is a bound: W counts only on the first device, whose memory is the bottleneck.  That leaves two
thirds of the operations, and keeps what the plain bounds do not see: micro-batches on their way up and down have to
pass each other on every device.  Its order of F and I, with W put in again, is the best start where it can be had.
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
"""Stages x micro-batches up to which the whole problem is given to CP-SAT."""
MAX_CLOSED_PAIRS = 64
"""Stages x micro-batches up to which CP-SAT closes it whatever the times are."""
WHOLE_EFFORT = 2.1
"""Effort for the whole problem; coarse times need a third of it at p = 8, m = 32."""
SKELETON_EFFORT = 3.0
"""Effort for the skeleton."""
STEPS = 2**10
"""Steps of the longest time that the skeleton sees where times are no fractions: finer ones take it minutes."""
MAX_GRID_STEPS = 2
"""Steps of the times' grid in the mean time of F, I and W up to which the problem is said to be coarse."""

Completion = Callable[[Schedule], Schedule | None]


def improve_tight(
    problem: OrderProblem, best: Incumbent, *, steps: int, complete: Completion | None = None
) -> Iterator[Incumbent]:
    """Improve schedule and bound of a problem without offload and recomputation: exact search, then local search.

    `complete` places the W of a schedule anew between its F and I, which keep their order; without it the skeleton is
    not tried.  Yields better schedules and bounds.
    """
    if problem.stages * problem.micro_batches <= MAX_PAIRS:
        with tolerate_wrong_models():
            for better in _exact(problem, best, complete):
                best = better
                yield best
    if not best.optimal:
        yield from improve(problem, best, steps=steps, seed=0)


def _exact(problem: OrderProblem, best: Incumbent, complete: Completion | None) -> Iterator[Incumbent]:
    """CP-SAT on the problem as it is where that may close it, elsewhere on its skeleton and for rounded times."""
    if problem.stages * problem.micro_batches <= MAX_CLOSED_PAIRS or has_coarse_times(problem):
        for better in solve(problem, best, effort=Effort(WHOLE_EFFORT)):
            best = better
            yield best
    if not best.optimal and complete is not None:
        best = _from_skeleton(problem, best, complete)
        yield best
    if best.optimal or has_coarse_times(problem):
        return
    coarse = with_rounded_times(problem)
    start = replace(best, value=coarse.value(best.schedule), bound=lower_bound(coarse))
    for rounded_best in solve(coarse, start, effort=Effort(WHOLE_EFFORT)):
        improved = verify(problem, rounded_best.schedule, best, below=best.value)
        if improved is not None:
            best = replace(improved, source="cp-sat")
            yield best


def _from_skeleton(problem: OrderProblem, best: Incumbent, complete: Completion) -> Incumbent:
    """Take the order of the skeleton where that is better, and its bound if the skeleton is of this very problem."""
    simple, horizon, effort = with_late_release(problem), HORIZON_FACTOR * best.value, Effort(SKELETON_EFFORT)
    model, solver = _skeleton(simple, horizon, lower_bound(simple), effort)
    bound = prove(solver, model, horizon, effort)
    if simple == problem:
        best = replace(best, bound=min(max(best.bound, bound), best.value))
    if not solver.response_proto.solution:
        return best
    completed = complete(schedule_of(model, solver.value))
    better = None if completed is None else verify(problem, completed, best, below=best.value)
    return best if better is None else replace(better, source="cp-sat")


def with_late_release(problem: OrderProblem) -> OrderProblem:
    """Let W free all that it frees a part of: one wait per forward, which is sooner solved.

    Its orders fit the problem too: nothing is there for longer.
    """
    costs = problem.costs
    sizes = zip(costs.activation, costs.activation_after_input, strict=True)
    late = tuple(max(kept, remains) if remains else 0 for kept, remains in sizes)
    if late == costs.activation_after_input:
        return problem
    return replace(problem, costs=costs.replace(activation_after_input=late))


def has_coarse_times(problem: OrderProblem) -> bool:
    """Tell whether all times are multiples of a large part of their mean."""
    times = _times(problem)
    return sum(times) <= MAX_GRID_STEPS * len(times) * grid([*times, *problem.costs.communication])


def _times(problem: OrderProblem) -> tuple[Number, ...]:
    costs = problem.costs
    return (*costs.forward, *costs.backward_input, *costs.backward_weight)


def with_rounded_times(problem: OrderProblem) -> OrderProblem:
    """Round all times to multiples of the mean time of F, I and W: a grid on which the problem is quickly solved."""
    costs, times = problem.costs, _times(problem)
    unit = sum(times) / len(times)
    least = {"forward": 1, "backward_input": 1, "backward_weight": 1, "communication": 0}
    rounded = {name: [max(low, round(time / unit)) for time in getattr(costs, name)] for name, low in least.items()}
    return replace(problem, costs=costs.replace(**rounded))


def _skeleton(problem: OrderProblem, horizon: Number, known: Number, effort: Effort) -> tuple[ScheduleModel, Any]:
    """The model and a solver for it."""
    model = build(problem, horizon=horizon, weights=(0,), steps=STEPS)
    model.cp.add(model.objective >= math.floor(known / model.unit))
    solver = solver_of(effort)
    # By cores of assumptions that cannot hold together: the bound rises until a schedule meets it.
    solver.parameters.optimize_with_core = True
    return model, solver
