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

_MAX_EXACT = 2**52
"""Integers up to this, and so all offsets, are exact as floats."""


class PlacedTensor(NamedTuple):
    """A tensor at an offset, live from the start of one operation to the end of another."""

    allocated_by: Op
    freed_by: Op
    start: Number
    end: Number
    size: Number
    offset: Number


@dataclass(frozen=True, kw_only=True, eq=False)
class AddressPlan:
    """The tensors of one device in an arena, in addition to its static bytes.

    Attributes:
        device: The device.
        tensors: All tensors, in the order of their allocation.
        static: Bytes on the device throughout the step, outside the arena.
        peak: Maximum bytes of tensors at any instant, a lower bound on the arena.
        arena: Size of the arena in bytes.
    """

    device: int
    tensors: tuple[PlacedTensor, ...]
    static: Number
    peak: Number
    arena: Number

    @property
    def fragmentation(self) -> Number:
        """Bytes by which the arena exceeds the peak."""
        return self.arena - self.peak

    @property
    def gap(self) -> float:
        """Fragmentation as a fraction of the device's peak memory, including static bytes."""
        return float(self.fragmentation / (self.static + self.peak)) if self.fragmentation else 0.0

    def waits(self) -> dict[Op, set[Op]]:
        """For every operation, the operations that free the previous tensors at the addresses that it allocates.

        If an operation starts after all of these have ended, tensors do not overlap, whatever the durations.  In the
        timeline they end before it starts, as do their own dependencies, so these waits cannot deadlock.

        Returns:
            The operations to wait for, of any lane; without operations whose addresses are used for the first time.

        Example:
            >>> from debubble.simulator import plan_addresses
            >>> timeline = db.simulate(db.schedules["1f1b"](devices=2, micro_batches=3), db.StageCosts.of(stages=2))
            >>> [(op.name, {f.name for f in freed}) for op, freed in plan_addresses(timeline)[0].waits().items()]
            [('0F2', {'0B0'})]
        """
        waits: dict[Op, set[Op]] = {}
        # The last tensor at each address: begin, end, and the operation that frees it
        owners: list[tuple[Number, Number, Op]] = []
        for tensor in self.tensors:
            begin, end = tensor.offset, tensor.offset + tensor.size
            pieces, freeing = [], set()
            for low, high, freed_by in owners:
                if low < end and begin < high:
                    freeing.add(freed_by)
                pieces += [(a, b, freed_by) for a, b in ((low, min(high, begin)), (max(low, end), high)) if a < b]
            owners = [*pieces, (begin, end, tensor.freed_by)]
            if freeing:
                waits.setdefault(tensor.allocated_by, set()).update(freeing)
        return waits


def plan_addresses(
    timeline: Timeline, *, devices: Collection[int] | None = None, alignment: int | None = None
) -> tuple[AddressPlan, ...]:
    """Place the tensors of every device in one arena, by their lifetimes in the timeline and their sizes.

    A tensor is allocated by one operation and freed by one other: an activation offloaded in part, or freed in part by
    I and in part by W, consists of several.  Offsets are valid for the timeline's order of starts and ends: a runtime
    in which an operation might start before one predicted to have ended has to wait for that one.

    Args:
        timeline: A simulated program.
        devices: The devices to plan; None for all.
        alignment: Sizes are rounded up to a multiple of these bytes, and offsets are multiples; None for no rounding.

    Returns:
        One plan per device, in index order.

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
    is_nonempty = start < end
    plans = []
    for device, static in enumerate(timeline.program.static):
        if devices is not None and device not in devices:
            continue
        selected = np.flatnonzero(is_nonempty & (tensors.device == device))
        selected = selected[np.lexsort((tensors.allocated_by[selected], start[selected]))]
        size, unit = _as_multiples(tensors.size[selected], alignment)
        packing = pack(start[selected], end[selected], size)
        ends = tensors.allocated_by, tensors.freed_by
        operations = (_operations(timeline.program, instructions[selected]) for instructions in ends)
        sizes = (_in_units(counts, unit) for counts in (size, packing.offset))
        columns = (column.tolist() for column in (times[0][selected], times[1][selected], *sizes))
        placed = tuple(map(PlacedTensor._make, zip(*operations, *columns, strict=True)))
        peak, arena = packing.peak * unit, packing.arena * unit
        plans.append(AddressPlan(device=device, tensors=placed, static=static, peak=peak, arena=arena))
    return tuple(plans)


def _operations(program: Program, instructions: Ints) -> list[Op]:
    columns = (column[instructions].tolist() for column in (program.kind, program.stage, program.micro_batch))
    return [Op(KINDS[kind], stage, micro_batch) for kind, stage, micro_batch in zip(*columns, strict=True)]


def _in_units(counts: Ints, unit: Number) -> Numbers:
    return exact([count * unit for count in counts.tolist()])


def _as_multiples(sizes: Numbers, alignment: int | None) -> tuple[Ints, Number]:
    """Sizes as integer multiples of a unit: exact for integers and fractions, else rounded up to the unit."""
    if alignment is not None:
        return np.array([ceil(number / alignment) for number in sizes.tolist()], dtype=np.int64), alignment
    if sizes.dtype == np.int64 or not len(sizes):
        return sizes.astype(np.int64), 1
    numbers, total = sizes.tolist(), float(sum(sizes.tolist()))
    unit: Number = 2.0 ** (ceil(log2(total)) - log2(_MAX_EXACT))
    if not any(isinstance(number, float) for number in numbers):
        exact_unit = Fraction(1, lcm(*(number.denominator for number in numbers)))
        unit = exact_unit if total / exact_unit < _MAX_EXACT else unit
    return np.array([ceil(number / unit) for number in numbers], dtype=np.int64), unit
