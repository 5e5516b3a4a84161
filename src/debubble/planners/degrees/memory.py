"""Memory by part: of a choice of degrees without planning, and of a plan's fullest moment.

Without planning a device of the pipeline is taken to hold its even share of the model, first and last stage with
embedding and head, and as many micro-batches as 1F1B does (p - s on stage s), or interleaved 1F1B with several chunks.
With ZeRO-3, where a device gathers two stages at a time, it is cut into the number of chunks that takes least, unless
one is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import UNSET

from debubble.costs.accuracy import accuracy_of
from debubble.costs.partition import Partition
from debubble.costs.unit import StateBytes, Unit, added
from debubble.costs.units import Units
from debubble.formatting import size_words
from debubble.ir import InfeasibleError, InputError, Number, Placement, Schedule, StageCosts
from debubble.ir.degrees import Degrees, MemoryParts
from debubble.planners.bounds.proven import check_states
from debubble.planners.bounds.quick_plans import first_forwards
from debubble.planners.degrees.space import Job, divisors, in_order, smallest_batches
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.problem import Problem

Fit = Literal["yes", "likely", "with recomputation", "no"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory that the fullest device of a pipeline needs, keeping everything and recomputing everything."""

    degrees: Degrees
    kept: MemoryParts
    recomputed: MemoryParts
    limit: float
    """Bytes that a plan may use."""
    memory: float
    """Bytes that the device has."""
    most: float = 1.0
    """The most that measured runs like this took, over what is predicted."""

    @property
    def fits(self) -> Fit:
        """The way in which 1F1B fits: `yes` as it is, `with recomputation`, or `no`.

        `likely`: as it is, but measured runs took so much more than predicted that it may not.
        """
        if self.kept.total <= self.limit:
            return "yes" if self.kept.total * self.most <= self.memory else "likely"
        return "with recomputation" if self.recomputed.total <= self.limit else "no"


def footprints(job: Job) -> list[Footprint]:
    """The footprints of all legal degrees and ZeRO levels, with micro-batches of one sequence unless they are fixed.

    Raises InputError if no choice of degrees is legal.
    """
    return [footprint(degrees, job.problem(degrees)) for degrees in smallest_batches(job)]


def footprints_with(job: Job, micro_batches: int) -> list[Footprint]:
    """The memory of every choice where each pipeline has so many micro-batches, whatever batch the job has.

    Raises InputError if no choice of degrees is legal.
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
    """Memory by part on the fullest device of even stages under (interleaved) 1F1B, without planning."""
    if degrees.chunks is None and problem.units.gathers:
        found = (
            footprint(replace(degrees, chunks=chunks), replace(problem, chunks=chunks))
            for chunks in problem.chunk_choices
        )
        return min(found, key=lambda each: each.recomputed.total)
    kept, recomputed = _even_stages(problem, "none"), _even_stages(problem, "full")
    limits = problem.limits
    fullest, smallest = (
        max(range(problem.devices), key=lambda d: parts[d].total - limits[d]) for parts in (kept, recomputed)
    )
    return Footprint(
        degrees=degrees, kept=kept[fullest], recomputed=recomputed[smallest], limit=limits[smallest],
        **_uncertainty(problem, limits[smallest]),
    )  # fmt: skip


def _uncertainty(problem: Problem, limit: float) -> dict[str, float]:
    """The memory of a device, and what measured runs took over what is predicted."""
    tail = problem.tail
    if tail is None:
        return {"memory": limit}
    most = accuracy_of("memory", tail.model, tail.cluster, tail.options).high
    return {"memory": limit + tail.cluster.reserve, "most": most}


def too_large(problem: Problem) -> str | None:
    """Say why no plan fits, whatever it recomputes, offloads or leaves to the host; None if one may.

    What `--host-optimizer` puts on hosts must fit there, as all devices have the same share at best.
    The states must fit on all devices together, and each unit next to its own whole activation, which its backward has
    on the device even if it was recomputed or offloaded; a pipeline of one device holds all states at that moment.
    """
    try:
        check_states(problem)
    except InfeasibleError as error:
        return str(error)
    units, limit = problem.units, max(problem.limits)
    hosted = sum(float(unit.hosted) for unit in units.units) / problem.devices
    if units.host_memory is not None and hosted > units.host_memory:
        return (
            f"Each device needs {size_words(hosted)} of its host's memory, which has"
            f" {size_words(units.host_memory)} for it: say in a cluster file how much there is (host_memory)."
        )

    def static(unit: Unit) -> float:
        return float(unit.on_host.static if unit.on_host and units.hostable else unit.static)

    everything = sum(map(static, units.units)) if problem.devices == 1 else 0.0
    needed = max(float(u.activation + u.workspace + u.gathered) + (everything or static(u)) for u in units.units)
    if needed + float(units.static) <= limit:
        return None
    return f"One device needs at least {needed / 2**30:.2f} GiB of {limit / 2**30:.2f} GiB for one micro-batch."


def parts_at_peak(
    units: Units, partition: Partition, schedule: Schedule, costs: StageCosts, peaks: Sequence[Number]
) -> list[MemoryParts]:
    """Divide each device's peak, in bytes, into parts; what is neither state nor workspace is activations."""
    parts = []
    for device, stages in enumerate(schedule.placement.stages_of):
        hosted = [stage for stage in stages if stage in schedule.host_steps]
        own = _states(units, partition, [stage for stage in stages if stage not in schedule.host_steps])
        states = added(StateBytes, [own, _states_next_to_host(units, partition, hosted)])
        # The peak may be where fewer parameters are gathered than there is room for.
        peak, static = float(peaks[device]), float(costs.static_of(device))
        parts.append(
            _parts(
                states,
                static=min(static, peak),
                activations=peak - static,
                buffers=float(units.buffers(stages, schedule.placement.stages)),
            )
        )
    return parts


