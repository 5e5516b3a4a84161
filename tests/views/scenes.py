"""Plans and traces that the view tests share."""

from __future__ import annotations

import debubble as db
from debubble.ir import MemorySample, Plan, PlannedUnit, StageCosts, Trace, TraceEvent, TraceStep


def small_plan(*, schedule: str = "1f1b", devices: int = 2, chunks: int = 1, **costs: object) -> Plan:
    """Four micro-batches; forward 1, backward 2 and messages 1 unless told otherwise."""
    built = db.schedules[schedule](devices=devices, micro_batches=4, chunks=chunks)
    given = {"communication": 1, "memory_limit": 6, "static": 1, **costs}
    return Plan(
        planner="hand",
        schedule=built,
        costs=StageCosts.of(stages=built.stages, **given),  # type: ignore[arg-type]
        lower_bound=0,
        partition=tuple((PlannedUnit("stage", s),) for s in range(built.stages)),
    )


def trace_of(plan: Plan, *, slower: float = 1.0, samples: bool = True) -> Trace:
    """What a run that takes `slower` times as long as planned measures; its step starts at second 100."""
    timeline = plan.simulate()
    events = tuple(
        TraceEvent(o.name, o.device, o.lane, 100 + slower * float(o.start), 100 + slower * float(o.end))
        for o in timeline.operations
    )
    memory = tuple(
        MemorySample(device, 100 + slower * float(time), 2 * float(held))
        for device, curve in enumerate(timeline.memory)
        for time, held in curve
    )
    step = TraceStep(step=5, events=events, memory=memory if samples else ())
    return Trace(devices=plan.devices, steps=(step,))
