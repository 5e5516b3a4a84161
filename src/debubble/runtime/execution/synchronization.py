"""Events between the lane threads of one device within a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from debubble.ir import Instruction, Kind, Lane, Moment, Op
from debubble.ir.trace import TraceEvent
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, Mark
from debubble.runtime.execution.operations import Execute
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.memory.activations import Wait
from debubble.runtime.models.stage import UnitDone


class ExecutedInstruction(NamedTuple):
    """An executed instruction with its start and end."""

    instruction: Instruction
    start: Mark
    end: Mark


def trace_events(
    executed: Sequence[ExecutedInstruction], lanes: CpuLanes | CudaLanes, *, device: int, origin: float
) -> tuple[TraceEvent, ...]:
    """The trace events of one device's step, in seconds since the origin on the host's clock."""
    times = lanes.seconds([mark for _, *marks in executed for mark in marks])
    return tuple(
        TraceEvent(instruction.op.name, device, instruction.lane, start - origin, end - origin)
        for (instruction, _, _), start, end in zip(executed, times[::2], times[1::2], strict=True)
    )


InstructionEvent = tuple[int, Moment]
"""Index and moment of an instruction; STREAM happens when its first unit is done."""


class ReloadAllocation(NamedTuple):
    """The allocation of a reload's buffer by the compute lane, at a moment of an instruction.

    So the buffer is from the compute lane's pool, and its memory is free on the device at that moment.
    """

    reload: Op
    moment: Moment
    offloads: tuple[InstructionEvent, ...]
    """Offloads that have to end first; if one is late, the reload's lane allocates the buffer."""


class LaneInstruction(NamedTuple):
    """An instruction of a lane, with what its thread does before and after it."""

    number: int
    instruction: Instruction
    execute: Execute
    waits: tuple[tuple[InstructionEvent, Instruction], ...]
    """Events on other lanes of this device that it waits for, with their instructions."""
    completes: tuple[Op, ...]
    """The G and D operations whose gradients are complete after it."""
    posts: tuple[Instruction, ...]
    """Sends that its lane posts after it."""
    receives: tuple[Instruction, ...] = ()
    """Messages that its lane receives before it."""
    reloads: tuple[ReloadAllocation, ...] = ()
    """Reload buffers that the compute lane allocates at its start or end."""
    previous_on_link: Instruction | None = None
    """The transfer of another device that the shared link serves right before it."""


class StepSynchronizer:
    """The events of one step that lane threads wait for, and the first error of any lane.

    Args:
        events: The events that instructions of this device wait for on other lanes.
        lanes: The lanes of this device.
        status: Records what the lanes do.
    """

    def __init__(self, events: Collection[InstructionEvent], lanes: CpuLanes | CudaLanes, status: RankStatus) -> None:
        self._lanes, self._status = lanes, status
        self._events = {event: threading.Event() for event in events}
        self._marks: dict[InstructionEvent, Mark] = {}
        self._error: BaseException | None = None
        self.executed: list[ExecutedInstruction] = []
        """Instructions executed so far on all lanes."""

    def has_happened(self, event: InstructionEvent) -> bool:
        """Tell whether an event has happened."""
        return self._events[event].is_set()

    def wait(self, item: LaneInstruction) -> None:
        """Return when all local events that an instruction waits for have happened."""
        for event, awaited in item.waits:
            happened = self._events[event]
            if not happened.is_set():
                self._status.waits(item.instruction, awaited)
                happened.wait()
            self.check()
            self._lanes.wait(self._marks[event], for_memory=awaited.op.kind is Kind.O)

    def begin(self, item: LaneInstruction) -> Mark:
        """Mark the start of an instruction on the caller's lane."""
        mark = self._lanes.mark()
        self._status.runs(item.instruction)
        self.happens((item.number, Moment.START), mark)
        return mark

    def unit_done(self, item: LaneInstruction) -> UnitDone | None:
        """The callback after every unit of an instruction that transfers stream with; None if none does."""
        event = item.number, Moment.STREAM
        if event not in self._events:
            return None

        def done() -> Wait:
            mark = self._lanes.mark()
            self._streams(event, mark)
            return partial(self._lanes.wait, mark, for_memory=False)

        return done

    def end(self, item: LaneInstruction, start: Mark) -> None:
        """Mark the end of an instruction on the caller's lane."""
        mark = self._lanes.mark()
        instruction = item.instruction
        # A receive is recorded as its moment of arrival: before it, the lane only waits.
        self.executed.append(ExecutedInstruction(instruction, mark if instruction.lane is Lane.RECV else start, mark))
        self._status.ended(instruction)
        self._streams((item.number, Moment.STREAM), mark)
        self.happens((item.number, Moment.END), mark)

    @contextmanager
    def receiving(self, message: Instruction, item: LaneInstruction) -> Iterator[None]:
        """Context in which the lane of an instruction waits for its message."""
        self._status.waits(item.instruction, message)
        yield
        mark = self._lanes.mark()
        self.executed.append(ExecutedInstruction(message, mark, mark))

    def posted(self, send: Instruction, start: Mark) -> None:
        """Record a send that was posted since `start`."""
        self.executed.append(ExecutedInstruction(send, start, self._lanes.mark()))

    def guard(self, task: Callable[[], None]) -> None:
        """Run the task; its error ends the step on all lanes."""
        try:
            task()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the step with this error, on all lanes."""
        if self._error is None:
            self._error = error
        for event in self._events.values():
            event.set()

    def join(self, end: threading.Event) -> None:
        """Wait until a lane ends, or raise an error, after which lanes that wait for peers may never end."""
        while not end.wait(0.2):
            self.check()

    def check(self) -> None:
        """Raise the first error of any lane."""
        if self._error is not None:
            raise self._error

    def _streams(self, event: InstructionEvent, mark: Mark) -> None:
        """Signal the STREAM event once, when the first unit or the whole instruction is done."""
        if event in self._events and event not in self._marks:
            self.happens(event, mark)

    def happens(self, event: InstructionEvent, mark: Mark) -> None:
        """Signal an event, if any instruction waits for it."""
        happened = self._events.get(event)
        if happened is not None:
            self._marks[event] = mark
            happened.set()
