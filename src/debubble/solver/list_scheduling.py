"""Constructive list scheduling, event by event: the backward first, then the forward if memory allows, W in gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from debubble.ir import Kind, Number, Op
from debubble.solver.problem import OrderProblem


def list_schedule(problem: OrderProblem, *, room: Sequence[Number | None]) -> list[list[Op]] | None:
    """Per device, its compute operations in the order in which they start, with activations within `room[d]`.

    None if that gets stuck.  Nothing is offloaded or recomputed explicitly.
    """
    return _Run(problem, room).run()


@dataclass
class _Device:
    stages: tuple[int, ...]
    room: Number | None
    free: Number = 0
    used: Number = 0
    order: list[Op] = field(default_factory=list)
    waiting: list[Op] = field(default_factory=list)
    """W operations, oldest first."""


class _Run:
    def __init__(self, problem: OrderProblem, room: Sequence[Number | None]) -> None:
        self.problem, self.costs = problem, problem.costs
        self.devices = [_Device(stages, r) for stages, r in zip(problem.placement.stages_of, room, strict=True)]
        self.forwards = [0] * problem.stages
        self.backwards = [0] * problem.stages
        self.forward_at: list[list[Number]] = [[] for _ in range(problem.stages)]
        self.backward_at: list[list[Number]] = [[] for _ in range(problem.stages)]
        self.forward_at[0] = [0] * problem.micro_batches
        self.size = [self._kept(s) for s in range(problem.stages)]
        split = problem.split
        self.remains = [self.costs.activation_after_input[s] if split else 0 for s in range(problem.stages)]

    def run(self) -> list[list[Op]] | None:
        work = 2 + self.problem.split
        for _ in range(work * self.problem.stages * self.problem.micro_batches):
            choices = [(*choice, d) for d, device in enumerate(self.devices) if (choice := self._choose(device))]
            if not choices:
                return None
            start, op, d = min(choices, key=lambda c: (c[0], c[2]))
            self._do(self.devices[d], op, start)
        return [device.order for device in self.devices]

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
            if 2 * gap >= self.costs.backward_weight[op.stage] * self.costs.scale_of(op.micro_batch):
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
