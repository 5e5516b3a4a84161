"""A Timeline: when every operation of a Program runs, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from debubble.ir import Kind, Lane, Moment, Number, Op, Program
from debubble.ir.ops import BACKWARDS

WORK = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.S)
"""What keeps the compute lane busy, as opposed to a blocking message."""


class TimedOperation(NamedTuple):
    """One operation on one lane."""

    op: Op
    device: int
    lane: Lane
    start: Number
    end: Number

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def duration(self) -> Number:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Start and end of every instruction of `program`, from time 0.  Times are in the unit of the costs."""

    program: Program
    starts: tuple[Number, ...]
    ends: tuple[Number, ...]

    @cached_property
    def operations(self) -> tuple[TimedOperation, ...]:
        return tuple(
            TimedOperation(instruction.op, instruction.device, instruction.lane, start, end)
            for instruction, start, end in zip(self.program.instructions, self.starts, self.ends, strict=True)
        )

    @cached_property
    def compute(self) -> tuple[tuple[TimedOperation, ...], ...]:
        """Per device, what its compute lane does (blocking messages too), in order of time."""
        lanes: list[list[TimedOperation]] = [[] for _ in range(self.program.devices)]
        for operation in self.operations:
            if operation.lane is Lane.COMPUTE:
                lanes[operation.device].append(operation)
        return tuple(tuple(sorted(lane, key=lambda o: (o.start, o.end))) for lane in lanes)

    @cached_property
    def makespan(self) -> Number:
        """First start to last end over all devices and lanes."""
        return max(self.ends) - min(self.starts)

    @cached_property
    def span(self) -> Number:
        """Largest over devices of last end minus first start of the compute lane."""
        return max(max(o.end for o in lane) - lane[0].start for lane in self.compute)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Per device, time in which the compute lane works, recomputation included."""
        return tuple(sum(o.duration for o in lane if o.op.kind in WORK) for lane in self.compute)

    @cached_property
    def recompute(self) -> tuple[Number, ...]:
        """Per device, time spent on recomputation, fused or explicit."""
        schedule, costs = self.program.schedule, self.program.costs
        spent: list[Number] = []
        for lane in self.compute:
            total: Number = 0
            for kind, stage, j in (o.op for o in lane):
                explicit = (stage, j) in schedule.explicit_recompute
                fused = kind in BACKWARDS and stage in schedule.fused_recompute and not explicit
                if kind is Kind.R or fused:
                    total += schedule.recompute_time(costs, stage) * costs.scale_of(j)
            spent.append(total)
        return tuple(spent)

    @property
    def ideal_fraction(self) -> float:
        """(Bubble-free, recompute-free work of the busiest device) / makespan."""
        return float(max(b - r for b, r in zip(self.busy, self.recompute, strict=True)) / self.makespan)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (devices x makespan)."""
        return float(1 - sum(self.busy) / (self.program.devices * self.makespan))

    @cached_property
    def memory(self) -> tuple[tuple[tuple[Number, Number], ...], ...]:
        """Per device, (time, bytes from then on): static and activations, one entry per change."""
        changes: list[list[tuple[Number, Number]]] = [[] for _ in range(self.program.devices)]
        for index, instruction in enumerate(self.program.instructions):
            for device, moment, change in instruction.effects:
                at = self.starts[index] if moment is Moment.START else self.ends[index]
                changes[device].append((at, change))
        return tuple(
            tuple(_accumulate(self.program.static[device], sorted(changes[device])))
            for device in range(self.program.devices)
        )

    @cached_property
    def peak_memory(self) -> tuple[Number, ...]:
        """Per device, the most bytes at any instant, activations and static together."""
        return tuple(max(held for _, held in trace) for trace in self.memory)

    @cached_property
    def by_name(self) -> Mapping[str, TimedOperation]:
        return {operation.name: operation for operation in self.operations}


def _accumulate(static: Number, changes: list[tuple[Number, Number]]) -> Iterator[tuple[Number, Number]]:
    """Sorted by time, then change: at one instant frees (negative) come before allocations."""
    held = static
    yield 0, held
    for at, change in changes:
        held += change
        yield at, held
