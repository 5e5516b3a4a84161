"""The lanes of ChronosPipe: a periodic timetable for any p, v, f, b, recomputed chunks and group size.

Every device repeats v g lanes (v: chunks, g: micro-batches per group).  A lane is a gap of length f for one forward,
then the recomputation of its chunk, if that recomputes, then one backward of length b.  Its backward runs along the
diagonal: on device s it is s b earlier than on device 0.  A forward moves to the next lane's gap on each device.

So nothing ever collides, and only this is left to choose: which lane each chunk's forward and backward of the first
micro-batch take.  Their residues modulo v g must differ; the earliest lanes that meet the dependencies are taken.
Without recomputation this is Chronos-Pipe's modulo schedule of slots f + b.
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
class Rhythm:
    """The numbers that a timetable is made for: p, g, the chunk times f and b, each chunk's recompute time (0: none).

    Times are whole numbers of any unit, f and b at least 1.
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
    """The lanes of each chunk's first forward on device 0 and of its first backward on every device."""

    rhythm: Rhythm
    lane_chunks: tuple[int, ...]
    """The chunk whose backwards are in lanes 0 ... g - 1, g ... 2 g - 1, and so on."""
    forward_lanes: tuple[int, ...]
    backward_lanes: tuple[int, ...]

    @cached_property
    def period(self) -> int:
        """The time after which a device's lanes repeat."""
        return self._gaps[-1]

    @cached_property
    def _gaps(self) -> tuple[int, ...]:
        """The place of each lane's gap within a period."""
        r = self.rhythm
        lengths = [r.forward + r.recompute[c] + r.backward for c in self.lane_chunks for _ in range(r.group)]
        return tuple(itertools.accumulate(lengths, initial=0))

    def gap(self, lane: int) -> int:
        """The time at which a lane's gap begins on device 0."""
        periods, at = divmod(lane, len(self._gaps) - 1)
        return periods * self.period + self._gaps[at]

    def forward_start(self, chunk: int, device: int, micro_batch: int) -> int:
        """The time at which a forward starts on a device."""
        lane = self.forward_lanes[chunk] + self._lanes_until(micro_batch) + device
        return self.gap(lane) - self.rhythm.backward * device

    def backward_start(self, chunk: int, device: int, micro_batch: int) -> int:
        """The time at which a backward starts on a device, after its recomputation."""
        r = self.rhythm
        gap = self.gap(self.backward_lanes[chunk] + self._lanes_until(micro_batch))
        return gap + r.forward + r.recompute[chunk] - r.backward * device

    def operations(self, device: int, micro_batches: int) -> list[Timed]:
        """The operations of a device, in order of time."""
        r = self.rhythm
        operations: list[Timed] = []
        for chunk, j in itertools.product(range(r.chunks), range(micro_batches)):
            backward = self.backward_start(chunk, device, j)
            operations.append((self.forward_start(chunk, device, j), Kind.F, chunk, j))
            operations.append((backward, Kind.B, chunk, j))
            if r.recompute[chunk]:
                operations.append((backward - r.recompute[chunk], Kind.R, chunk, j))
        return sorted(operations, key=lambda timed: timed[0])

    def _lanes_until(self, micro_batch: int) -> int:
        group, within = divmod(micro_batch, self.rhythm.group)
        return group * self.rhythm.group * self.rhythm.chunks + within


def timetables(rhythm: Rhythm) -> Iterator[Timetable]:
    """One timetable per order of the chunks' residues: all of them up to four chunks, else Chronos-Pipe's own order."""
    v = rhythm.chunks
    others = range(v - 1)
    if v <= 4:
        orders = itertools.product(itertools.permutations(others), repeat=2)
        yield from (_earliest(rhythm, forwards, backwards) for forwards, backwards in orders)
    else:
        yield _earliest(rhythm, *_first_free(rhythm))


def _first_free(rhythm: Rhythm) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chunks in the order of their residues if each takes the first free lane after the pipeline's length."""
    v, slot = rhythm.chunks, rhythm.forward + rhythm.backward

    def order(chunks: Sequence[int], steps: int) -> tuple[int, ...]:
        lanes = {0: chunks[0]}
        lane = 0
        for chunk in chunks[1:]:
            lane += steps
            while lane % v in lanes:
                lane += 1
            lanes[lane % v] = chunk
        at_last = next(residue for residue, chunk in lanes.items() if chunk == v - 1)
        return tuple(lanes[(at_last + k) % v] for k in range(1, v))

    forwards = order(range(v), math.ceil(rhythm.devices * rhythm.forward / slot))
    backwards = order(range(v)[::-1], math.ceil(rhythm.devices * rhythm.backward / slot))
    return forwards, backwards


def _earliest(rhythm: Rhythm, forwards: tuple[int, ...], backwards: tuple[int, ...]) -> Timetable:
    """The earliest lanes when the chunks' forwards and backwards follow the last chunk's in these cyclic orders."""
    p, g, f, b = rhythm.devices, rhythm.group, rhythm.forward, rhythm.backward
    last, lanes = rhythm.chunks - 1, rhythm.chunks * g
    empty = Timetable(rhythm=rhythm, lane_chunks=(last, *backwards), forward_lanes=(), backward_lanes=())
    gap, group = empty.gap, range(g)

    def arrives(lane: int, before: int) -> bool:
        """The forward that follows, on device 0, comes after the one before it on device p - 1."""
        return all(gap(lane + i) >= gap(before + i + p - 1) - b * (p - 1) + f for i in group)

    def returns(lane: int, before: int, chunk: int) -> bool:
        """The backward on device p - 1 comes after that of the next chunk on device 0."""
        wait = b * p + rhythm.recompute[chunk + 1] - rhythm.recompute[chunk]
        return all(gap(lane + i) >= gap(before + i) + wait for i in group)

    # On device p - 1 the last chunk's forward is in the gap of its own backward, whose lanes are 0 ... g - 1.
    residue = {chunk: k * g - (p - 1) for k, chunk in enumerate((last, *forwards))}
    starts = [residue[0] % lanes]
    for chunk in range(1, last + 1):
        lane = starts[-1] + (residue[chunk] - starts[-1]) % lanes
        while not arrives(lane, starts[-1]):
            lane += lanes
        starts.append(lane)
    ends = {last: starts[-1] + p - 1}
    for chunk in range(last)[::-1]:
        before = ends[chunk + 1]
        lane = before + (g * empty.lane_chunks.index(chunk) - before) % lanes
        while not returns(lane, before, chunk):
            lane += lanes
        ends[chunk] = lane
    return Timetable(
        rhythm=rhythm,
        lane_chunks=empty.lane_chunks,
        forward_lanes=tuple(starts),
        backward_lanes=tuple(ends[c] for c in range(last + 1)),
    )
