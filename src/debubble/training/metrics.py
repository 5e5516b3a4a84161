"""How much of a step a device computed: the bubble of a running pipeline, without gathering its whole trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from debubble.ir import Lane, Op
from debubble.ir.trace import TraceEvent
from debubble.simulator.timeline import WORK


class Computed(NamedTuple):
    """Of one device in one step, in seconds: its computing time, its first start and its last end on any lane."""

    busy: float
    start: float
    end: float

    @staticmethod
    def of(events: Sequence[TraceEvent]) -> Computed:
        """Of a device's own events."""
        computing = [e for e in events if e.lane is Lane.COMPUTE and Op.parse(e.name).kind in WORK]
        busy = sum(e.end - e.start for e in computing)
        return Computed(busy, min(e.start for e in events), max(e.end for e in events))


NOTHING = Computed(0.0, 0.0, 0.0)


def bubble_fraction(devices: Sequence[Computed]) -> float:
    """1 - busy / (devices x makespan), as a timeline has it."""
    makespan = max(d.end for d in devices) - min(d.start for d in devices)
    return 1 - sum(d.busy for d in devices) / (len(devices) * makespan)
