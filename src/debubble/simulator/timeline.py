"""A Timeline: when every operation of a Program runs, and what follows from that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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

    @cached_property
    def forward_bubbles(self) -> tuple[Number, ...]:
        """Per device, idle time of the compute lane from its first forward to its first backward.

        Source: Huang et al., Obscura, USENIX ATC 2025, section 1: "Forward Bubbles, defined as bubbles between the
        first forward pass and the first backward pass".  No recomputation can fill them.  A device that holds several
        stages has them all on one lane: the first forward and the first backward of any of them count.
        """
        return tuple(_idle(lane, _first(lane, (Kind.F,)), _first(lane, BACKWARDS)) for lane in self.compute)

    @cached_property
    def backward_bubbles(self) -> tuple[Number, ...]:
        """Per device, idle time of the compute lane from the start of its first backward to the end of its last.

        Source: Huang et al., Obscura, USENIX ATC 2025, section 1: "Backward Bubbles, defined as bubbles between the
        first and last backward passes".  Recomputation fills them.  The last backward may be one for weights (W).
        """
        ends = [max(o.end for o in lane if o.op.kind in (*BACKWARDS, Kind.W)) for lane in self.compute]
        return tuple(_idle(lane, _first(lane, BACKWARDS), end) for lane, end in zip(self.compute, ends, strict=True))

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


def _first(lane: Sequence[TimedOperation], kinds: Collection[Kind]) -> Number:
    """When the first operation of these kinds starts."""
    return min(o.start for o in lane if o.op.kind in kinds)


def _idle(lane: Sequence[TimedOperation], begin: Number, end: Number) -> Number:
    """Time in between in which the lane does no work."""
    worked = (min(o.end, end) - max(o.start, begin) for o in lane if o.op.kind in WORK)
    return end - begin - sum(time for time in worked if time > 0)


def _accumulate(static: Number, changes: list[tuple[Number, Number]]) -> Iterator[tuple[Number, Number]]:
    """Sorted by time, then change: at one instant frees (negative) come before allocations."""
    held = static
    yield 0, held
    for at, change in changes:
        held += change
        yield at, held
