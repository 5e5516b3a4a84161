"""Memory by part: of a choice of degrees without planning, and of a plan's fullest moment.

Without planning a device of the pipeline is taken to hold its even share of the model, first and last stage with
embedding and head, and as many micro-batches as 1F1B does (p - s on stage s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from debubble.costs.units import Partition, StateBytes, Unit, Units
from debubble.ir import InfeasibleError, InputError, Number, Placement, Schedule, StageCosts
from debubble.ir.degrees import Degrees, MemoryParts
from debubble.planners.bounds import check_states
from debubble.planners.degrees.space import Job, divisors, in_order, smallest_batches
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.problem import ModelUnits, Problem, Solution


def units_of(problem: Problem) -> Units:
    """The units of a model's problem."""
    assert isinstance(problem.workload, ModelUnits)
    return problem.workload.units


Fit = Literal["yes", "with recomputation", "no"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that the fullest device of a pipeline needs, keeping everything and recomputing everything."""

    degrees: Degrees
    kept: MemoryParts
    recomputed: MemoryParts
    limit: float
    """Bytes that a plan may use."""

    @property
    def fits(self) -> Fit:
        """The way in which 1F1B fits: `yes` as it is, `with recomputation`, or `no`."""
        if self.kept.total <= self.limit:
            return "yes"
        return "with recomputation" if self.recomputed.total <= self.limit else "no"


def footprints(job: Job) -> list[Footprint]:
    """The footprints of all legal degrees and ZeRO levels, with micro-batches of one sequence unless they are fixed.

    Raises:
        InputError: if no choice of degrees is legal.
    """
    return [footprint(degrees, job.problem(degrees)) for degrees in smallest_batches(job)]


def footprints_with(job: Job, micro_batches: int) -> list[Footprint]:
    """The same where every pipeline has so many micro-batches, whatever batch that makes; the job's is not looked at.

    Raises:
        InputError: if no choice of degrees is legal.
    """
    count, size = job.cluster.count, job.fixed.get("micro_batch_size") or 1
    found: list[Footprint] = []
    refusals: list[InputError] = []
    for data in (job.fixed["data"],) if "data" in job.fixed else divisors(count):
        fixed = {**job.fixed, "data": data, "micro_batch_size": size, "micro_batches": micro_batches}
        try:
            found += footprints(replace(job, global_batch=(data or 1) * size * micro_batches, fixed=fixed))
        except InputError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    return sorted(found, key=lambda each: in_order(each.degrees))


def footprint(degrees: Degrees, problem: Problem) -> Footprint:
    """Memory by part on the fullest device of even stages under 1F1B, without planning."""
    kept, recomputed = _even_stages(problem, "none"), _even_stages(problem, "full")
    limits = problem.limits
    fullest, smallest = (
        max(range(problem.devices), key=lambda d: parts[d].total - limits[d]) for parts in (kept, recomputed)
    )
    return Footprint(degrees=degrees, kept=kept[fullest], recomputed=recomputed[smallest], limit=limits[smallest])


def too_large(problem: Problem) -> str | None:
    """Say why no plan fits, whatever it recomputes, offloads or leaves to the host; None if one may.

    The states must fit on all devices together, and each unit beside its own whole activation, which its backward has
    on the device even if it was recomputed or offloaded; a pipeline of one device holds all states at that moment.
    """
    try:
        check_states(problem)
    except InfeasibleError as error:
        return str(error)
    units, limit = units_of(problem), max(problem.limits)

    def static(unit: Unit) -> float:
        return float(unit.on_host.static if unit.on_host and units.hostable else unit.static)

    everything = sum(map(static, units.units)) if problem.devices == 1 else 0.0
    needed = max(float(u.activation + u.workspace + u.gathered) + (everything or static(u)) for u in units.units)
    if needed + float(units.static) <= limit:
        return None
    return f"One device needs at least {needed / 2**30:.2f} GiB of {limit / 2**30:.2f} GiB for one micro-batch."


def peak_parts(problem: Problem, solution: Solution, peaks: Sequence[Number]) -> list[MemoryParts]:
    """Divide each device's peak into parts, for an answer to a model's problem; `peaks` are bytes per device."""
    assert solution.partition is not None
    return parts_at_peak(units_of(problem), solution.partition, solution.schedule, solution.costs, peaks)


def parts_at_peak(
    units: Units, partition: Partition, schedule: Schedule, costs: StageCosts, peaks: Sequence[Number]
) -> list[MemoryParts]:
    """Divide each device's peak into parts; what is neither state nor workspace is activations.

    Args:
        units: The model's units.
        partition: Those of each stage.
        schedule: Where the stages are, and which of them have their optimizer on the host.
        costs: The stages' costs.
        peaks: Bytes per device at its peak.
    """
    parts = []
    for device, stages in enumerate(schedule.placement.stages_of):
        states = _states([units.units[index] for stage in stages for index, _ in partition[stage]])
        stepped = [stage for stage in stages if stage not in schedule.host_steps]
        optimizer = float(_states([units.units[index] for stage in stepped for index, _ in partition[stage]]).optimizer)
        weights, gradients = float(states.weights), float(states.gradients)
        static = float(costs.static_of(device))
        parts.append(
            MemoryParts(
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                # The peak may be where fewer parameters are gathered than there is room for.
                activations=max(0.0, float(peaks[device]) - static),
                workspace=max(0.0, min(static, float(peaks[device])) - weights - gradients - optimizer),
            )
        )
    return parts


def _even_stages(problem: Problem, strategy: str) -> list[MemoryParts]:
    """The stages of 1F1B with one strategy for all units."""
    units, devices = units_of(problem), problem.devices
    partition = Partition.cut(units, even_counts(units, devices), strategy=strategy)
    costs = units.stage_costs(partition, Placement.looped(devices, 1))
    restored = costs.recompute_workspace or (0,) * devices
    parts = []
    for s, stage in enumerate(partition):
        states = _states([units.units[index] for index, _ in stage])
        kept = costs.activation[s] if strategy == "none" else costs.activation_recomputed[s]
        again = 0 if strategy == "none" else restored[s]
        alive = min(problem.micro_batches, devices - s)
        of_states = float(states.weights + states.gradients + states.optimizer)
        parts.append(
            MemoryParts(
                weights=float(states.weights),
                gradients=float(states.gradients),
                optimizer=float(states.optimizer),
                activations=float(alive * kept + again),
                workspace=float(costs.static_of(s)) - of_states,
            )
        )
    return parts


def _states(units: Sequence[Unit]) -> StateBytes:
    known = [unit.states for unit in units if unit.states is not None]
    return StateBytes(
        weights=sum(each.weights for each in known),
        gradients=sum(each.gradients for each in known),
        optimizer=sum(each.optimizer for each in known),
    )
