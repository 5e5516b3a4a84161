"""Lower bounds that hold for every plan of a problem, whatever its schedule, recomputation and offload."""

from __future__ import annotations

from debubble.errors import readable
from debubble.ir import InfeasibleError, Number
from debubble.planners.problem import Problem


def lower_bound(problem: Problem) -> Number:
    """No plan takes less than this.

    Work: the busiest device has at least its share of all work.  Path: the first micro-batch goes down and up through
    all stages, from stage 0's device and back to it, and its last weight gradients may be done beside that.  For fixed
    stages, device d also idles while the first forward is on its way to it, which counts in the makespan alone.
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
    if costs.stages == problem.devices and problem.objective == "makespan":
        arrival: Number = 0
        for s in range(costs.stages):
            bound = max(bound, arrival + m * costs.work(s))
            arrival += costs.forward[s] + costs.communication[s]
    if problem.objective == "span":
        bound = max(bound, *(m * costs.work(s) for s in range(costs.stages)))
    return bound


def check_states(problem: Problem) -> None:
    """Refuse at once what no plan can fit: model states larger than all devices together.

    States that can be the host's count with what stays on the device.
    """
    if problem.units is None:
        return
    units = problem.units.units
    needed = sum(float(u.on_host.static if u.on_host and problem.units.hostable else u.static) for u in units)
    room = sum(limit - float(problem.units.static) for limit in problem.limits)
    if needed > room:
        raise InfeasibleError(
            f"The model's states alone need {readable(needed)}, but a plan may use {readable(room)} on all"
            f" {problem.devices} devices together; use more devices, a larger --tensor degree, or --zero with --data.",
            missing=needed - room,
        )
