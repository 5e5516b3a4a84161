"""List scheduling, event by event: what the cost-aware schedules are made of.

Devices act as soon as they are free and something has arrived, and `Greedy` chooses what.  Times, messages (as latency)
and memory are those of lowering: F allocates at its start, I and W free at their end.  It never gets stuck: a forward
leaves room for the device's later chunks, so the oldest micro-batch can always go on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from debubble.ir import Kind, Number, Op, Placement, StageCosts

STRICT = -inf
"""Patience: wait for the wanted kind as long as its arrival is known."""


@dataclass(frozen=True)
class Outcome:
    """Per device the order of its operations, and what they take."""

    orders: tuple[tuple[Op, ...], ...]
    makespan: Number
    span: Number


class Rule(Protocol):
    """Chooses what a free device starts now; None: it waits for the next arrival."""

    def __call__(self, run: Run, device: int, now: Number) -> Op | None: ...


class Run:
    """The state of all devices while they are dispatched.  `room[d]`: bytes for activations, None for any number.

    `split`: the backward is I and W apart; else it is one B.
    """

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        costs: StageCosts,
        room: Sequence[Number | None],
        *,
        split: bool = True,
    ) -> None:
        stages, devices = range(placement.stages), range(placement.devices)
        self.device_of, self.stages_of, self.micro_batches = placement.device_of, placement.stages_of, micro_batches
        self.costs, self.split = costs, split
        self.room = [inf if r is None else r for r in room]
        self.backward = Kind.I if split else Kind.B
        self.times = {
            Kind.F: costs.forward,
            Kind.I: costs.backward_input,
            Kind.B: tuple(costs.backward(s) for s in stages),
            Kind.W: costs.backward_weight,
        }
        self.scale = [costs.scale_of(j) for j in range(micro_batches)]
        self.after = costs.activation_after_input if split else (0,) * placement.stages
        self.size = tuple(map(max, costs.activation, self.after))
        self.forward_at: list[list[Number]] = [[inf] * micro_batches for _ in stages]
        self.backward_at: list[list[Number]] = [[inf] * micro_batches for _ in stages]
        self.forward_at[0] = [0] * micro_batches
        self.forwards, self.backwards, self.released = ([0 for _ in stages] for _ in range(3))
        self.owed: list[deque[Op]] = [deque() for _ in devices]
        self.held: list[Number] = [0 for _ in devices]
        self.free: list[Number] = [0 for _ in devices]
        self.first: list[Number] = [0 for _ in devices]
        self.orders: list[list[Op]] = [[] for _ in devices]
        self._freeing: list[Number] = [0 for _ in devices]

    def __call__(self, choose: Rule) -> Outcome | None:
        """Dispatch everything by a rule.  None if it gets stuck, which only an order that does not fit does."""
        events: list[tuple[Number, int]] = [(0, d) for d in range(len(self.stages_of))]
        left = (2 + self.split) * len(self.device_of) * self.micro_batches
        while events:
            now, d = heapq.heappop(events)
            if self.free[d] > now:
                continue
            self.held[d] -= self._freeing[d]
            self._freeing[d] = 0
            op = choose(self, d, now)
            if op is not None:
                self._start(op, d, now, events)
                left -= 1
        if left:
            return None
        span = max(end - begin for end, begin in zip(self.free, self.first, strict=True))
        return Outcome(tuple(map(tuple, self.orders)), max(self.free), span)

    def fits(self, device: int, stage: int, j: int) -> bool:
        """Whether a forward leaves room for what the device's later chunks need to go on."""
        room = self.room[device]
        if room == inf:
            return True
        needed = self.held[device] + self.size[stage] * self.scale[j]
        for later in self.stages_of[device]:
            if later > stage and self.forwards[later] == self.backwards[later]:
                needed += self.size[later] * self.scale[self.forwards[later]]
                if self.released[later] < self.backwards[later]:
                    needed -= self.after[later] * self.scale[self.released[later]]
        return needed <= room

    def time(self, op: Op) -> Number:
        return self.times[op.kind][op.stage] * self.scale[op.micro_batch]

    def _start(self, op: Op, d: int, now: Number, events: list[tuple[Number, int]]) -> None:
        kind, s, j = op
        end = now + self.time(op)
        if not self.orders[d]:
            self.first[d] = now
        self.orders[d].append(op)
        if kind is Kind.F:
            self.forwards[s] += 1
            self.held[d] += self.size[s] * self.scale[j]
            if s + 1 < len(self.device_of):
                self._send(self.forward_at, s, s + 1, j, end, events)
            else:
                self.backward_at[s][j] = end
        elif kind is Kind.W:
            self.owed[d].popleft()
            self.released[s] += 1
            self._freeing[d] = self.after[s] * self.scale[j]
        else:
            self.backwards[s] += 1
            self._freeing[d] = (self.size[s] - self.after[s]) * self.scale[j]
            if self.split:
                self.owed[d].append(Op(Kind.W, s, j))
            else:
                self.released[s] += 1
            if s:
                self._send(self.backward_at, s, s - 1, j, end, events)
        self.free[d] = end
        heapq.heappush(events, (end, d))

    def _send(
        self, arrivals: list[list[Number]], s: int, to: int, j: int, end: Number, events: list[tuple[Number, int]]
    ) -> None:
        if self.device_of[to] != self.device_of[s]:
            end += self.costs.communication[min(s, to)] * self.scale[j]
            heapq.heappush(events, (end, self.device_of[to]))
        arrivals[to][j] = end


