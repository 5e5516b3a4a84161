"""Where lanes are shared between devices, lowering fixes who goes first, by arrival.

Two cases: `blocking` messages, which take both ends' compute lanes, and link groups, whose devices share a host
link.  Both run the schedule once with its costs and record the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from debubble.ir.costs import Number, StageCosts
from debubble.ir.effects import duration
from debubble.ir.errors import DeadlockError
from debubble.ir.graph import successors
from debubble.ir.ops import BACKWARDS, Kind, Lane, Op
from debubble.ir.program import Moment, Program, Wait
from debubble.ir.schedule import Schedule

Messages = dict[Op, tuple[Op, Op]]
"""Producer -> (send, receive)."""


def blocks(schedule: Schedule, costs: StageCosts, send: Op) -> bool:
    """Whether a message takes the compute lanes of both ends."""
    return costs.communication_model == "blocking" and boundary(send) not in schedule.asynchronous


def boundary(send: Op) -> int:
    """The stage before the boundary that a message crosses."""
    return send.stage if send.kind is Kind.SEND_F else send.stage - 1


def blocking_positions(schedule: Schedule, costs: StageCosts, messages: Messages) -> list[list[Op]]:
    """Per device, compute operations and blocking messages in one order.

    A device that has produced a message does nothing else before it is delivered; the receiver takes it as soon as
    it is between two operations.  Among what could start next, the earliest does; messages go before compute.
    """
    return _Rendezvous(schedule, costs, messages).run()


class _Rendezvous:
    def __init__(self, schedule: Schedule, costs: StageCosts, messages: Messages) -> None:
        self.schedule, self.costs, self.messages = schedule, costs, messages
        self.pending = [[op for op in reversed(order) if schedule.computes(op)] for order in schedule.orders]
        self.free: list[Number] = [0] * schedule.devices
        self.outbox: list[Op | None] = [None] * schedule.devices
        """What has produced a message that is not delivered yet."""
        self.arrived: dict[Op, Number] = {}
        """Producer -> when its consumer has what it needs of it."""
        self.placed: list[list[Op]] = [[] for _ in range(schedule.devices)]

    def run(self) -> list[list[Op]]:
        while any(self.pending) or any(self.outbox):
            start, _, device = min(self._candidates(), default=(None, 0, 0))
            if start is None:
                raise DeadlockError(tuple(op.name for op in self._cycle()))
            producer = self.outbox[device]
            if producer is not None:
                self._deliver(device, producer, start)
            else:
                self._compute(device, start)
        return self.placed

    def _candidates(self) -> Iterator[tuple[Number, int, int]]:
        for device, pending in enumerate(self.pending):
            producer = self.outbox[device]
            if producer is not None:
                _, receive = self.messages[producer]
                peer = self.schedule.placement.device_of[receive.stage]
                yield max(self.free[device], self.free[peer]), 0, device
            elif pending:
                needed = self._needed(pending[-1])
                if needed is None:
                    yield self.free[device], 1, device
                elif needed in self.arrived:
                    yield max(self.free[device], self.arrived[needed]), 1, device

    def _needed(self, op: Op) -> Op | None:
        if op.kind is Kind.F and op.stage > 0:
            return Op(Kind.F, op.stage - 1, op.micro_batch)
        if op.kind in BACKWARDS and op.stage + 1 < self.schedule.stages:
            return self.schedule.backward_of(op.stage + 1, op.micro_batch)
        return None

    def _cycle(self) -> list[Op]:
        """Operations that wait for each other in turn, once every device that has work left waits for another.

        The next operation of a device waits for one whose own device has something to do before it.
        """
        device = next(d for d, pending in enumerate(self.pending) if pending)
        path: list[Op] = []
        reached: dict[int, int] = {}
        while device not in reached:
            reached[device] = len(path)
            waiting = self.pending[device][-1]
            needed = self._needed(waiting)
            assert needed is not None, "an operation that needs nothing can start"
            device = self.schedule.placement.device_of[needed.stage]
            path += [waiting] if needed == self.pending[device][-1] else [waiting, needed]
        return path[reached[device] :]

    def _deliver(self, device: int, producer: Op, start: Number) -> None:
        send, receive = self.messages[producer]
        peer = self.schedule.placement.device_of[receive.stage]
        end = start + duration(self.schedule, self.costs, send, Lane.SEND)
        self.free[device] = self.free[peer] = self.arrived[producer] = end
        self.placed[device].append(send)
        self.placed[peer].append(receive)
        self.outbox[device] = None

    def _compute(self, device: int, start: Number) -> None:
        op = self.pending[device].pop()
        self.free[device] = self.arrived[op] = start + duration(self.schedule, self.costs, op, Lane.COMPUTE)
        self.placed[device].append(op)
        if op not in self.messages:
            return
        send, _ = self.messages[op]
        if blocks(self.schedule, self.costs, send):
            del self.arrived[op]
            self.outbox[device] = op
        else:
            self.arrived[op] += duration(self.schedule, self.costs, send, Lane.SEND)


def share_links(program: Program) -> Program:
    """Make the transfers of each link group wait for each other, in the order of their arrival."""
    group_of = {device: g for g, group in enumerate(program.costs.link_groups) for device in group}
    half_duplex = program.costs.host_link == "half-duplex"
    waits: list[tuple[Wait, ...]] = [i.waits for i in program.instructions]
    last: dict[tuple[int, Lane], tuple[int, Number]] = {}
    edges, missing = successors(program)
    ready: list[Number] = [0] * len(missing)
    heap: list[tuple[Number, int]] = [(0, i) for i, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    while heap:
        start, index = heapq.heappop(heap)
        instruction = program.instructions[index]
        shares = instruction.lane in (Lane.D2H, Lane.H2D) and instruction.peer is None
        if shares and instruction.device in group_of:
            link = group_of[instruction.device], Lane.D2H if half_duplex else instruction.lane
            if link in last:
                before, end = last[link]
                start = max(start, end)
                waits[index] = (*waits[index], Wait(before))
            last[link] = index, start + instruction.duration
        for after, moment in edges[index]:
            at = start if moment is Moment.START else start + instruction.duration
            ready[after] = max(ready[after], at)
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(heap, (ready[after], after))
    instructions = tuple(i._replace(waits=w) for i, w in zip(program.instructions, waits, strict=True))
    return Program(schedule=program.schedule, costs=program.costs, instructions=instructions, queues=program.queues)
