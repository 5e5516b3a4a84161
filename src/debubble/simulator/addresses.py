"""An address plan: the tensors of a step at fixed offsets in one arena per device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm, log2
from typing import NamedTuple

import numpy as np

from debubble.ir import Number, Op, Program
from debubble.ir.arrays import Ints, Numbers, exact
from debubble.ir.ops import KINDS
from debubble.simulator.packing import pack
from debubble.simulator.tensors import tensors_of
from debubble.simulator.timeline import Timeline

_EXACT = 2**52
"""Whole numbers up to it, and so all offsets, are exact as floats."""


class PlacedTensor(NamedTuple):
    """A part of a device's memory from the start of one operation to the end of another, at an offset."""

    allocated_by: Op
    freed_by: Op
    start: Number
    end: Number
    size: Number
    offset: Number


@dataclass(frozen=True, kw_only=True, eq=False)
class AddressPlan:
    """The tensors of one device in an arena, next to what is on the device throughout.

    Attributes:
        device: The device.
        tensors: All tensors, in the order in which they are allocated.
        static: Bytes that are on the device throughout, outside of the arena.
        peak: The most bytes of tensors at any instant: no arena is smaller.
        arena: Bytes of the arena.
    """

    device: int
    tensors: tuple[PlacedTensor, ...]
    static: Number
    peak: Number
    arena: Number

    @property
    def fragmentation(self) -> Number:
        """Bytes that the arena needs beyond the peak."""
        return self.arena - self.peak

    @property
    def gap(self) -> float:
        """Fragmentation as a share of the device's peak memory, static bytes included."""
        return float(self.fragmentation / (self.static + self.peak)) if self.fragmentation else 0.0

    def waits(self) -> dict[Op, set[Op]]:
        """Find, for every operation, those that free what was last at the addresses that it allocates.

        Where it starts after all of them have ended, no two tensors overlap, whatever the operations take.  All of them
        end before it starts in the timeline, as does what they wait for, so that no operations wait for each other.

        Returns:
            The operations to wait for, of any lane; an operation whose addresses nothing had before it is not in it.

        Example:
            >>> from debubble.simulator import plan_addresses
            >>> timeline = db.simulate(db.schedules["1f1b"](devices=2, micro_batches=3), db.StageCosts.of(stages=2))
            >>> [(op.name, {f.name for f in freed}) for op, freed in plan_addresses(timeline)[0].waits().items()]
            [('0F2', {'0B0'})]
        """
        waits: dict[Op, set[Op]] = {}
        # What was last at each address: begin, end, and the operation that frees it
        last: list[tuple[Number, Number, Op]] = []
        for tensor in self.tensors:
            begin, end = tensor.offset, tensor.offset + tensor.size
            apart, before = [], set()
            for low, high, freed_by in last:
                if low < end and begin < high:
                    before.add(freed_by)
                apart += [(a, b, freed_by) for a, b in ((low, min(high, begin)), (max(low, end), high)) if a < b]
            last = [*apart, (begin, end, tensor.freed_by)]
            if before:
                waits.setdefault(tensor.allocated_by, set()).update(before)
        return waits


def plan_addresses(
    timeline: Timeline, *, devices: Collection[int] | None = None, alignment: int | None = None
) -> tuple[AddressPlan, ...]:
    """Place the tensors of every device in one arena, by their lifetimes in the timeline and their sizes.

    A tensor is what one operation allocates and one other frees: activations that are offloaded in part, or freed in
    part by I and in part by W, are several.  The offsets hold for the order of the timeline's starts and ends: where an
    operation may start before another one has ended that was predicted to be over, a runtime has to wait for it.

    Args:
        timeline: A simulated program.
        devices: Those that are planned; None: all.
        alignment: Bytes of which every size is rounded up to a multiple, and every offset is one; None: sizes stay.

    Returns:
        One plan for each of these devices, in their order.

    Example:
        >>> from debubble.simulator import plan_addresses
        >>> costs = db.StageCosts.of(stages=2, activation=[4, 3])
        >>> timeline = db.simulate(db.schedules["1f1b"](devices=2, micro_batches=3), costs)
        >>> [(plan.arena, plan.fragmentation) for plan in plan_addresses(timeline)]
        [(8, 0), (3, 0)]
        >>> [(t.allocated_by.name, t.freed_by.name, t.offset) for t in plan_addresses(timeline)[0].tensors]
        [('0F0', '0B0', 0), ('0F1', '0B1', 4), ('0F2', '0B2', 0)]
    """
    tensors = tensors_of(timeline.program)
    times = timeline.start[tensors.allocated_by], timeline.end[tensors.freed_by]
    start, end = np.split(np.unique(np.concatenate(times), return_inverse=True)[1], 2)
    lives = start < end
    plans = []
    for device, static in enumerate(timeline.program.static):
        if devices is not None and device not in devices:
            continue
        chosen = np.flatnonzero(lives & (tensors.device == device))
        chosen = chosen[np.lexsort((tensors.allocated_by[chosen], start[chosen]))]
        size, unit = _whole(tensors.size[chosen], alignment)
        packing = pack(start[chosen], end[chosen], size)
        ends = (_operations(timeline.program, each[chosen]) for each in (tensors.allocated_by, tensors.freed_by))
        columns = (times[0][chosen], times[1][chosen], *(_in_units(each, unit) for each in (size, packing.offset)))
        placed = zip(*ends, *(column.tolist() for column in columns), strict=True)
        plans.append(
            AddressPlan(
                device=device,
                tensors=tuple(map(PlacedTensor._make, placed)),
                static=static,
                peak=packing.peak * unit,
                arena=packing.arena * unit,
            )
        )
    return tuple(plans)


def _operations(program: Program, instructions: Ints) -> list[Op]:
    columns = (column[instructions].tolist() for column in (program.kind, program.stage, program.micro_batch))
    return [Op(KINDS[kind], stage, micro_batch) for kind, stage, micro_batch in zip(*columns, strict=True)]


def _in_units(counts: Ints, unit: Number) -> Numbers:
    return exact([count * unit for count in counts.tolist()])


def _whole(sizes: Numbers, alignment: int | None) -> tuple[Ints, Number]:
    """Sizes as whole multiples of a unit: exact if they are whole or fractions, else rounded up to the unit."""
    if alignment is not None:
        return np.array([ceil(number / alignment) for number in sizes.tolist()], dtype=np.int64), alignment
    if sizes.dtype == np.int64 or not len(sizes):
        return sizes.astype(np.int64), 1
    numbers, total = sizes.tolist(), float(sum(sizes.tolist()))
    unit: Number = 2.0 ** (ceil(log2(total)) - log2(_EXACT))
    if not any(isinstance(number, float) for number in numbers):
        divided = Fraction(1, lcm(*(number.denominator for number in numbers)))
        unit = divided if total / divided < _EXACT else unit
    return np.array([ceil(number / unit) for number in numbers], dtype=np.int64), unit
