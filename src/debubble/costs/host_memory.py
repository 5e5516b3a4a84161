"""Memory of the hosts that a plan uses: offloaded activations, and the optimizer states that hosts step."""

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
    """The most that each device has on its host at a time.

    Optimizer states are there throughout, next to a copy of the gradients and of the weights.

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
    """The bytes of optimizer states, with copies of gradients and weights, that each device has on its host."""

    def states_of(stage: int) -> float:
        own = [units.units[index] for index, _ in partition[stage]]
        stepped = states_on_host(own) if stage in schedule.host_steps else 0.0
        return stepped + sum(float(unit.hosted) for unit in own)

    return [sum(map(states_of, own)) for own in schedule.placement.stages_of]


def offloaded_peaks(timeline: Timeline) -> list[Number]:
    """The most bytes of activations that each device has on its host at a time; what a peer device takes is not.

    An activation is there from the start of its offload to the end of its reload.
    """
    program = timeline.program
    moves = np.isin(program.kind, [OFFLOAD, RELOAD]) & ~np.isin(program.device, [*program.schedule.peers])
    changes: list[list[tuple[Number, Number]]] = [[] for _ in range(program.devices)]
    columns = (program.kind, program.device, timeline.start, timeline.end, program.freed, program.allocated)
    for kind, device, start, end, leaves, returns in zip(*(column[moves].tolist() for column in columns), strict=True):
        changes[device].append((start, leaves) if kind == OFFLOAD else (end, -returns))
    # At one instant, frees come before allocations.
    return [max(accumulate((size for _, size in sorted(of)), initial=0)) for of in changes]


def check_host_memory(units: Units, partition: Partition, timeline: Timeline) -> None:
    """Refuse a plan that keeps more on a host than there is for a device; raises HostMemoryError."""
    if units.host_memory is not None:
        _check(units, host_peaks(units, partition, timeline))


def check_host_states(units: Units, partition: Partition, schedule: Schedule) -> None:
    """Refuse a plan whose optimizer states alone need more than a host has for a device; raises HostMemoryError."""
    if units.host_memory is not None:
        _check(units, _states(units, partition, schedule))


def _check(units: Units, peaks: Sequence[float]) -> None:
    """Raise HostMemoryError if a device needs more of its host's memory than there is for it."""
    limit = float(units.host_memory or 0)
    device, most = max(enumerate(peaks), key=lambda peak: peak[1])
    if most > limit:
        raise HostMemoryError(
            f"Device {device} needs {size_words(most)} of its host's memory, which has {size_words(limit)} for it: plan"
            " with less offload, or say in a cluster file how much there is (host_memory).",
            missing=most - limit,
        )


def states_on_host(units: Iterable[Unit]) -> float:
    """Bytes that units whose optimizer the host steps have there: its states, and copies of gradients and weights."""
    return sum(map(_hosted, units))


def _hosted(unit: Unit) -> float:
    """Bytes of a unit on the host: the states that do not stay on the device, and what moves between the two."""
    if unit.on_host is None:
        return 0.0 if unit.states is None else float(unit.states.optimizer)
    left = 0.0 if unit.states is None else float(unit.states.total - unit.on_host.static)
    return left + float(unit.on_host.gradients + unit.on_host.parameters)
