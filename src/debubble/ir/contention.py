"""Where lanes are shared between devices, lowering fixes who goes first, by arrival.

Two cases: `blocking` messages, which take both ends' compute lanes, and link groups, whose devices share a host
link.  Both run the schedule once with its costs and record the order.
"""

from __future__ import annotations

import heapq

from debubble.ir.costs import Number, StageCosts
from debubble.ir.effects import duration
from debubble.ir.errors import DeadlockError
from debubble.ir.graph import successors
from debubble.ir.ops import BACKWARDS, Kind, Lane, Op
from debubble.ir.program import Moment, Program, Wait
from debubble.ir.schedule import Schedule

Messages = dict[Op, tuple[Op, Op]]
"""Producer -> (send, receive)."""


def blocking_positions(schedule: Schedule, costs: StageCosts, messages: Messages) -> list[list[Op]]:
    """Per device, compute operations and blocking messages in one order.

    A device that has produced a message does nothing else before it is delivered; the receiver takes it as soon as
    it is between two operations.  Among what could start next, the earliest does; messages go before compute.
    """
    return _Rendezvous(schedule, costs, messages).run()


class _Rendezvous:
    def __init__(self, schedule: Schedule, costs: StageCosts, messages: Messages) -> None:
        self.schedule, self.costs, self.messages = schedule, costs, messages
        on_host = {op.stage for op in schedule.operations if op.kind is Kind.D}
        self.pending = [
            [op for op in reversed(order) if _computes(op) and not (op.kind is Kind.S and op.stage in on_host)]
            for order in schedule.orders
        ]
        self.free: list[Number] = [0] * schedule.devices
        self.outbox: list[tuple[Op, Op] | None] = [None] * schedule.devices
        self.done: set[Op] = set()
        self.placed: list[list[Op]] = [[] for _ in range(schedule.devices)]

    def run(self) -> list[list[Op]]:
        while any(self.pending) or any(self.outbox):
            start, _, device = min(self._candidates(), default=(None, 0, 0))
            if start is None:
                waiting = tuple(p[-1].name for p in self.pending if p)
                raise DeadlockError(waiting)
            if self.outbox[device] is not None:
                self._deliver(device, start)
            else:
                self._compute(device)
        return self.placed

    def _candidates(self) -> list[tuple[Number, int, int]]:
        found: list[tuple[Number, int, int]] = []
        for device in range(self.schedule.devices):
            message = self.outbox[device]
            if message is not None:
                peer = self.schedule.placement.device_of[message[1].stage]
                found.append((max(self.free[device], self.free[peer]), 0, device))
            elif self.pending[device] and self._ready(self.pending[device][-1]):
                found.append((self.free[device], 1, device))
        return found

    def _ready(self, op: Op) -> bool:
        needed: Op | None = None
        if op.kind is Kind.F and op.stage > 0:
            needed = Op(Kind.F, op.stage - 1, op.micro_batch)
        elif op.kind in BACKWARDS and op.stage + 1 < self.schedule.stages:
            needed = self.schedule.backward_of(op.stage + 1, op.micro_batch)
        if needed is None:
            return True
        return self.messages[needed][1] in self.done if needed in self.messages else needed in self.done

    def _deliver(self, device: int, start: Number) -> None:
        message = self.outbox[device]
        assert message is not None
        send, receive = message
        peer = self.schedule.placement.device_of[receive.stage]
        time = self.costs.communication[min(send.stage, receive.stage)] * self.costs.scale_of(send.micro_batch)
        self.free[device] = self.free[peer] = start + time
        self.placed[device].append(send)
        self.placed[peer].append(receive)
        self.done.add(receive)
        self.outbox[device] = None

    def _compute(self, device: int) -> None:
        op = self.pending[device].pop()
        self.free[device] += duration(self.schedule, self.costs, op, Lane.COMPUTE)
        self.placed[device].append(op)
        self.done.add(op)
        self.outbox[device] = self.messages.get(op)


def _computes(op: Op) -> bool:
    return op.kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.S)


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
