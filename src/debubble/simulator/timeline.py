"""A Timeline: start and end of every operation of a Program, and quantities derived from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from debubble.ir import Kind, Lane, Number, Op, Program
from debubble.ir.arrays import Ints, Numbers, exact
from debubble.ir.ops import BACKWARDS, CODE
from debubble.ir.program import LANE_CODE, NO_PEER

if TYPE_CHECKING:
    from debubble import Report

BUSY_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.S)
"""The kinds that keep the compute lane busy, as opposed to a blocking message."""


class TimedOperation(NamedTuple):
    """An operation with its lane and times."""

    op: Op
    device: int
    lane: Lane
    start: Number
    end: Number

    @property
    def name(self) -> str:
        """The operation's name, such as `2F5`."""
        return self.op.name

    @property
    def duration(self) -> Number:
        """End minus start."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline:
    """Start and end of every instruction of `program`, from time 0.  Times are in the unit of the costs."""

    program: Program
    start: Numbers
    end: Numbers

    @staticmethod
    def of(program: Program, starts: Sequence[Number], ends: Sequence[Number]) -> Timeline:
        """Make a timeline from the starts and ends of the instructions."""
        return Timeline(program=program, start=exact(starts), end=exact(ends))

    def __repr__(self) -> str:
        schedule = self.program.schedule
        count = f"{schedule.devices} devices, {len(self.start)} operations"
        return f"Timeline({schedule.name}: {count}, makespan {float(self.makespan):.6g})"

    def _repr_html_(self) -> str:
        import debubble

        return debubble.inline_html(self)

    def show(self) -> Report:
        """The report as one page, which a notebook displays and `save` writes."""
        import debubble

        return debubble.show(self)

    @cached_property
    def starts(self) -> tuple[Number, ...]:
        """The start of every instruction."""
        return tuple(self.start.tolist())

    @cached_property
    def ends(self) -> tuple[Number, ...]:
        """The end of every instruction."""
        return tuple(self.end.tolist())

    @cached_property
    def operations(self) -> tuple[TimedOperation, ...]:
        """Every instruction with its times, in the order of the program."""
        return tuple(
            TimedOperation(instruction.op, instruction.device, instruction.lane, start, end)
            for instruction, start, end in zip(self.program.instructions, self.starts, self.ends, strict=True)
        )

    @cached_property
    def compute(self) -> tuple[tuple[TimedOperation, ...], ...]:
        """The operations on each compute lane, blocking messages included, in order of time."""
        operations = self.operations
        return tuple(tuple(operations[i] for i in lane.tolist()) for lane in self._compute)

    @cached_property
    def makespan(self) -> Number:
        """First start to last end over all devices and lanes."""
        return max(self.ends) - min(self.starts)

    @cached_property
    def span(self) -> Number:
        """Maximum over devices of the compute lane's last end minus its first start."""
        spans: list[Number] = [
            max(self.end[lane].tolist()) - self.start[lane[:1]].tolist()[0] for lane in self._compute
        ]
        return max(spans)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """The time for which each compute lane is busy, including recomputation."""
        works = np.isin(self.program.kind, _BUSY)
        time = self.end - self.start
        return tuple(sum(time[lane[works[lane]]].tolist()) for lane in self._compute)

    @cached_property
    def recompute(self) -> tuple[Number, ...]:
        """The time each device spends on recomputation, fused or explicit."""
        program, schedule, costs = self.program, self.program.schedule, self.program.costs
        recomputations = program.kind == CODE[Kind.R]
        fused = np.zeros((schedule.stages, schedule.micro_batches), dtype=np.bool_)
        fused[[*schedule.fused_recompute]] = True
        fused[program.stage[recomputations], program.micro_batch[recomputations]] = False
        backwards = np.isin(program.kind, _BACKWARDS)
        recomputes = recomputations | (backwards & fused[program.stage, program.micro_batch])
        spent: list[Number] = []
        for lane in self._compute:
            total: Number = 0
            chosen = lane[recomputes[lane]]
            for stage, j in zip(program.stage[chosen].tolist(), program.micro_batch[chosen].tolist(), strict=True):
                total += schedule.recompute_time(costs, stage, j)
            spent.append(total)
        return tuple(spent)

    @cached_property
    def forward_bubbles(self) -> tuple[Number, ...]:
        """The idle time of each compute lane from its first forward to its first backward.

        Source: Huang et al., Obscura, USENIX ATC 2025, section 1: "Forward Bubbles, defined as bubbles between the
        first forward pass and the first backward pass".  No recomputation can fill them.  A device that holds several
        stages has them all on one lane: the first forward and the first backward of any of them count.
        """
        return tuple(_idle(lane, _first(lane, (Kind.F,)), _first(lane, BACKWARDS)) for lane in self.compute)

    @cached_property
    def backward_bubbles(self) -> tuple[Number, ...]:
        """The idle time of each compute lane from the start of its first backward to the end of its last.

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
        """The memory of each device, static bytes and activations, as (time, bytes from then on) per change."""
        return tuple(
            ((0, self.program.static[device]), *zip(time.tolist(), used.tolist(), strict=True))
            for device, (time, used) in enumerate(self._memory)
        )

    @cached_property
    def peak_memory(self) -> tuple[Number, ...]:
        """Maximum bytes of each device at any instant, including static bytes."""
        return tuple(
            max([static, *used.tolist()]) for static, (_, used) in zip(self.program.static, self._memory, strict=True)
        )

    @cached_property
    def by_name(self) -> Mapping[str, TimedOperation]:
        """The operations by name."""
        return {operation.name: operation for operation in self.operations}

    @cached_property
    def _compute(self) -> tuple[Ints, ...]:
        """The instructions of each compute lane in order of time."""
        lanes = np.flatnonzero(self.program.lane == LANE_CODE[Lane.COMPUTE])
        device = self.program.device[lanes]
        ends = np.cumsum(np.bincount(device, minlength=self.program.devices))[:-1]
        return tuple(np.split(lanes[_sort_order(device, self.start[lanes], self.end[lanes])], ends))

    @cached_property
    def _memory(self) -> tuple[tuple[Numbers, Numbers], ...]:
        """The times at which the memory of each device changes, and the bytes from then on."""
        program = self.program
        allocates, frees = np.flatnonzero(program.allocated), np.flatnonzero(program.freed)
        changes_by_source = [
            (program.device[allocates], self.start[allocates], program.allocated[allocates]),
            (program.device[frees], self.end[frees], -program.freed[frees]),
        ]
        swaps = program.peer != NO_PEER
        offloads, reloads = (np.flatnonzero(swaps & (program.kind == CODE[kind])) for kind in (Kind.O, Kind.L))
        changes_by_source += [
            (program.peer[offloads], self.start[offloads], program.freed[offloads]),
            (program.peer[reloads], self.end[reloads], -program.allocated[reloads]),
        ]
        device, time, change = (np.concatenate(column) for column in zip(*changes_by_source, strict=True))
        # At one instant frees (negative) come before allocations.
        order = _sort_order(device, time, change)
        ends = np.cumsum(np.bincount(device, minlength=program.devices))[:-1]
        changes = zip(program.static, np.split(change[order], ends), strict=True)
        used = [np.cumsum(np.concatenate((exact([static]), change)))[1:] for static, change in changes]
        return tuple(zip(np.split(time[order], ends), used, strict=True))


_BUSY, _BACKWARDS = ([CODE[kind] for kind in kinds] for kinds in (BUSY_KINDS, BACKWARDS))


def _sort_order(*keys: Numbers) -> Ints:
    """The stable sort order by the first key, then the second, and so on."""
    if any(key.dtype == object for key in keys):
        rows = [*zip(*(key.tolist() for key in keys), strict=True)]
        return np.array(sorted(range(len(rows)), key=rows.__getitem__), dtype=np.int64)
    return np.lexsort(keys[::-1])


def _first(lane: Sequence[TimedOperation], kinds: Collection[Kind]) -> Number:
    """The start of the first operation of these kinds."""
    return min(o.start for o in lane if o.op.kind in kinds)


def _idle(lane: Sequence[TimedOperation], begin: Number, end: Number) -> Number:
    """The idle time of a lane between two moments."""
    worked = (min(o.end, end) - max(o.start, begin) for o in lane if o.op.kind in BUSY_KINDS)
    return end - begin - sum(time for time in worked if time > 0)
