"""A Program: a Schedule with everything implicit made explicit.

Every message, every lane, and every point at which one operation waits for another is written out, with its time
and its effect on memory.  The simulator interprets it with these numbers, the runtime with tensors.

It is held as arrays with one entry per instruction, which is what lowering and simulation compute with; `instructions`
and `queues` show the same as objects, made when they are first asked for.
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
    """The `lead` of what waits before its end, and after its start: what waits can run next to the rest of it.

    An O waits so for its F, and a B, I or R for its L, if their stage's units stream."""

    __hash__ = object.__hash__


MOMENTS = tuple(Moment)
START, END, STREAM = range(len(MOMENTS))
"""The moments in arrays: their places in MOMENTS."""


class Wait(NamedTuple):
    """The waiting operation starts no earlier than this moment of another instruction."""

    instruction: int
    moment: Moment = Moment.END


def waits_of(edges: Edges) -> list[tuple[Wait, ...]]:
    """The moments of others that each instruction waits for."""
    first, other, moment = (part.tolist() for part in edges)
    waits = [*map(Wait, other, map(MOMENTS.__getitem__, moment))]
    return [tuple(waits[begin:end]) for begin, end in itertools.pairwise(first)]


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
    lead: Number = 0
    """Time before the end of what it streams with at which it may start; read where it waits for a STREAM."""


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


class QueueArrays(NamedTuple):
    """The queues: queue q takes `instructions[first[q] : first[q + 1]]`."""

    device: Ints
    lane: Ints
    peer: Ints
    exclusive: Bools
    first: Ints
    instructions: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The instructions of every lane of every device, as `lower` makes them from a schedule and its costs.

    Kinds and lanes are places in KINDS and LANES, and where there is no peer it is NO_PEER.
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
    """Bytes at the start, on the instruction's own device; L frees them on its peer at its end."""
    freed: Numbers
    """Bytes at the end, on the instruction's own device; O allocates them on its peer at its start."""
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
                *(part.tolist() for part in q[:4]), itertools.pairwise(first), strict=True
            )
        )

    @cached_property
    def index(self) -> Mapping[Op, int]:
        """The place of each operation in `instructions`."""
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
        """Bytes that are on each device throughout: without the room for gathered parameters."""
        stages_of = self.schedule.placement.stages_of
        return tuple(self.costs.static_of(d) - self.costs.gathered_bytes(stages_of[d]) for d in range(self.devices))

    @cached_property
    def predecessors(self) -> Edges:
        """The predecessors of each instruction: its waits, and last the one before it in an exclusive queue."""
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
        """The moments that each instruction follows."""
        return waits_of(self.predecessors)

    def topological_order(self) -> list[int]:
        """The instructions, each after all that it follows; raises graphlib's CycleError if some wait in a circle."""
        graph = {index: [wait.instruction for wait in waits] for index, waits in enumerate(self.preceding)}
        return [*TopologicalSorter(graph).static_order()]

    def deadlock(self, done: Iterable[int]) -> DeadlockError:
        """The error that names a cycle among the instructions that are not `done`, the ones that became ready."""
        stuck = set(range(len(self.preceding))).difference(done)
        path: list[int] = []
        seen: dict[int, int] = {}
        index = min(stuck)
        while index not in seen:
            seen[index] = len(path)
            path.append(index)
            index = next(other for other, _ in self.preceding[index] if other in stuck)
        return DeadlockError(tuple(self.instructions[i].op.name for i in path[seen[index] :]))

    def _effects(self) -> Iterator[tuple[Effect, ...]]:
        offload, reload = CODE[Kind.O], CODE[Kind.L]
        columns = (self.kind, self.device, self.peer, self.allocated, self.freed)
        for kind, device, peer, allocated, freed in zip(*(column.tolist() for column in columns), strict=True):
            own: tuple[Effect, ...] = (Effect(device, Moment.START, allocated),) if allocated else ()
            if freed:
                own += (Effect(device, Moment.END, -freed),)
            if peer != NO_PEER and kind == offload:
                own += (Effect(peer, Moment.START, freed),)
            if peer != NO_PEER and kind == reload:
                own += (Effect(peer, Moment.END, -allocated),)
            yield own
