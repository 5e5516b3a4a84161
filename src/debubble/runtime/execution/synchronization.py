"""Event synchronization between the lane threads of one device within one step."""

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
    """An instruction that ran, from when to when."""

    instruction: Instruction
    start: Mark
    end: Mark


def trace_events(
    executed: Sequence[ExecutedInstruction], lanes: CpuLanes | CudaLanes, *, device: int, origin: float
) -> tuple[TraceEvent, ...]:
    """The events of one device's part of a step, in seconds since the origin on the host's clock."""
    times = lanes.seconds([mark for _, *marks in executed for mark in marks])
    return tuple(
        TraceEvent(instruction.op.name, device, instruction.lane, start - origin, end - origin)
        for (instruction, _, _), start, end in zip(executed, times[::2], times[1::2], strict=True)
    )


InstructionEvent = tuple[int, Moment]
"""A moment of an instruction, by its index: a STREAM is here when the first of its units is done."""


class ReloadAllocation(NamedTuple):
    """The buffer of a reload on the device, which the compute lane allocates at a moment of an instruction.

    Its memory is thus that of the compute lane's own pool, and free at that moment on the device as well.
    """

    reload: Op
    moment: Moment
    offloads: tuple[InstructionEvent, ...]
    """Offloads that have to end first: where one is late, the reload's lane allocates the buffer."""


class LaneInstruction(NamedTuple):
    """An instruction as its lane's thread runs it."""

    number: int
    instruction: Instruction
    execute: Execute
    waits: tuple[tuple[InstructionEvent, Instruction], ...]
    """The events of other lanes of this device that it waits for, each with its instruction."""
    completes: tuple[Op, ...]
    """Each G and D whose gradients are complete after it."""
    posts: tuple[Instruction, ...]
    """Sends that its lane begins after it."""
    receives: tuple[Instruction, ...] = ()
    """The messages that its lane receives before it."""
    reloads: tuple[ReloadAllocation, ...] = ()
    """The reloads whose buffers the compute lane allocates at one of its moments."""
    previous_on_link: Instruction | None = None
    """The transfer of another device that its shared link serves right before it."""


class StepSynchronizer:
    """Events of one step that lane threads wait for, and the first error of any of them.

    Args:
        events: Those that instructions of a lane of this device wait for, of other lanes.
        lanes: The lanes of this device.
        status: What the lanes do is written there.
    """

    def __init__(self, events: Collection[InstructionEvent], lanes: CpuLanes | CudaLanes, status: RankStatus) -> None:
        self._lanes, self._status = lanes, status
        self._events = {event: threading.Event() for event in events}
        self._marks: dict[InstructionEvent, Mark] = {}
        self._error: BaseException | None = None
        self.executed: list[ExecutedInstruction] = []
        """Instructions that have run so far, on all lanes."""

    def has_happened(self, event: InstructionEvent) -> bool:
        """Tell whether an event that instructions of other lanes wait for has happened."""
        return self._events[event].is_set()

    def wait(self, item: LaneInstruction) -> None:
        """Return when all that it waits for on this device has happened."""
        for event, awaited in item.waits:
            happened = self._events[event]
            if not happened.is_set():
                self._status.waits(item.instruction, awaited)
                happened.wait()
            self.check()
            self._lanes.wait(self._marks[event], for_memory=awaited.op.kind is Kind.O)

    def begin(self, item: LaneInstruction) -> Mark:
        """An instruction starts now, on the caller's lane."""
        mark = self._lanes.mark()
        self._status.runs(item.instruction)
        self.happens((item.number, Moment.START), mark)
        return mark

    def unit_done(self, item: LaneInstruction) -> UnitDone | None:
        """The callback after every unit of an instruction that others stream with; None: none does."""
        event = item.number, Moment.STREAM
        if event not in self._events:
            return None

        def done() -> Wait:
            mark = self._lanes.mark()
            self._streams(event, mark)
            return partial(self._lanes.wait, mark, for_memory=False)

        return done

    def end(self, item: LaneInstruction, start: Mark) -> None:
        """An instruction that started then ends now, on the caller's lane."""
        mark = self._lanes.mark()
        instruction = item.instruction
        # A receive is the moment of arrival; before it, the lane only waits.
        self.executed.append(ExecutedInstruction(instruction, mark if instruction.lane is Lane.RECV else start, mark))
        self._status.ended(instruction)
        self._streams((item.number, Moment.STREAM), mark)
        self.happens((item.number, Moment.END), mark)

    @contextmanager
    def receiving(self, message: Instruction, item: LaneInstruction) -> Iterator[None]:
        """Enter the context in which an instruction's own lane waits for a message to it."""
        self._status.waits(item.instruction, message)
        yield
        mark = self._lanes.mark()
        self.executed.append(ExecutedInstruction(message, mark, mark))

    def posted(self, send: Instruction, start: Mark) -> None:
        """A message that the transport was handed since then is on its way."""
        self.executed.append(ExecutedInstruction(send, start, self._lanes.mark()))

    def guard(self, task: Callable[[], None]) -> None:
        """Run the task; an error of it ends the step on all lanes."""
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
        """Wait for a lane's end, or for an error: then lanes that wait for peers may never end."""
        while not end.wait(0.2):
            self.check()

    def check(self) -> None:
        """Raise the first error of any lane."""
        if self._error is not None:
            raise self._error

    def _streams(self, event: InstructionEvent, mark: Mark) -> None:
        """Let the operations that stream with the instruction begin: its first unit is done, or all of it."""
        if event in self._events and event not in self._marks:
            self.happens(event, mark)

    def happens(self, event: InstructionEvent, mark: Mark) -> None:
        """A moment of an instruction is here."""
        happened = self._events.get(event)
        if happened is not None:
            self._marks[event] = mark
            happened.set()
