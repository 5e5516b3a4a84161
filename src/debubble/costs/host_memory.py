"""Host memory that a plan uses: offloaded activations, and optimizer states whose step runs on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from debubble.costs.partition import Partition
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.errors import HostMemoryError
from debubble.formatting import size_words
from debubble.ir import Kind, Number, Schedule
from debubble.ir.ops import CODE
from debubble.simulator import Timeline

OFFLOAD, RELOAD = CODE[Kind.O], CODE[Kind.L]


def host_peaks(units: Units, partition: Partition, timeline: Timeline) -> list[float]:
    """Peak host memory of every device.

    Optimizer states, with a copy of the gradients and of the weights, stay on the host for the whole step.

    Args:
        units: The model's units.
        partition: How they form the stages.
        timeline: The simulated step.

    Returns:
        Bytes per device.
    """
    states = _states(units, partition, timeline.program.schedule)
    return [size + float(peak) for size, peak in zip(states, offloaded_peaks(timeline), strict=True)]


def _states(units: Units, partition: Partition, schedule: Schedule) -> list[float]:
    """Bytes of optimizer states, with copies of gradients and weights, that each device has on its host."""

    def states_of(stage: int) -> float:
        stage_units = [units.units[index] for index, _ in partition[stage]]
        stepped = states_on_host(stage_units) if stage in schedule.host_steps else 0.0
        return stepped + sum(float(unit.hosted) for unit in stage_units)

    return [sum(map(states_of, stages)) for stages in schedule.placement.stages_of]


def offloaded_peaks(timeline: Timeline) -> list[Number]:
    """Peak bytes of each device's activations on its host; those that move to a peer device do not count.

    An activation occupies the host from the start of its offload to the end of its reload.
    """
    program = timeline.program
    moves = np.isin(program.kind, [OFFLOAD, RELOAD]) & ~np.isin(program.device, [*program.schedule.peers])
    changes: list[list[tuple[Number, Number]]] = [[] for _ in range(program.devices)]
    columns = (program.kind, program.device, timeline.start, timeline.end, program.freed, program.allocated)
    for kind, device, start, end, leaves, returns in zip(*(column[moves].tolist() for column in columns), strict=True):
        changes[device].append((start, leaves) if kind == OFFLOAD else (end, -returns))
    # At equal times, frees come before allocations.
    return [max(accumulate((size for _, size in sorted(device)), initial=0)) for device in changes]


def check_host_memory(units: Units, partition: Partition, timeline: Timeline) -> None:
    """Raise HostMemoryError if a plan needs more host memory than there is per device."""
    if units.host_memory is not None:
        _check(units, host_peaks(units, partition, timeline))


def check_host_states(units: Units, partition: Partition, schedule: Schedule) -> None:
    """Raise HostMemoryError if a plan's optimizer states alone need more host memory than there is per device."""
    if units.host_memory is not None:
        _check(units, _states(units, partition, schedule))


def _check(units: Units, peaks: Sequence[float]) -> None:
    limit = float(units.host_memory or 0)
    device, peak = max(enumerate(peaks), key=lambda entry: entry[1])
    if peak > limit:
        raise HostMemoryError(
            f"Device {device} needs {size_words(peak)} of its host's memory, which has {size_words(limit)} for it: plan"
            " with less offload, or say in a cluster file how much there is (host_memory).",
            missing=peak - limit,
        )


def states_on_host(units: Iterable[Unit]) -> float:
    """Host bytes of units whose optimizer step runs there: optimizer states, and copies of gradients and weights."""
    return sum(map(_hosted, units))


def _hosted(unit: Unit) -> float:
    """Host bytes of a unit: the states that leave the device, and buffers for gradients and parameters."""
    if unit.on_host is None:
        return 0.0 if unit.states is None else float(unit.states.optimizer)
    offloaded = 0.0 if unit.states is None else float(unit.states.total - unit.on_host.static)
    return offloaded + float(unit.on_host.gradients + unit.on_host.parameters)
