"""Event synchronization between the lane threads of one device within one step.

It also knows which instructions may run before it is known whether the step before them is valid: all that no backward
precedes, which are the forwards of the warm-up with their messages, transfers and recomputations.  They change no
parameter and no gradient, so they can run again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from debubble.ir import Instruction, Kind, Lane, Moment, Op, Program
from debubble.ir.trace import TraceEvent
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, Mark
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


def local_waits(program: Program, device: int) -> frozenset[InstructionEvent]:
    """The events that instructions of a device wait for on this device itself."""
    return frozenset(
        (wait.instruction, wait.moment)
        for instruction in program.instructions
        if instruction.device == device
        for wait in instruction.waits
        if program.instructions[wait.instruction].device == device
    )


class StepSynchronizer:
    """Events of one step that lane threads wait for, and the first error of any of them.

    Args:
        program: What all devices run.
        events: Those that instructions of this device wait for here (see `local_waits`).
        lanes: The lanes of this device.
        is_valid: Whether the parameters of the step are valid; asked before the first change of a gradient.
        status: What the lanes do is written there.
    """

    def __init__(
        self,
        program: Program,
        events: Collection[InstructionEvent],
        lanes: CpuLanes | CudaLanes,
        is_valid: Callable[[], bool],
        status: RankStatus,
    ) -> None:
        self._program, self._lanes, self._status = program, lanes, status
        self._is_valid, self._validated, self._valid = is_valid, threading.Event(), False
        self._events = {event: threading.Event() for event in events}
        self._marks: dict[InstructionEvent, Mark] = {}
        self._error: BaseException | None = None
        self.executed: list[ExecutedInstruction] = []
        """Instructions that have run so far, on all lanes."""

    def wait(self, instruction: Instruction) -> None:
        """Return when all that it waits for on this device has happened."""
        for wait in instruction.waits:
            key = wait.instruction, wait.moment
            if key in self._events:
                awaited = self._program.instructions[wait.instruction]
                self._status.waits(instruction, awaited)
                self._events[key].wait()
                self.check()
                self._lanes.wait(self._marks[key], for_memory=awaited.op.kind is Kind.O)

    def validate(self) -> None:
        """Ask, on the compute lane, whether the parameters are valid; the other lanes wait for the answer."""
        if not self._validated.is_set():
            self._valid = self._is_valid()
            self._validated.set()

    def wait_validated(self) -> bool:
        """The answer, as soon as it is there."""
        self._validated.wait()
        self.check()
        return self._valid

    def begin(self, index: int) -> Mark:
        """An instruction starts now, on the caller's lane."""
        mark = self._lanes.mark()
        self._status.runs(self._program.instructions[index])
        self._happens(index, Moment.START, mark)
        return mark

    def unit_done(self, index: int) -> UnitDone | None:
        """What an instruction that others stream with calls behind every unit; None: none does."""
        if (index, Moment.STREAM) not in self._events:
            return None

        def done() -> Wait:
            mark = self._lanes.mark()
            self._streams(index, mark)
            return partial(self._lanes.wait, mark, for_memory=False)

        return done

    def _streams(self, index: int, mark: Mark) -> None:
        """What streams with the instruction may begin: its first unit is done, or all of it."""
        if (index, Moment.STREAM) not in self._marks:
            self._happens(index, Moment.STREAM, mark)

    def end(self, index: int, start: Mark) -> None:
        """An instruction that started then ends now, on the caller's lane."""
        mark = self._lanes.mark()
        instruction = self._program.instructions[index]
        # A receive is the moment of arrival; before it, the lane only waits.
        self.executed.append(ExecutedInstruction(instruction, mark if instruction.lane is Lane.RECV else start, mark))
        self._status.ended(instruction)
        self._streams(index, mark)
        self._happens(index, Moment.END, mark)

    def guard(self, task: Callable[[], None]) -> None:
        """Run the task; an error of it ends the step on all lanes."""
        try:
            task()
        except BaseException as error:
            if self._error is None:
                self._error = error
            self._validated.set()
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

    def _happens(self, index: int, moment: Moment, mark: Mark) -> None:
        key = index, moment
        if key in self._events:
            self._marks[key] = mark
            self._events[key].set()


BINDING = (Kind.B, Kind.I, Kind.W, Kind.G, Kind.D, Kind.S)
"""Kinds that change gradients or parameters."""


def speculative_instructions(program: Program) -> frozenset[int]:
    """Indices of instructions that precede every gradient change on all ranks; a message with both its ends."""
    followers: list[list[int]] = [[] for _ in program.instructions]
    pending: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for wait in instruction.waits:
            followers[wait.instruction].append(index)
        kind, stage, j = instruction.op
        if kind in BINDING or (kind in (Kind.O, Kind.L) and instruction.peer is not None):
            pending.append(index)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            # A message is sent only if it is received, else the sender would wait.
            send = Op(Kind.SEND_F, stage - 1, j) if kind is Kind.RECV_F else Op(Kind.SEND_B, stage + 1, j)
            followers[index].append(program.index[send])
    for queue in program.queues:
        for earlier, later in itertools.pairwise(queue.instructions):
            followers[earlier].append(later)
    binding = set(pending)
    for index in pending:
        for follower in followers[index]:
            if follower not in binding:
                binding.add(follower)
                pending.append(follower)
    return frozenset(range(len(program.instructions))) - binding
