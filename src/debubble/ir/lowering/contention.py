"""Lanes that devices share: lowering fixes the order of their operations by arrival.

There are two cases: `blocking` messages, which occupy the compute lanes of both ends, and link groups, whose devices
share a host link.  Both simulate the schedule once with its costs and record the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from debubble.errors import DeadlockError
from debubble.ir.arrays import Edges, edges
from debubble.ir.ops import Lane, Op
from debubble.ir.program import END, LANE_CODE, NO_PEER, START, STREAM, Program
from debubble.ir.stage_costs import Number


@dataclass
class Rendezvous:
    """Orders the compute operations and blocking messages of every device, all given by their indices.

    A device that has produced a message waits until it is delivered; the receiver takes it between two operations.  Of
    all candidates the earliest starts next, and messages before computing.
    """

    operations: list[Op]
    device: list[int]
    """Per operation and message, its device."""
    duration: list[Number]
    needed: list[int]
    """Per operation, the operation of another stage whose result it uses; -1: none."""
    messages: dict[int, tuple[int, int]]
    """Producer -> (send, receive)."""
    blocking: set[int]
    """The producers whose messages block."""
    compute: list[list[int]]
    """Per device, its compute operations in order."""

    def orders(self) -> list[list[int]]:
        """The operations and messages of every device in the order in which they start.

        Raises DeadlockError with a cycle of waits if nothing can start.
        """
        devices = range(len(self.compute))
        self._pending = [list(reversed(order)) for order in self.compute]
        self._free: list[Number] = [0 for _ in devices]
        self._outbox: list[int | None] = [None for _ in devices]
        """Per device, the producer of a message that is not delivered yet."""
        self._arrived: dict[int, Number] = {}
        """Producer -> the time at which its consumer has the result."""
        self._placed: list[list[int]] = [[] for _ in devices]
        neighbors = self._neighbors()
        candidates = [self._candidate(device) for device in devices]
        while any(self._pending) or any(producer is not None for producer in self._outbox):
            start, _, device = min(filter(None, candidates), default=(None, 0, 0))
            if start is None:
                raise DeadlockError(tuple(self.operations[op].name for op in self._cycle()))
            producer = self._outbox[device]
            changed = neighbors[device]
            if producer is not None:
                changed = changed | neighbors[self._receiver(producer)]
                self._deliver(device, producer, start)
            else:
                self._compute(device, start)
            for other in changed:
                candidates[other] = self._candidate(other)
        return self._placed

    def _neighbors(self) -> list[set[int]]:
        """Per device, itself and the devices with which it exchanges messages."""
        neighbors = [{device} for device in range(len(self.compute))]
        for send, receive in self.messages.values():
            neighbors[self.device[send]].add(self.device[receive])
            neighbors[self.device[receive]].add(self.device[send])
        return neighbors

    def _receiver(self, producer: int) -> int:
        return self.device[self.messages[producer][1]]

    def _candidate(self, device: int) -> tuple[Number, int, int] | None:
        """A device's next step: its earliest start, 0 for a message or 1 for an operation, and the device."""
        producer = self._outbox[device]
        if producer is not None:
            return max(self._free[device], self._free[self._receiver(producer)]), 0, device
        if not self._pending[device]:
            return None
        needed = self.needed[self._pending[device][-1]]
        if needed < 0:
            return self._free[device], 1, device
        if needed in self._arrived:
            return max(self._free[device], self._arrived[needed]), 1, device
        return None

    def _cycle(self) -> list[int]:
        """A cycle of operations that wait for each other, when every device with pending operations waits.

        A device's next operation waits for an operation that is pending on another device, maybe after others.
        """
        device = next(d for d, pending in enumerate(self._pending) if pending)
        path: list[int] = []
        position: dict[int, int] = {}
        while device not in position:
            position[device] = len(path)
            waiting = self._pending[device][-1]
            needed = self.needed[waiting]
            assert needed >= 0, "an operation that needs nothing can start"
            device = self.device[needed]
            path += [waiting] if needed == self._pending[device][-1] else [waiting, needed]
        return path[position[device] :]

    def _deliver(self, device: int, producer: int, start: Number) -> None:
        send, receive = self.messages[producer]
        peer = self.device[receive]
        end = start + self.duration[send]
        self._free[device] = self._free[peer] = self._arrived[producer] = end
        self._placed[device].append(send)
        self._placed[peer].append(receive)
        self._outbox[device] = None

    def _compute(self, device: int, start: Number) -> None:
        op = self._pending[device].pop()
        end = self._free[device] = start + self.duration[op]
        self._placed[device].append(op)
        if op in self.blocking:
            self._outbox[device] = op
        elif op in self.messages:
            self._arrived[op] = end + self.duration[self.messages[op][0]]
        else:
            self._arrived[op] = end


def share_links(program: Program) -> Program:
    """Let the transfers of a link group wait for each other, in the order of their arrival."""
    group_of = {device: g for g, group in enumerate(program.costs.link_groups) for device in group}
    down, up = LANE_CODE[Lane.D2H], LANE_CODE[Lane.H2D]
    direction = {down: down, up: down if program.costs.host_link == "half-duplex" else up}
    device, duration, lead = program.device.tolist(), program.duration.tolist(), program.lead.tolist()
    link = [
        (group_of[d], direction[lane]) if lane in direction and peer == NO_PEER and d in group_of else None
        for d, lane, peer in zip(device, program.lane.tolist(), program.peer.tolist(), strict=True)
    ]
    first, other, moment = (column.tolist() for column in program.predecessors.reversed)
    missing = np.diff(program.predecessors.first).tolist()
    last: dict[tuple[int, int], tuple[int, Number]] = {}
    waits: list[tuple[int, int]] = []
    ready: list[Number] = [0] * len(device)
    # Transfers that are ready at the same time are served in device order, after computing that starts at that time.
    heap: list[tuple[Number, bool, int]] = [(0, link[i] is not None, i) for i, c in enumerate(missing) if not c]
    heapq.heapify(heap)
    while heap:
        start, _, index = heapq.heappop(heap)
        shared = link[index]
        if shared is not None:
            if shared in last:
                before, end = last[shared]
                start = max(start, end)
                waits.append((index, before))
            last[shared] = index, start + duration[index]
        end = start + duration[index]
        for edge in range(first[index], first[index + 1]):
            follower = other[edge]
            time = start if moment[edge] == START else end
            if moment[edge] == STREAM:
                time = max(start, end - lead[follower])
            ready[follower] = max(ready[follower], time)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(heap, (ready[follower], link[follower] is not None, follower))
    return replace(program, waits=_with(program.waits, waits))


def _with(waits: Edges, more: Iterable[tuple[int, int]]) -> Edges:
    """Append waits for the ends of instructions."""
    after, other = np.array([*more], dtype=np.int64).reshape(-1, 2).T
    return edges(
        len(waits.first) - 1,
        np.concatenate((waits.after, after)),
        np.concatenate((waits.other, other)),
        np.concatenate((waits.moment, np.full(len(other), END))),
    )
