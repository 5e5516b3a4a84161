"""Constructive list scheduling, event by event: the backward first, then the forward if memory allows, W in gaps.

A W may fill a gap that is shorter than itself, or leave it idle.  What that costs depends on the device: one whose work
alone makes up the lower bound has no time to lose, and one with less work delays others if it begins a W too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf

from debubble.ir import Kind, Number, Op
from debubble.search.problem import OrderProblem


@dataclass(frozen=True)
class Timetable:
    """Per device, its compute operations in the order in which they start, and when each ends."""

    orders: list[list[Op]]
    ends: list[list[Number]]


def list_schedule(
    problem: OrderProblem,
    *,
    room: Sequence[Number | None],
    least_gap: Fraction = Fraction(1, 2),
    idle: Sequence[Number] | None = None,
) -> Timetable | None:
    """Activations within `room[d]`, nothing offloaded or recomputed explicitly; None if that gets stuck.

    `least_gap`: part of W's time from which a gap is filled with it.  `idle`: time that each device may lose behind its
    first backward before it fills every gap.
    """
    return _Run(problem, room, least_gap, [inf] * len(room) if idle is None else idle).run()


@dataclass
class _Device:
    stages: tuple[int, ...]
    room: Number | None
    idle: Number
    """Time that it may still lose."""
    free: Number = 0
    used: Number = 0
    order: list[Op] = field(default_factory=list)
    ends: list[Number] = field(default_factory=list)
    waiting: list[Op] = field(default_factory=list)
    """W operations, oldest first."""


class _Run:
    def __init__(
        self, problem: OrderProblem, room: Sequence[Number | None], least_gap: Fraction, idle: Sequence[Number]
    ) -> None:
        self.problem, self.costs, self.least_gap = problem, problem.costs, least_gap
        self.devices = [_Device(*each) for each in zip(problem.placement.stages_of, room, idle, strict=True)]
        self.forwards = [0] * problem.stages
        self.backwards = [0] * problem.stages
        self.forward_at: list[list[Number]] = [[] for _ in range(problem.stages)]
        self.backward_at: list[list[Number]] = [[] for _ in range(problem.stages)]
        self.forward_at[0] = [0] * problem.micro_batches
        self.size = [self._kept(s) for s in range(problem.stages)]
        split = problem.split
        self.remains = [self.costs.activation_after_input[s] if split else 0 for s in range(problem.stages)]

    def run(self) -> Timetable | None:
        problem, choices = self.problem, dict[int, tuple[Number, Op]]()
        changed = set(range(problem.devices))
        for _ in range((2 + problem.split) * problem.stages * problem.micro_batches):
            for d in changed:
                choice = self._choose(self.devices[d])
                if choice is not None:
                    choices[d] = choice
            if not choices:
                return None
            d = min(choices, key=lambda d: (choices[d][0], d))
            start, op = choices.pop(d)
            self._do(self.devices[d], op, start)
            beside = (op.stage - 1, op.stage, op.stage + 1)
            changed = {problem.placement.device_of[s] for s in beside if 0 <= s < problem.stages}
        return Timetable([device.order for device in self.devices], [device.ends for device in self.devices])

    def _choose(self, device: _Device) -> tuple[Number, Op] | None:
        """What the device starts next, and when, as far as is known now."""
        backward = min(self._backwards(device), default=None, key=lambda c: (max(c[0], device.free), -c[1].stage))
        if backward is not None and backward[0] <= device.free:
            return device.free, backward[1]
        forward = min(self._forwards(device), default=None, key=lambda c: (max(c[0], device.free), -c[1].stage))
        if forward is not None and forward[0] <= device.free:
            return device.free, forward[1]
        upcoming = min((c for c in (backward, forward) if c is not None), default=None, key=lambda c: c[0])
        if device.waiting:
            op = device.waiting[0]
            gap = inf if upcoming is None else upcoming[0] - device.free
            time = self.costs.backward_weight[op.stage] * self.costs.scale_of(op.micro_batch)
            if gap >= self.least_gap * time or gap > device.idle:
                return device.free, op
        return None if upcoming is None else (upcoming[0], upcoming[1])

    def _backwards(self, device: _Device) -> list[tuple[Number, Op]]:
        kind = Kind.I if self.problem.split else Kind.B
        found = []
        for s in device.stages:
            j = self.backwards[s]
            if j < len(self.backward_at[s]):
                allocated = max(self.remains[s] - self.size[s], 0) * self.costs.scale_of(j)
                if device.room is None or device.used + allocated <= device.room:
                    found.append((self.backward_at[s][j], Op(kind, s, j)))
        return found

    def _forwards(self, device: _Device) -> list[tuple[Number, Op]]:
        return [
            (self.forward_at[s][j], Op(Kind.F, s, j))
            for s in device.stages
            if (j := self.forwards[s]) < len(self.forward_at[s]) and self._fits(device, s, j)
        ]

    def _fits(self, device: _Device, stage: int, j: int) -> bool:
        """Whether the oldest unfinished micro-batch can still pass all the device's stages afterwards."""
        if device.room is None:
            return True
        oldest = min(self.backwards[s] for s in device.stages)
        needed = self.size[stage] * self.costs.scale_of(j)
        for s in device.stages:
            if self.forwards[s] <= oldest < self.problem.micro_batches and (s, oldest) != (stage, j):
                needed += self.size[s] * self.costs.scale_of(oldest)
        return device.used + needed <= device.room

    def _do(self, device: _Device, op: Op, start: Number) -> None:
        kind, s, j = op
        scale, costs = self.costs.scale_of(j), self.costs
        if any(self.backwards[stage] for stage in device.stages):
            device.idle -= start - device.free
        size, remains = self.size[s] * scale, self.remains[s] * scale
        if kind is Kind.F:
            device.free = start + costs.forward[s] * scale
            device.used += size
            self.forwards[s] += 1
            if s + 1 < self.problem.stages:
                self.forward_at[s + 1].append(device.free + self._message(s))
            else:
                self.backward_at[s].append(device.free)
        elif kind is Kind.W:
            device.free = start + costs.backward_weight[s] * scale
            device.used -= remains
            device.waiting.pop(0)
        else:
            device.free = start + self._backward_time(s) * scale
            device.used -= size - remains
            self.backwards[s] += 1
            if kind is Kind.I:
                device.waiting.append(Op(Kind.W, s, j))
            if s > 0:
                self.backward_at[s - 1].append(device.free + self._message(s - 1))
        device.order.append(op)
        device.ends.append(device.free)

    def _message(self, stage: int) -> Number:
        device_of = self.problem.placement.device_of
        return 0 if device_of[stage] == device_of[stage + 1] else self.costs.communication[stage]

    def _backward_time(self, stage: int) -> Number:
        again: Number = 0
        if stage in self.problem.fused_recompute:
            again = self.costs.recompute[stage] * self.problem.recompute_fraction.get(stage, 1)
        own = self.costs.backward_input[stage] if self.problem.split else self.costs.backward(stage)
        return own + again

    def _kept(self, stage: int) -> Number:
        if stage not in self.problem.fused_recompute:
            return self.costs.activation[stage]
        share = self.problem.recompute_fraction.get(stage, 1)
        return self.costs.activation[stage] - self.costs.dropped(stage) * share
