"""A Trace: the measurements of a run, under the names of the Program's operations.

Every step has one event per instruction of its Program, on the instruction's device and lane, samples of each device's
memory, and phases before and after the program (data, updates).  Times are seconds from the start of the step, on one
clock for all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from debubble.argument_types import with_checked_types
from debubble.errors import InputError
from debubble.files import decode_versioned, read_file, write_whole
from debubble.ir.ops import Lane, Op

VERSION = 1


class TraceEvent(NamedTuple):
    """One executed operation: `name` is the Program's, such as `2F5` or `2RECV_F5`; times in seconds."""

    name: str
    device: int
    lane: Lane
    start: float
    end: float


class TracePhase(NamedTuple):
    """A device's work before or after its program, such as `updates parameters`; times in seconds."""

    what: str
    device: int
    start: float
    end: float


class MemorySample(NamedTuple):
    """The bytes in use on a device from `time` (seconds) on, including static memory."""

    device: int
    time: float
    bytes: float


class UnitTime(NamedTuple):
    """Median seconds, over micro-batches, of consecutive units within a stage's operations of a kind.

    A forward (F) is measured per unit; a backward (B or I) per group of units that recompute together, and per run of
    units without recomputation.
    """

    kind: str
    stage: int
    first: int
    """Index of the first unit within the stage."""
    length: int
    """Number of units."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """One training step on all devices."""

    step: int
    events: tuple[TraceEvent, ...]
    memory: tuple[MemorySample, ...] = ()
    phases: tuple[TracePhase, ...] = ()
    units: tuple[UnitTime, ...] = ()
    """The times of units, if the run measured them."""

    @cached_property
    def start(self) -> float:
        """The first start of an event, in seconds."""
        return min(event.start for event in self.events)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of an event."""
        return max(event.end for event in self.events) - self.start

    @property
    def seconds(self) -> float:
        """Seconds of the full step, including the phases before and after the program."""
        starts = [event.start for event in self.events] + [phase.start for phase in self.phases]
        ends = [event.end for event in self.events] + [phase.end for phase in self.phases]
        return max(ends) - min(starts)

    def from_zero(self) -> TraceStep:
        """A copy of the step whose first event is at time 0."""
        zero = self.start
        return TraceStep(
            step=self.step,
            events=tuple(e._replace(start=e.start - zero, end=e.end - zero) for e in self.events),
            memory=tuple(s._replace(time=s.time - zero) for s in self.memory),
            phases=tuple(p._replace(start=p.start - zero, end=p.end - zero) for p in self.phases),
            units=self.units,
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The measured steps of one run, or one device's events of them (see `join`)."""

    devices: int
    steps: tuple[TraceStep, ...]
    cores: int | None = None
    """CPU cores that the devices shared, if they were processes on one machine without GPUs."""

    @property
    def warm(self) -> tuple[TraceStep, ...]:
        """The steps after the warm-up: all but step 0, if there are others.

        Step 0 begins without gradients and optimizer states, so it needs less memory, and it includes allocation and
        compilation.
        """
        return tuple(step for step in self.steps if step.step) or self.steps

    @property
    def typical(self) -> TraceStep:
        """The warm step with the median makespan."""
        return sorted(self.warm, key=lambda step: step.makespan)[len(self.warm) // 2]

    @staticmethod
    def join(traces: Sequence[Trace]) -> Trace:
        """Join traces of different devices of the same steps, on one clock.

        Every step of the result starts at time 0.
        """
        steps: dict[int, list[TraceStep]] = {}
        for trace in traces:
            for step in trace.steps:
                steps.setdefault(step.step, []).append(step)
        return Trace(
            devices=max(trace.devices for trace in traces),
            steps=tuple(_join(number, pieces) for number, pieces in sorted(steps.items())),
        )

    @with_checked_types()
    def save(self, path: str | Path) -> None:
        """Write the trace file atomically."""
        write_whole(Path(path), self.to_json())

    def to_json(self) -> bytes:
        """The trace file's content, which devices also exchange to join their traces."""
        file = _TraceFile(debubble_trace=VERSION, devices=self.devices, steps=list(self.steps), cores=self.cores)
        return msgspec.json.encode(file) + b"\n"

    @staticmethod
    @with_checked_types()
    def load(path: str | Path) -> Trace:
        """Read a trace file.  Raises InputError if it is another file, truncated, or of an unknown version."""
        return Trace.from_json(read_file(Path(path), "trace file"), name=str(path))

    @staticmethod
    def from_json(content: bytes, *, name: str = "This") -> Trace:
        """Decode a trace file's content; `name` begins the message of an InputError."""
        advice = "measure again with `debubble train`"
        file = decode_versioned(content, _TraceFile, kind="trace", name=name, version=VERSION, advice=advice)
        trace = Trace(devices=file.devices, steps=tuple(file.steps), cores=file.cores)
        _check(trace, name)
        return trace


class _TraceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    debubble_trace: int
    devices: int
    steps: list[TraceStep]
    cores: Annotated[int, msgspec.Meta(ge=1, le=10**6)] | None = None


def _join(number: int, pieces: Sequence[TraceStep]) -> TraceStep:
    return TraceStep(
        step=number,
        events=tuple(event for piece in pieces for event in piece.events),
        memory=tuple(sample for piece in pieces for sample in piece.memory),
        phases=tuple(phase for piece in pieces for phase in piece.phases),
        units=tuple(unit for piece in pieces for unit in piece.units),
    ).from_zero()


def _check(trace: Trace, name: str) -> None:
    if not trace.steps:
        raise InputError(f"{name} holds no measured step.")
    for step in trace.steps:
        if not step.events:
            raise InputError(f"{name} has no events in step {step.step}.")
        for event in step.events:
            try:
                Op.parse(event.name)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            if event.end < event.start:
                raise InputError(f"{name} has {event.name} end before it starts, in step {step.step}.")
        devices = {e.device for e in step.events} | {s.device for s in step.memory} | {p.device for p in step.phases}
        for device in devices:
            if not 0 <= device < trace.devices:
                raise InputError(f"{name} has events of device {device}, but says it has {trace.devices} devices.")
