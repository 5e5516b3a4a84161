"""Thread-safe status of a rank, read by the watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from debubble.ir import Instruction, Lane

MESSAGES = (Lane.SEND, Lane.RECV)


class LaneStatus(NamedTuple):
    """An instruction that runs, or waits for another one to end."""

    instruction: Instruction
    awaited: Instruction | None = None

    def __str__(self) -> str:
        op = self.instruction.op
        where = f"{_name(self.instruction)}, micro-batch {op.micro_batch}"
        return f"is in {where}" if self.awaited is None else f"waits in {where}, for {_name(self.awaited)}"

    @property
    def waits(self) -> bool:
        """True if it waits for another instruction, or for a message."""
        return self.awaited is not None or self.instruction.lane in MESSAGES or self.instruction.peer is not None


class Phase(NamedTuple):
    """A part of a step outside the program."""

    name: str
    start: float
    """Seconds on the host's clock."""
    end: float


CALLER = "runs the training loop"
"""The phase between calls of the pipeline."""


class RankStatus:
    """The status of a rank, written by its lanes' threads and read by others."""

    def __init__(self) -> None:
        self.progress = 0
        """Increases whenever an instruction or phase begins or ends."""
        self.phases: list[Phase] = []
        """Phases of the step before and after its program."""
        self._phase, self._phase_is_local = "starts", True
        self._lanes: dict[tuple[Lane, int | None], LaneStatus] = {}
        self._program_ran = False

    def begin_step(self) -> None:
        """Forget the phases of the previous step, if its program has run."""
        if self._program_ran:
            self.phases, self._program_ran = [], False

    @contextmanager
    def phase(self, name: str, *, local: bool) -> Iterator[None]:
        """Enter a phase, and record its times."""
        self.enter(name, local=local)
        start = perf_counter()
        yield
        self.phases.append(Phase(name, start, perf_counter()))
        self.leave()

    def enter(self, name: str, *, local: bool) -> None:
        """Enter a phase outside the program, such as `reads data`; `local` if it waits for no other rank."""
        self._phase, self._phase_is_local = name, local
        self._lanes.clear()
        self.progress += 1

    def leave(self) -> None:
        """End a phase; the caller's phase follows, unless another is entered."""
        self._phase, self._phase_is_local = CALLER, True
        self.progress += 1

    def runs(self, instruction: Instruction) -> None:
        """Note that a lane begins an instruction."""
        self._lanes[_lane(instruction)] = LaneStatus(instruction)
        self._program_ran = True
        self.progress += 1

    def waits(self, instruction: Instruction, awaited: Instruction) -> None:
        """Note that a lane waits in an instruction for another one."""
        self._lanes[_lane(instruction)] = LaneStatus(instruction, awaited)

    def ended(self, instruction: Instruction) -> None:
        """Note that a lane has ended an instruction."""
        self._lanes.pop(_lane(instruction), None)
        self.progress += 1

    @property
    def local(self) -> bool:
        """True if the rank waits for no other rank."""
        lanes = list(self._lanes.values())
        return any(not lane.waits for lane in lanes) if lanes else self._phase_is_local

    def __str__(self) -> str:
        """The compute lane's status, else another's: `waits in 1B0, micro-batch 0, for 1RECV_B0 from device 2`."""
        lanes = sorted(self._lanes.items(), key=lambda item: (item[0][0] is not Lane.COMPUTE, not item[1].waits))
        return str(lanes[0][1]) if lanes else self._phase


def _lane(instruction: Instruction) -> tuple[Lane, int | None]:
    return instruction.lane, instruction.peer if instruction.lane in MESSAGES else None


def _name(instruction: Instruction) -> str:
    if instruction.peer is None:
        return instruction.op.name
    direction = "from" if instruction.lane is Lane.RECV else "to"
    return f"{instruction.op.name} {direction} device {instruction.peer}"
