"""Memory by part: of a choice of degrees without planning, and of a plan at its peak.

The estimate without planning assumes even stages, embedding and head included, and the micro-batches in flight of 1F1B
(p - s on stage s), or of interleaved 1F1B with several chunks.  With ZeRO-3, where a device gathers two stages at a
time, it takes the number of chunks with the least memory, unless one is fixed.
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
from debubble.planners.degrees.space import Job, degrees_key, divisors, smallest_batches
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.problem import Problem

Fit = Literal["yes", "likely", "with recomputation", "no"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of the fullest device of a pipeline, without recomputation (`kept`) and with full recomputation."""

    degrees: Degrees
    kept: MemoryParts
    recomputed: MemoryParts
    limit: float
    """Bytes that a plan may use."""
    memory: float
    """Bytes that the device has."""
    most: float = 1.0
    """Largest ratio of measured to predicted memory among published runs like this one."""

    @property
    def fits(self) -> Fit:
        """Whether 1F1B fits: `yes` without recomputation, `with recomputation`, or `no`.

        `likely`: predicted to fit without recomputation, but `most` times the prediction exceeds the device.
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
    """The footprints of all legal choices with this number of micro-batches, whatever the job's global batch.

    Raises InputError if no choice of degrees is legal.
    """
    count, size = job.cluster.count, job.fixed.get("micro_batch_size") or 1
    result: list[Footprint] = []
    refusals: list[InputError] = []
    for data in (job.fixed["data"],) if "data" in job.fixed else divisors(count):
        fixed = {**job.fixed, "data": data, "micro_batch_size": size, "micro_batches": micro_batches}
        try:
            result += footprints(replace(job, global_batch=(data or 1) * size * micro_batches, fixed=fixed))
        except InputError as refusal:
            refusals.append(refusal)
    if not result:
        raise refusals[0]
    return sorted(result, key=lambda choice: degrees_key(choice.degrees))


def footprint(degrees: Degrees, problem: Problem) -> Footprint:
    """Memory by part on the fullest device of even stages under (interleaved) 1F1B, without planning."""
    if degrees.chunks is None and problem.units.gathers:
        by_chunks = (
            footprint(replace(degrees, chunks=chunks), replace(problem, chunks=chunks))
            for chunks in problem.chunk_choices
        )
        return min(by_chunks, key=lambda choice: choice.recomputed.total)
    saving, recomputing = _even_stages(problem, "none"), _even_stages(problem, "full")
    limits = problem.limits
    fullest, smallest = (
        max(range(problem.devices), key=lambda d: parts[d].total - limits[d]) for parts in (saving, recomputing)
    )
    return Footprint(
        degrees=degrees, kept=saving[fullest], recomputed=recomputing[smallest], limit=limits[smallest],
        **_uncertainty(problem, limits[smallest]),
    )  # fmt: skip


def _uncertainty(problem: Problem, limit: float) -> dict[str, float]:
    """The fields `memory` and `most` of a footprint."""
    tail = problem.tail
    if tail is None:
        return {"memory": limit}
    ratio = accuracy_of("memory", tail.model, tail.cluster, tail.options).high
    return {"memory": limit + tail.cluster.reserve, "most": ratio}


def too_large(problem: Problem) -> str | None:
    """Say why no plan fits, whatever it recomputes or offloads; None if one may fit.

    Three conditions are necessary: the optimizer states of `--host-optimizer` fit the hosts, divided evenly over the
    devices; all states fit the devices together; and each unit's states and full activation fit one device, as its
    backward needs them there even after recomputation or offload (a pipeline of one device then holds all states).
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
    """Split each device's peak, in bytes, into parts; bytes that are neither states nor workspace are activations."""
    parts = []
    for device, stages in enumerate(schedule.placement.stages_of):
        offloaded = [stage for stage in stages if stage in schedule.host_steps]
        on_device = _states(units, partition, [stage for stage in stages if stage not in schedule.host_steps])
        states = added(StateBytes, [on_device, _states_with_cpu_optimizer(units, partition, offloaded)])
        # The peak may occur while fewer parameters are gathered than the static bytes include.
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
    """The memory of each device under (interleaved) 1F1B with one recomputation strategy for all units."""
    units, devices, chunks = problem.units, problem.devices, problem.chunks or 1
    placement = Placement.looped(devices, chunks)
    partition = Partition.cut(units, even_counts(units, placement.stages), strategy=strategy)
    costs = units.stage_costs(partition, placement)
    saved = costs.activation if strategy == "none" else costs.activation_recomputed
    restored = (0,) * placement.stages if strategy == "none" else costs.recompute_workspace or (0,) * placement.stages
    # Memory peaks when the first backward starts, up to one chunk's activation if the groups of micro-batches differ.
    forwards = first_forwards(devices, problem.micro_batches, chunks, slices=problem.slices)
    parts = []
    for device, (stages, in_flight) in enumerate(zip(placement.stages_of, forwards, strict=True)):
        states = _states(units, partition, stages)
        forward = sum(n * saved[stage] for stage, n in zip(stages, in_flight, strict=True))
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
    """Bytes of the states of these stages."""
    return StateBytes.sum(units.units[index] for stage in stages for index, _ in partition[stage])


def _states_with_cpu_optimizer(units: Units, partition: Partition, stages: Sequence[int]) -> StateBytes:
    """Device bytes of stages with a CPU optimizer: gradients, and weights in the compute dtype."""
    offloaded = [unit for stage in stages for index, _ in partition[stage] if (unit := units.units[index]).on_host]
    gradients = sum(unit.states.gradients for unit in offloaded if unit.states is not None)
    static = sum(unit.on_host.static for unit in offloaded if unit.on_host is not None)
    return StateBytes(weights=static - gradients, gradients=gradients, optimizer=0)


def _parts(states: StateBytes, *, static: float, activations: float, buffers: float) -> MemoryParts:
    """The parts of a device's memory; static bytes that are no states are workspace."""
    weights, gradients, optimizer = float(states.weights), float(states.gradients), float(states.optimizer)
    workspace = max(0.0, static - weights - gradients - optimizer)
    return MemoryParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=max(0.0, activations),
        workspace=workspace,
        # The buffers of an imported job may be for fewer micro-batches than its plan has.
        buffers=buffers if 0 < buffers <= workspace else UNSET,
    )
