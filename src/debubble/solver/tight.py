"""Where memory is tight and nothing is moved: orders by exact search, proven optimal where times are coarse.

CP-SAT gets the whole problem first, and closes it in seconds where times have a large common divisor (p = 8, m = 32, F
= I = W at any limit).  Elsewhere it solves the problem with rounded times, whose best order local search goes on from,
and the *skeleton* is a bound: W counts only on the first device, whose memory is the bottleneck.  That leaves two
thirds of the operations, and keeps what the plain bounds do not see: micro-batches on their way up and down have to
pass each other on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from debubble.ir import Number
from debubble.solver.bounds import lower_bound
from debubble.solver.cp_model import build
from debubble.solver.cp_sat import proven, solve, solver_of
from debubble.solver.problem import Incumbent, OrderProblem
from debubble.solver.search import Clock, improve, verified

LARGEST = 1024
"""Stages x micro-batches up to which the whole problem is given to CP-SAT."""
WORK = 0.7
"""On the whole problem, in seconds of an undisturbed core; coarse times need a third of it at p = 8, m = 32."""


def tightened(problem: OrderProblem, best: Incumbent, *, steps: int, seed: int = 0) -> Iterator[Incumbent]:
    """Better schedules and bounds for a problem without offload and recomputation: exact search, then `steps` moves of
    local search.  The result depends on the seed alone."""
    if problem.stages * problem.micro_batches <= LARGEST:
        for better in _exact(problem, best, seed):
            best = better
            yield best
    if not best.optimal:
        yield from improve(problem, best, clock=Clock.starting(None), steps=steps, seed=seed)


def _exact(problem: OrderProblem, best: Incumbent, seed: int) -> Iterator[Incumbent]:
    """CP-SAT on the problem as it is, and where that does not close it, the order that is best for rounded times."""
    for better in solve(problem, best, seconds=math.inf, work=WORK, seed=seed):
        best = better
        yield best
    coarse = rounded(problem)
    if best.optimal or coarse == problem:
        return
    start = replace(best, value=coarse.value(best.schedule), bound=lower_bound(coarse))
    for found in solve(coarse, start, seconds=math.inf, work=WORK, seed=seed):
        better_here = verified(problem, found.schedule, best)
        if better_here is not None:
            best = replace(better_here, source="cp-sat")
            yield best


def rounded(problem: OrderProblem) -> OrderProblem:
    """The problem with all times as multiples of the mean time of F, I and W: a grid on which it is quickly solved."""
    costs = problem.costs
    times = (*costs.forward, *costs.backward_input, *costs.backward_weight)
    unit = sum(times) / len(times)

    def multiples(values: Iterable[Number], least: int) -> tuple[int, ...]:
        return tuple(max(least, round(value / unit)) for value in values)

    return replace(
        problem,
        costs=costs.replace(
            forward=multiples(costs.forward, 1),
            backward_input=multiples(costs.backward_input, 1),
            backward_weight=multiples(costs.backward_weight, 1),
            communication=multiples(costs.communication, 0),
        ),
    )


def skeleton_bound(problem: OrderProblem, *, horizon: Number, seconds: float, bound: Number = 0) -> Number:
    """A lower bound from the skeleton, at most `horizon`.  `bound`: one that is already known."""
    known = max(bound, lower_bound(problem))
    model = build(problem, horizon=horizon, weights=(0,))
    model.cp.add(model.objective >= math.floor(known / model.unit))
    solver = solver_of(seconds=seconds)
    # By cores of assumptions that cannot hold together: no schedule is asked for.
    solver.parameters.optimize_with_core = True
    return max(known, proven(solver, model, horizon))
