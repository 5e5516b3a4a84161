"""The bubble of a running pipeline, from each device's work in a step, without gathering its whole trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from debubble.ir import Lane, Op
from debubble.ir.trace import TraceEvent
from debubble.simulator.timeline import BUSY_KINDS


class DeviceWork(NamedTuple):
    """Work of one device in one step, in seconds."""

    busy: float
    """Computing time, recomputation included."""
    start: float
    """First start on any lane."""
    end: float
    """Last end on any lane."""

    @staticmethod
    def of(events: Sequence[TraceEvent]) -> DeviceWork:
        """The work in a device's own events."""
        computing = [e for e in events if e.lane is Lane.COMPUTE and Op.parse(e.name).kind in BUSY_KINDS]
        busy = sum(e.end - e.start for e in computing)
        return DeviceWork(busy, min(e.start for e in events), max(e.end for e in events))


NO_WORK = DeviceWork(0.0, 0.0, 0.0)


def bubble_fraction(devices: Sequence[DeviceWork]) -> float:
    """1 - busy / (devices x makespan), as a timeline has it."""
    makespan = max(d.end for d in devices) - min(d.start for d in devices)
    return 1 - sum(d.busy for d in devices) / (len(devices) * makespan)
