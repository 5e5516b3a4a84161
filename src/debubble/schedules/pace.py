"""When the operations of a schedule start and end, whatever the memory limit."""

from __future__ import annotations

from debubble.ir import Number, Op, Schedule, StageCosts
from debubble.simulator import simulate

Times = dict[Op, Number]


def paced(schedule: Schedule, costs: StageCosts) -> tuple[Times, Times]:
    """Start and end of every compute operation."""
    timeline = simulate(schedule, costs.with_limit(None))
    operations = [o for lane in timeline.compute for o in lane]
    return {o.op: o.start for o in operations}, {o.op: o.end for o in operations}
