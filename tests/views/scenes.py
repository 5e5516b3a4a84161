"""Plans and traces shared by the tests of views."""

from __future__ import annotations

from dataclasses import replace

import debubble as db
from debubble.ir import MemorySample, PlannedUnit, StageCosts, Trace, TraceEvent, TraceStep
from debubble.ir.trace import TracePhase
from debubble.plans import Plan


def small_plan(*, schedule: str = "1f1b", devices: int = 2, chunks: int = 1, **costs: object) -> Plan:
    """Four micro-batches with forward 1, backward 2 and messages 1 by default."""
    built = db.schedules[schedule](devices=devices, micro_batches=4, chunks=chunks)
    cost_options = {"communication": 1, "memory_limit": 6, "static": 1, **costs}
    return Plan(
        planner="hand",
        schedule=built,
        costs=StageCosts.of(stages=built.stages, **cost_options),  # type: ignore[arg-type]
        lower_bound=0,
        partition=tuple((PlannedUnit("stage", s),) for s in range(built.stages)),
    )


def trace_of(plan: Plan, *, slower: float = 1.0, samples: bool = True) -> Trace:
    """Trace of a run that is `slower` times as slow as planned; its step starts at second 100."""
    timeline = plan.simulate()
    events = tuple(
        TraceEvent(o.name, o.device, o.lane, 100 + slower * float(o.start), 100 + slower * float(o.end))
        for o in timeline.operations
    )
    memory = tuple(
        MemorySample(device, 100 + slower * float(time), 2 * float(bytes_in_use))
        for device, curve in enumerate(timeline.memory)
        for time, bytes_in_use in curve
    )
    step = TraceStep(step=5, events=events, memory=memory if samples else ())
    return Trace(devices=plan.devices, steps=(step,))


def surrounded(plan: Plan) -> Trace:
    """A run as planned, with 2 s of data loading that ends 1 s before the programs, and an update after one."""
    (step,) = trace_of(plan).steps
    end = max(event.end for event in step.events)
    data = [TracePhase("reads data", device, 97.0, 99.0) for device in range(2)]
    phases = (*data, TracePhase("updates", 1, end, end + 5))
    return Trace(devices=plan.devices, steps=(replace(step, phases=phases),))
