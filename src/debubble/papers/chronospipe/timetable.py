"""Periodic timetables of ChronosPipe for any p, v, f, b, recomputed chunks and group size.

The paper notes that tasks of a stage execute in cycles of 6 T_unit (7 T_unit with recomputation).  Here every device
repeats v g cycles (v: chunks, g: micro-batches per group).  A cycle is a gap of length f for one forward, then the
recomputation of its chunk, if any, then one backward of length b.  A backward runs along the diagonal: on device s it
is s b earlier than on device 0.  A forward moves to the next cycle's gap on each device.

Operations then never collide.  What remains to be chosen is the cycles of each chunk's forward and backward of the
first micro-batch: their residues modulo v g must differ, and the earliest cycles that satisfy the dependencies are
taken.  Without recomputation this is Chronos-Pipe's modulo schedule with slots of f + b.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.ir import Kind

Timed = tuple[int, Kind, int, int]
"""(start, kind, chunk, micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class TimetableSpec:
    """The inputs of a timetable: p, g, the chunk times f and b, and the recompute time per chunk (0: none).

    Times are integers of any unit, f and b at least 1.
    """

    devices: int
    group: int
    forward: int
    backward: int
    recompute: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """The number of chunks per device, v."""
        return len(self.recompute)


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The cycles of each chunk's first forward on device 0 and of its first backward on every device."""

    spec: TimetableSpec
    cycle_chunks: tuple[int, ...]
    """The chunk whose backwards are in cycles 0 ... g - 1, g ... 2 g - 1, and so on."""
    forward_cycles: tuple[int, ...]
    backward_cycles: tuple[int, ...]

    @cached_property
    def period(self) -> int:
        """The time after which a device's cycles repeat."""
        return self._gaps[-1]

    @cached_property
    def _gaps(self) -> tuple[int, ...]:
        """The offset of each cycle's gap within a period."""
        r = self.spec
        lengths = [r.forward + r.recompute[c] + r.backward for c in self.cycle_chunks for _ in range(r.group)]
        return tuple(itertools.accumulate(lengths, initial=0))

    def gap(self, cycle: int) -> int:
        """The time at which a cycle's gap begins on device 0."""
        periods, index = divmod(cycle, len(self._gaps) - 1)
        return periods * self.period + self._gaps[index]

    def forward_start(self, chunk: int, device: int, micro_batch: int) -> int:
        """The time at which a forward starts on a device."""
        cycle = self.forward_cycles[chunk] + self._cycles_until(micro_batch) + device
        return self.gap(cycle) - self.spec.backward * device

    def backward_start(self, chunk: int, device: int, micro_batch: int) -> int:
        """The time at which a backward starts on a device, after its recomputation."""
        r = self.spec
        gap = self.gap(self.backward_cycles[chunk] + self._cycles_until(micro_batch))
        return gap + r.forward + r.recompute[chunk] - r.backward * device

    def operations(self, device: int, micro_batches: int) -> list[Timed]:
        """The operations of a device, in order of time."""
        r = self.spec
        operations: list[Timed] = []
        for chunk, j in itertools.product(range(r.chunks), range(micro_batches)):
            backward = self.backward_start(chunk, device, j)
            operations.append((self.forward_start(chunk, device, j), Kind.F, chunk, j))
            operations.append((backward, Kind.B, chunk, j))
            if r.recompute[chunk]:
                operations.append((backward - r.recompute[chunk], Kind.R, chunk, j))
        return sorted(operations, key=lambda timed: timed[0])

    def _cycles_until(self, micro_batch: int) -> int:
        group, within = divmod(micro_batch, self.spec.group)
        return group * self.spec.group * self.spec.chunks + within


def timetables(spec: TimetableSpec) -> Iterator[Timetable]:
    """One timetable per order of the chunks' residues: all orders up to four chunks, else the first-free order."""
    v = spec.chunks
    chunks = range(v - 1)
    if v <= 4:
        orders = itertools.product(itertools.permutations(chunks), repeat=2)
        yield from (_earliest(spec, forwards, backwards) for forwards, backwards in orders)
    else:
        yield _earliest(spec, *_first_free_orders(spec))


def _first_free_orders(spec: TimetableSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The orders of residues in which each chunk takes the first free cycle after its predecessor's last stage."""
    v, slot = spec.chunks, spec.forward + spec.backward

    def order(chunks: Sequence[int], steps: int) -> tuple[int, ...]:
        cycles = {0: chunks[0]}
        cycle = 0
        for chunk in chunks[1:]:
            cycle += steps
            while cycle % v in cycles:
                cycle += 1
            cycles[cycle % v] = chunk
        last_residue = next(residue for residue, chunk in cycles.items() if chunk == v - 1)
        return tuple(cycles[(last_residue + k) % v] for k in range(1, v))

    forwards = order(range(v), math.ceil(spec.devices * spec.forward / slot))
    backwards = order(range(v)[::-1], math.ceil(spec.devices * spec.backward / slot))
    return forwards, backwards


def _earliest(spec: TimetableSpec, forwards: tuple[int, ...], backwards: tuple[int, ...]) -> Timetable:
    """The timetable of earliest cycles whose forwards and backwards follow the last chunk's in these cyclic orders."""
    p, g, f, b = spec.devices, spec.group, spec.forward, spec.backward
    last, cycles = spec.chunks - 1, spec.chunks * g
    empty = Timetable(spec=spec, cycle_chunks=(last, *backwards), forward_cycles=(), backward_cycles=())
    gap, group = empty.gap, range(g)

    def arrives(cycle: int, before: int) -> bool:
        """Tell whether the next chunk's forward on device 0 starts after the previous chunk's on device p - 1."""
        return all(gap(cycle + i) >= gap(before + i + p - 1) - b * (p - 1) + f for i in group)

    def returns(cycle: int, before: int, chunk: int) -> bool:
        """Tell whether the backward on device p - 1 starts after that of the next chunk on device 0."""
        wait = b * p + spec.recompute[chunk + 1] - spec.recompute[chunk]
        return all(gap(cycle + i) >= gap(before + i) + wait for i in group)

    # On device p - 1 the last chunk's forward is in the gap of its own backward, whose cycles are 0 ... g - 1.
    residue = {chunk: k * g - (p - 1) for k, chunk in enumerate((last, *forwards))}
    starts = [residue[0] % cycles]
    for chunk in range(1, last + 1):
        cycle = starts[-1] + (residue[chunk] - starts[-1]) % cycles
        while not arrives(cycle, starts[-1]):
            cycle += cycles
        starts.append(cycle)
    ends = {last: starts[-1] + p - 1}
    for chunk in range(last)[::-1]:
        before = ends[chunk + 1]
        cycle = before + (g * empty.cycle_chunks.index(chunk) - before) % cycles
        while not returns(cycle, before, chunk):
            cycle += cycles
        ends[chunk] = cycle
    return Timetable(
        spec=spec,
        cycle_chunks=empty.cycle_chunks,
        forward_cycles=tuple(starts),
        backward_cycles=tuple(ends[c] for c in range(last + 1)),
    )
