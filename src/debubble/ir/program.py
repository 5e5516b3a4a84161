"""A Program: a Schedule with everything implicit made explicit.

It lists all messages, lanes and waits, with the time and the memory effects of every operation.  The simulator
interprets it with these numbers, the runtime with tensors.

It is stored as arrays with one entry per instruction, for lowering and simulation; `instructions` and `queues` are
object views, which are built at the first access.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np

from debubble.errors import DeadlockError
from debubble.ir.arrays import Bools, Edges, Ints, Numbers
from debubble.ir.ops import CODE, KINDS, Kind, Lane, Op
from debubble.ir.schedule import Schedule
from debubble.ir.stage_costs import Number, StageCosts

LANES = tuple(Lane)
LANE_CODE = {lane: code for code, lane in enumerate(LANES)}
NO_PEER = -1


class Moment(Enum):
    """A moment of an operation."""

    START = "start"
    END = "end"
    STREAM = "stream"
    """`lead` before its end, where lead is the waiting instruction's, and not before its start.

    O waits like this for its F, and B, I or R for its L, if the units of their stage stream."""

    __hash__ = object.__hash__


MOMENTS = tuple(Moment)
START, END, STREAM = range(len(MOMENTS))
"""Codes of the moments in arrays: indices in MOMENTS."""


class Wait(NamedTuple):
    """The waiting operation starts no earlier than this moment of another instruction."""

    instruction: int
    moment: Moment = Moment.END


def waits_of(edges: Edges) -> list[tuple[Wait, ...]]:
    """The waits of every instruction as objects."""
    first, other, moment = (column.tolist() for column in edges)
    waits = [*map(Wait, other, map(MOMENTS.__getitem__, moment))]
    return [tuple(waits[begin:end]) for begin, end in itertools.pairwise(first)]


class Effect(NamedTuple):
    """A change of a device's memory, in bytes, at a moment of the operation."""

    device: int
    moment: Moment
    change: Number


class Instruction(NamedTuple):
    """One operation on one lane, which starts after its waits and the previous instruction of its queue."""

    op: Op
    device: int
    lane: Lane
    duration: Number
    waits: tuple[Wait, ...] = ()
    effects: tuple[Effect, ...] = ()
    peer: int | None = None
    """The other device of a message, or of a transfer to a peer."""
    lead: Number = 0
    """Time before the end of another instruction at which it may start; used by waits for STREAM."""


class Queue(NamedTuple):
    """The indices of a lane's instructions in the order in which they are issued.

    Messages have a queue per direction and peer.  In an exclusive queue an instruction starts after the end of the
    previous one; otherwise (asynchronous messages) they may overlap.
    """

    device: int
    lane: Lane
    peer: int | None
    exclusive: bool
    instructions: tuple[int, ...]


