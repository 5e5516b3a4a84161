"""Synchronization of the lane threads of one device within one step.

It also knows which instructions may run before it is known whether the step before them stands: all that no backward
precedes, which are the forwards of the warm-up with their messages, transfers and recomputations.  They change no
parameter and no gradient, so they can run again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from debubble.ir import Instruction, Kind, Lane, Moment, Op, Program
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, Mark
from debubble.runtime.execution.status import Activity


class Ran(NamedTuple):
    """An instruction that ran, from when to when."""

    instruction: Instruction
    start: Mark
    end: Mark


Awaited = tuple[int, Moment]
"""The start or the end of an instruction, by its index."""


def awaited_on(program: Program, device: int) -> frozenset[Awaited]:
    """The moments that instructions of a device wait for on this device itself."""
    return frozenset(
        (wait.instruction, wait.moment)
        for instruction in program.instructions
        if instruction.device == device
        for wait in instruction.waits
        if program.instructions[wait.instruction].device == device
    )


class Moments:
    """Which moments of one step have come, and the first error."""

    def __init__(
        self,
        program: Program,
        awaited: Collection[Awaited],
        lanes: CpuLanes | CudaLanes,
        stands: Callable[[], bool],
        activity: Activity,
    ) -> None:
        self._program, self._lanes, self._activity = program, lanes, activity
        self._stands, self._asked, self._answer = stands, threading.Event(), False
        self._moments = {moment: threading.Event() for moment in awaited}
        self._marks: dict[Awaited, Mark] = {}
        self._error: BaseException | None = None
        self.events: list[Ran] = []

    def wait(self, instruction: Instruction) -> None:
        """Return when all that it waits for on this device has happened."""
        for wait in instruction.waits:
            key = wait.instruction, wait.moment
            if key in self._moments:
                awaited = self._program.instructions[wait.instruction]
                self._activity.waits(instruction, awaited)
                self._moments[key].wait()
                self.check()
                self._lanes.wait(self._marks[key], for_memory=awaited.op.kind is Kind.O)

    def ask(self) -> None:
        """On the compute lane: whether the step goes on; the other lanes wait for the answer."""
        if not self._asked.is_set():
            self._answer = self._stands()
            self._asked.set()

    def goes_on(self) -> bool:
        """The answer, as soon as it is there."""
        self._asked.wait()
        self.check()
        return self._answer

    def begin(self, index: int) -> Mark:
        mark = self._lanes.mark()
        self._activity.runs(self._program.instructions[index])
        self._reached(index, Moment.START, mark)
        return mark

    def end(self, index: int, start: Mark) -> None:
        mark = self._lanes.mark()
        instruction = self._program.instructions[index]
        # A receive is the moment of arrival; before it, the lane only waits.
        self.events.append(Ran(instruction, mark if instruction.lane is Lane.RECV else start, mark))
        self._activity.ended(instruction)
        self._reached(index, Moment.END, mark)

    def guarded(self, work: Callable[[], None]) -> None:
        """Do the work; an error of it, or of any other lane, ends the step."""
        try:
            work()
        except BaseException as error:
            if self._error is None:
                self._error = error
            self._asked.set()
            for moment in self._moments.values():
                moment.set()

    def join(self, done: threading.Event) -> None:
        """Wait for a lane's end, or for an error: then lanes that wait for peers may never end."""
        while not done.wait(0.2):
            self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _reached(self, index: int, moment: Moment, mark: Mark) -> None:
        key = index, moment
        if key in self._moments:
            self._marks[key] = mark
            self._moments[key].set()


BINDING = (Kind.B, Kind.I, Kind.W, Kind.G, Kind.D, Kind.S)
"""What changes gradients or parameters."""


def ahead_of_gradients(program: Program) -> frozenset[int]:
    """Those instructions; the same on every rank, and with every message both its ends."""
    after: list[list[int]] = [[] for _ in program.instructions]
    found: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for wait in instruction.waits:
            after[wait.instruction].append(index)
        kind, stage, j = instruction.op
        if kind in BINDING or (kind in (Kind.O, Kind.L) and instruction.peer is not None):
            found.append(index)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            # A message is sent only if it is received, else the sender would wait.
            send = Op(Kind.SEND_F, stage - 1, j) if kind is Kind.RECV_F else Op(Kind.SEND_B, stage + 1, j)
            after[index].append(program.index[send])
    for queue in program.queues:
        for earlier, later in itertools.pairwise(queue.instructions):
            after[earlier].append(later)
    bound = set(found)
    for index in found:
        for other in after[index]:
            if other not in bound:
                bound.add(other)
                found.append(other)
    return frozenset(range(len(program.instructions))) - bound
