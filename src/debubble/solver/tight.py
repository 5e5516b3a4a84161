"""Where memory is tight and nothing is moved: orders by exact search, proven optimal where times are coarse.

CP-SAT gets the whole problem first, and closes it in seconds where times have a large common divisor (p = 8, m = 32, F
= I = W at any limit).  Elsewhere local search goes on, and the *skeleton* bounds it: W counts only on the first device,
whose memory is the bottleneck, which leaves a third of the operations and keeps what the plain bounds do not see, that
micro-batches on their way up and down have to pass each other on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from debubble.ir import Number
from debubble.solver.bounds import lower_bound
from debubble.solver.cp_model import build
from debubble.solver.cp_sat import proven, solve, solver_of
from debubble.solver.problem import Incumbent, OrderProblem
from debubble.solver.search import Clock, improve

LARGEST = 1024
"""Stages x micro-batches up to which the whole problem is given to CP-SAT."""
WORK = 0.7
"""On the whole problem, in seconds of an undisturbed core; coarse times need a third of it at p = 8, m = 32."""


def tightened(problem: OrderProblem, best: Incumbent, *, steps: int, seed: int = 0) -> Iterator[Incumbent]:
    """Better schedules and bounds for a problem without offload and recomputation: exact search, then `steps` moves of
    local search.  The result depends on the seed alone."""
    if problem.stages * problem.micro_batches <= LARGEST:
        for better in solve(problem, best, seconds=math.inf, work=WORK, seed=seed):
            best = better
            yield best
    if not best.optimal:
        yield from improve(problem, best, clock=Clock.starting(None), steps=steps, seed=seed)


def skeleton_bound(problem: OrderProblem, *, horizon: Number, seconds: float, bound: Number = 0) -> Number:
    """A lower bound from the skeleton, at most `horizon`.  `bound`: one that is already known."""
    model = build(problem, horizon=horizon, weights=(0,))
    model.cp.add(model.objective >= math.floor(max(bound, lower_bound(problem)) / model.unit))
    solver = solver_of(seconds=seconds)
    # By cores of assumptions that cannot hold together: no schedule is asked for.
    solver.parameters.optimize_with_core = True
    return proven(solver, model, horizon)
