"""A Program: a Schedule with everything implicit made explicit.

Every message, every lane, and every point at which one operation waits for another is written out, with its time
and its effect on memory.  The simulator interprets it with these numbers, the runtime with tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from debubble.ir.costs import Number, StageCosts
from debubble.ir.ops import Lane, Op
from debubble.ir.schedule import Schedule


class Moment(Enum):
    """When something happens relative to an operation."""

    START = "start"
    END = "end"

    __hash__ = object.__hash__


class Wait(NamedTuple):
    """The waiting operation starts no earlier than this moment of another instruction."""

    instruction: int
    moment: Moment = Moment.END


class Effect(NamedTuple):
    """Change of a device's memory, in bytes, at this moment of the operation."""

    device: int
    moment: Moment
    change: Number


class Instruction(NamedTuple):
    """One operation on one lane, after its waits and the instruction before it in its queue."""

    op: Op
    device: int
    lane: Lane
    duration: Number
    waits: tuple[Wait, ...] = ()
    effects: tuple[Effect, ...] = ()
    peer: int | None = None
    """The other device of a message or swap."""


class Queue(NamedTuple):
    """Instructions (their indices) that a lane takes in this order.

    Messages have a queue per direction and peer.  In an exclusive queue an instruction starts when the one before
    it has ended; otherwise (asynchronous messages) it may overlap with it, but is still issued after it.
    """

    device: int
    lane: Lane
    peer: int | None
    exclusive: bool
    instructions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every lane of every device does.  Made by `lower`; refers to the schedule and costs it came from."""

    schedule: Schedule
    costs: StageCosts
    instructions: tuple[Instruction, ...]
    queues: tuple[Queue, ...]

    @property
    def devices(self) -> int:
        return self.schedule.devices

    @cached_property
    def index(self) -> Mapping[Op, int]:
        """Where each operation is in `instructions`."""
        return {instruction.op: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def queues_of(self) -> tuple[tuple[Queue, ...], ...]:
        """The queues of each device."""
        held: list[list[Queue]] = [[] for _ in range(self.devices)]
        for queue in self.queues:
            held[queue.device].append(queue)
        return tuple(map(tuple, held))

    @cached_property
    def static(self) -> tuple[Number, ...]:
        """Bytes that are on each device throughout."""
        return tuple(self.costs.static_of(d) for d in range(self.devices))