class QueueArrays(NamedTuple):
    """The queues as arrays: queue q has `instructions[first[q] : first[q + 1]]`."""

    device: Ints
    lane: Ints
    peer: Ints
    exclusive: Bools
    first: Ints
    instructions: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The instructions of every lane of every device, which `lower` makes from a schedule and its costs.

    Kinds and lanes are indices in KINDS and LANES; instructions without a peer have NO_PEER.
    """

    schedule: Schedule
    costs: StageCosts
    kind: Ints
    stage: Ints
    micro_batch: Ints
    device: Ints
    lane: Ints
    peer: Ints
    duration: Numbers
    lead: Numbers
    """Leads of instructions (Instruction.lead)."""
    allocated: Numbers
    """Bytes allocated at the start, on the instruction's device; L frees them on its peer at its end."""
    freed: Numbers
    """Bytes freed at the end, on the instruction's device; O allocates them on its peer at its start."""
    waits: Edges
    queue_arrays: QueueArrays

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.schedule.devices

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions as objects: operations device by device, then messages."""
        kinds, lanes = map(KINDS.__getitem__, self.kind.tolist()), map(LANES.__getitem__, self.lane.tolist())
        ops = map(Op, kinds, self.stage.tolist(), self.micro_batch.tolist())
        peers = (None if peer == NO_PEER else peer for peer in self.peer.tolist())
        columns = self.device.tolist(), lanes, self.duration.tolist(), waits_of(self.waits), self._effects(), peers
        return tuple(map(Instruction, ops, *columns, self.lead.tolist()))

    @cached_property
    def queues(self) -> tuple[Queue, ...]:
        """All queues as objects."""
        q = self.queue_arrays
        indices, first = q.instructions.tolist(), q.first.tolist()
        return tuple(
            Queue(device, LANES[lane], None if peer == NO_PEER else peer, exclusive, tuple(indices[begin:end]))
            for device, lane, peer, exclusive, (begin, end) in zip(
                *(column.tolist() for column in q[:4]), itertools.pairwise(first), strict=True
            )
        )

    @cached_property
    def index(self) -> Mapping[Op, int]:
        """Operation -> its index in `instructions`."""
        return {instruction.op: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def queues_of(self) -> tuple[tuple[Queue, ...], ...]:
        """The queues of each device."""
        queues: list[list[Queue]] = [[] for _ in range(self.devices)]
        for queue in self.queues:
            queues[queue.device].append(queue)
        return tuple(map(tuple, queues))

    @cached_property
    def static(self) -> tuple[Number, ...]:
        """Static bytes of every device, without those of gathered parameters."""
        stages_of = self.schedule.placement.stages_of
        return tuple(self.costs.static_of(d) - self.costs.gathered_bytes(stages_of[d]) for d in range(self.devices))

    @cached_property
    def predecessors(self) -> Edges:
        """The predecessors of every instruction: its waits, then the previous instruction of an exclusive queue."""
        q = self.queue_arrays
        follows = np.ones(len(q.instructions), dtype=np.bool_)
        follows[q.first[:-1]] = False
        follows &= np.repeat(q.exclusive, np.diff(q.first))
        after = q.instructions[follows]
        counts = np.diff(self.waits.first)
        counts[after] += 1
        first = np.concatenate(([0], np.cumsum(counts)))
        last = np.zeros(first[-1], dtype=np.bool_)
        last[first[after + 1] - 1] = True
        other, moment = np.empty(len(last), dtype=np.int64), np.full(len(last), END)
        other[~last], moment[~last] = self.waits.other, self.waits.moment
        other[first[after + 1] - 1] = q.instructions[np.flatnonzero(follows) - 1]
        return Edges(first, other, moment)

    @cached_property
    def preceding(self) -> list[tuple[Wait, ...]]:
        """The predecessors of every instruction as objects."""
        return waits_of(self.predecessors)

    def topological_order(self) -> list[int]:
        """The instructions in topological order; raises graphlib's CycleError if there is none."""
        graph = {index: [wait.instruction for wait in waits] for index, waits in enumerate(self.preceding)}
        return [*TopologicalSorter(graph).static_order()]

    def deadlock(self, done: Iterable[int]) -> DeadlockError:
        """The error for a cycle of waits among the instructions outside `done`, those that can run."""
        stuck = set(range(len(self.preceding))).difference(done)
        path: list[int] = []
        position: dict[int, int] = {}
        index = min(stuck)
        while index not in position:
            position[index] = len(path)
            path.append(index)
            index = next(other for other, _ in self.preceding[index] if other in stuck)
        return DeadlockError(tuple(self.instructions[i].op.name for i in path[position[index] :]))

    def _effects(self) -> Iterator[tuple[Effect, ...]]:
        offload, reload = CODE[Kind.O], CODE[Kind.L]
        columns = (self.kind, self.device, self.peer, self.allocated, self.freed)
        for kind, device, peer, allocated, freed in zip(*(column.tolist() for column in columns), strict=True):
            effects: tuple[Effect, ...] = (Effect(device, Moment.START, allocated),) if allocated else ()
            if freed:
                effects += (Effect(device, Moment.END, -freed),)
            if peer != NO_PEER and kind == offload:
                effects += (Effect(peer, Moment.START, freed),)
            if peer != NO_PEER and kind == reload:
                effects += (Effect(peer, Moment.END, -allocated),)
            yield effects