def _even_stages(problem: Problem, strategy: str) -> list[MemoryParts]:
    """The devices of (interleaved) 1F1B with one strategy for all units."""
    units, devices, chunks = problem.units, problem.devices, problem.chunks or 1
    placement = Placement.looped(devices, chunks)
    partition = Partition.cut(units, even_counts(units, placement.stages), strategy=strategy)
    costs = units.stage_costs(partition, placement)
    kept = costs.activation if strategy == "none" else costs.activation_recomputed
    restored = (0,) * placement.stages if strategy == "none" else costs.recompute_workspace or (0,) * placement.stages
    # A device holds most when its first backward starts, but for one chunk's activation where groups are unlike.
    forwards = first_forwards(devices, problem.micro_batches, chunks, slices=problem.slices)
    parts = []
    for device, (stages, alive) in enumerate(zip(placement.stages_of, forwards, strict=True)):
        states = _states(units, partition, stages)
        forward = sum(n * kept[stage] for stage, n in zip(stages, alive, strict=True))
        activations = forward + max(restored[stage] for stage in stages)
        parts.append(
            _parts(
                states,
                static=float(costs.static_of(device)),
                activations=float(activations),
                buffers=float(units.buffers(stages, placement.stages)),
            )
        )
    return parts


def _states(units: Units, partition: Partition, stages: Sequence[int]) -> StateBytes:
    """The states of some stages' units."""
    return StateBytes.sum(units.units[index] for stage in stages for index, _ in partition[stage])


def _states_next_to_host(units: Units, partition: Partition, stages: Sequence[int]) -> StateBytes:
    """The states of stages that hosts step: gradients, and weights of the computing dtype alone."""
    hosted = [unit for stage in stages for index, _ in partition[stage] if (unit := units.units[index]).on_host]
    gradients = sum(unit.states.gradients for unit in hosted if unit.states is not None)
    kept = sum(unit.on_host.static for unit in hosted if unit.on_host is not None)
    return StateBytes(weights=kept - gradients, gradients=gradients, optimizer=0)


def _parts(states: StateBytes, *, static: float, activations: float, buffers: float) -> MemoryParts:
    """The parts of a device's memory: of the static bytes what is no state is workspace."""
    weights, gradients, optimizer = float(states.weights), float(states.gradients), float(states.optimizer)
    workspace = max(0.0, static - weights - gradients - optimizer)
    return MemoryParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=max(0.0, activations),
        workspace=workspace,
        # An imported job may have them for fewer micro-batches than its plan has.
        buffers=buffers if 0 < buffers <= workspace else UNSET,
    )
