"""Lower bounds that hold for every plan of a problem, whatever its schedule, recomputation and offload."""

from __future__ import annotations

from debubble.ir import Number
from debubble.planners.problem import Problem


def lower_bound(problem: Problem) -> Number:
    """No plan takes less than this.

    Work: the busiest device has at least its share of all work.  Path: the first micro-batch goes down and up through
    all stages, and its last weight gradients may be done beside that.  For fixed stages, device d also idles while
    the first forward is on its way to it, and after its last backward for inputs until stage 0 has done its own.
    """
    m = problem.micro_batches
    if problem.units is not None:
        units = problem.units.units
        path = sum(u.forward + u.backward_input for u in units)
        return max(m * problem.units.work / problem.devices, path, m * max(u.work for u in units))
    costs = problem.costs
    assert costs is not None
    path = sum(f + i for f, i in zip(costs.forward, costs.backward_input, strict=True))
    bound: Number = max(path, m * sum(costs.work(s) for s in range(costs.stages)) / problem.devices)
    if costs.stages == problem.devices:
        arrival: Number = 0
        for s in range(costs.stages):
            bound = max(bound, arrival + m * costs.work(s))
            arrival += costs.forward[s] + costs.communication[s]
    return bound
