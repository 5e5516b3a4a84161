"""What each lane of a rank does at the moment, for whoever asks while the rank itself cannot answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from debubble.ir import Instruction, Lane

MESSAGES = (Lane.SEND, Lane.RECV)


class Doing(NamedTuple):
    """An instruction that runs, or that waits for another one to end first."""

    instruction: Instruction
    awaited: Instruction | None = None

    def __str__(self) -> str:
        op = self.instruction.op
        where = f"{_name(self.instruction)}, micro-batch {op.micro_batch}"
        return f"is in {where}" if self.awaited is None else f"waits in {where}, for {_name(self.awaited)}"

    @property
    def waits(self) -> bool:
        """Whether it can only go on when something else has happened."""
        return self.awaited is not None or self.instruction.lane in MESSAGES or self.instruction.peer is not None


class Phase(NamedTuple):
    """What a rank was at outside the program, in seconds on the host's clock."""

    what: str
    start: float
    end: float


class Activity:
    """Written by the lanes' threads, read by any other."""

    def __init__(self) -> None:
        self.moved = 0
        """Grows whenever something begins or ends."""
        self._phase, self._own = "starts", True
        self._lanes: dict[tuple[Lane, int | None], Doing] = {}
        self.phases: list[Phase] = []
        """What this rank was at before and after the program of the step."""
        self._ran = False

    def begin_step(self) -> None:
        """Forget the phases of the step before, if its program has run."""
        if self._ran:
            self.phases, self._ran = [], False

    @contextmanager
    def during(self, phase: str, *, own: bool) -> Iterator[None]:
        """Enter a phase, and note how long it takes."""
        self.enter(phase, own=own)
        start = perf_counter()
        yield
        self.phases.append(Phase(phase, start, perf_counter()))

    def enter(self, phase: str, *, own: bool) -> None:
        """Outside the program: what this rank does, such as `reads data`; `own` if it waits for no other rank."""
        self._phase, self._own = phase, own
        self._lanes.clear()
        self.moved += 1

    def runs(self, instruction: Instruction) -> None:
        self._lanes[_lane(instruction)] = Doing(instruction)
        self._ran = True
        self.moved += 1

    def waits(self, instruction: Instruction, awaited: Instruction) -> None:
        self._lanes[_lane(instruction)] = Doing(instruction, awaited)

    def ended(self, instruction: Instruction) -> None:
        self._lanes.pop(_lane(instruction), None)
        self.moved += 1

    @property
    def own(self) -> bool:
        """Whether the rank is at something of its own, and waits for no other rank."""
        lanes = list(self._lanes.values())
        return any(not doing.waits for doing in lanes) if lanes else self._own

    def __str__(self) -> str:
        """Such as `waits in 1B0, micro-batch 0, for 1RECV_B0 from device 2`: the compute lane, else another one."""
        lanes = sorted(self._lanes.items(), key=lambda item: (item[0][0] is not Lane.COMPUTE, not item[1].waits))
        return str(lanes[0][1]) if lanes else self._phase


def _lane(instruction: Instruction) -> tuple[Lane, int | None]:
    return instruction.lane, instruction.peer if instruction.lane in MESSAGES else None


def _name(instruction: Instruction) -> str:
    if instruction.peer is None:
        return instruction.op.name
    direction = "from" if instruction.lane is Lane.RECV else "to"
    return f"{instruction.op.name} {direction} device {instruction.peer}"
