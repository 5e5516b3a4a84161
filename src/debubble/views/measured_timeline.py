"""A measured step as a Timeline: the Program with the starts and ends that really happened."""

from __future__ import annotations

from debubble.ir import InputError, Number, Program, Trace
from debubble.ir.ops import SCHEDULED
from debubble.ir.precedence import predecessors, topological_order
from debubble.ir.program import Moment
from debubble.simulator import Timeline


def measured_timeline(program: Program, trace: Trace) -> Timeline:
    """The typical step of a trace.

    A message that was not timed takes no time, as soon as what it waits for has happened.  Raises InputError if the
    trace is not of this program.
    """
    _check(program, trace)
    events = {event.name: event for event in trace.typical.from_zero().events}
    before = predecessors(program)
    starts: list[Number] = [0] * len(before)
    ends: list[Number] = [0] * len(before)
    for index in topological_order(program.predecessors):
        event = events.get(program.instructions[index].op.name)
        if event is not None:
            starts[index], ends[index] = event.start, event.end
        else:
            happened = (starts[i] if moment is Moment.START else ends[i] for i, moment in before[index])
            starts[index] = ends[index] = max(happened, default=0)
    return Timeline.of(program, starts, ends)


def measured_memory(trace: Trace) -> tuple[tuple[tuple[Number, Number], ...], ...] | None:
    """Per device, the sampled (time, bytes) in the typical step; None if some device has no sample."""
    samples = sorted(trace.typical.from_zero().memory, key=lambda sample: sample.time)
    curves = tuple(tuple((s.time, s.bytes) for s in samples if s.device == d) for d in range(trace.devices))
    return curves if all(curves) else None


def measured_peaks(trace: Trace) -> tuple[Number, ...] | None:
    """Per device, the most bytes sampled in any warm step; None if some device has no sample."""
    samples = [sample for step in trace.warm for sample in step.memory]
    sampled = [[s.bytes for s in samples if s.device == device] for device in range(trace.devices)]
    return tuple(map(max, sampled)) if all(sampled) else None


def _check(program: Program, trace: Trace) -> None:
    if trace.devices != program.devices:
        raise InputError(f"The trace is of {trace.devices} devices, but the plan is for {program.devices}.")
    step = trace.typical
    measured = {event.name for event in step.events}
    planned = {instruction.op.name for instruction in program.instructions}
    if strange := measured - planned:
        raise InputError(f"The trace is not of this plan: it measured {min(strange)}, which the plan does not have.")
    needed = {i.op.name for i in program.instructions if i.op.kind in SCHEDULED}
    if missing := needed - measured:
        raise InputError(f"The trace is not of this plan: step {step.step} did not measure {min(missing)}.")