@dataclass(frozen=True)
class Greedy:
    """Backward before forward, or the two in turn; of several chunks the oldest micro-batch; W where nothing waits."""

    in_turn: bool = True
    """Once its backwards have begun, a device wants a forward after a backward."""
    patience: float = 0
    """The wanted kind may be awaited while the other would delay it by more than this share of itself."""
    overlap: float = 0
    """Share of a W by which it may delay what is known to arrive."""

    def __call__(self, run: Run, device: int, now: Number) -> Op | None:
        backward, backward_at = self._backward(run, device, now)
        forward, forward_at, blocked = self._forward(run, device, now)
        weight = run.owed[device][0] if run.owed[device] else None
        order = run.orders[device]
        if self.in_turn and order and self._last_pass(order) is run.backward:
            wanted, wanted_at, other = forward, forward_at, backward
            if wanted is None and blocked and weight is not None:
                return weight
        else:
            wanted, wanted_at, other = backward, backward_at, forward
        if wanted is not None:
            return wanted
        gap = wanted_at - now
        if weight is not None and gap >= self._room_for(run, weight) and (other is None or gap < inf):
            return weight
        if other is not None and (gap == inf or gap >= (1 - self.patience) * run.time(other)):
            return other
        if weight is not None and (blocked or min(forward_at, backward_at) - now >= self._room_for(run, weight)):
            return weight
        return None

    def _room_for(self, run: Run, weight: Op) -> Number:
        return run.time(weight) * (1 - self.overlap)

    def _last_pass(self, order: list[Op]) -> Kind:
        return next((op.kind for op in reversed(order) if op.kind is not Kind.W), Kind.F)

    def _backward(self, run: Run, device: int, now: Number) -> tuple[Op | None, Number]:
        """The backward to start now, and when the next one is known to arrive."""
        best: Op | None = None
        at: Number = inf
        for s in run.stages_of[device]:
            j = run.backwards[s]
            if j < run.forwards[s]:
                at = min(at, run.backward_at[s][j])
                if run.backward_at[s][j] <= now and (best is None or j <= best.micro_batch):
                    best = Op(run.backward, s, j)
        return best, at

    def _forward(self, run: Run, device: int, now: Number) -> tuple[Op | None, Number, bool]:
        """The forward to start now, when the next is known to arrive, and whether memory keeps one from starting."""
        best: Op | None = None
        at: Number = inf
        blocked = False
        for s in run.stages_of[device]:
            j = run.forwards[s]
            if j == run.micro_batches or run.forward_at[s][j] == inf:
                continue
            if not run.fits(device, s, j):
                blocked = blocked or run.forward_at[s][j] <= now
                continue
            at = min(at, run.forward_at[s][j])
            if run.forward_at[s][j] <= now and (best is None or j <= best.micro_batch):
                best = Op(Kind.F, s, j)
        return best, at, blocked
