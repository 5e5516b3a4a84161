"""Lower bounds that hold for every plan of a problem, whatever its schedule, recomputation and offload."""

from __future__ import annotations

from debubble.costs import Units
from debubble.errors import readable
from debubble.ir import InfeasibleError, Number, StageCosts
from debubble.planners.problem import FixedStages, ModelUnits, Problem


def lower_bound(problem: Problem) -> Number:
    """A time that the pipeline's part of no plan for the problem beats.

    Work: the busiest device has at least its share of all work.  Path: the first micro-batch goes down and up through
    all stages, from stage 0's device and back to it, and its last weight gradients may be done beside that.  For fixed
    stages, device d also idles while the first forward is on its way to it, which counts in the makespan alone.
    """
    match problem.workload:
        case FixedStages(costs):
            return _bound_of_stages(problem, costs)
        case ModelUnits(units):
            return _bound_of_units(problem, units)


def _bound_of_units(problem: Problem, units: Units) -> Number:
    m = problem.micro_batches
    path = sum(u.forward + u.backward_input for u in units.units)
    return max(m * units.work / problem.devices, path, m * max(u.work for u in units.units))


def _bound_of_stages(problem: Problem, costs: StageCosts) -> Number:
    m = problem.micro_batches
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

    Raises:
        InfeasibleError: If the states alone do not fit.
    """
    if isinstance(problem.workload, FixedStages):
        return
    units = problem.workload.units
    needed = sum(float(u.on_host.static if u.on_host and units.hostable else u.static) for u in units.units)
    room = sum(limit - float(units.static) for limit in problem.limits)
    if needed > room:
        with_host = " with the optimizer on the host" if units.hostable else ""
        raise InfeasibleError(
            f"The model's states alone need {readable(needed)}{with_host}, but a plan may use {readable(room)} on all"
            f" {problem.devices} pipeline devices together.",
            missing=needed - room,
        )
