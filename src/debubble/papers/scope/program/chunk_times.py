"""SCOPE's per-chunk reading: within which times of the chunks all layers can be dealt.

Chunks do not make up for each other there, and max T is the sum of the times tau_c that no device exceeds in chunk c.
Once they are given, chunks of a device share nothing but its memory: of a number of layers in a chunk only the least
bytes matter that they can keep within tau_c, and whether a device can hold a load is a sum over its chunks.  So every
load of every device is decided at once, whole layers and strategies included.

Where the sum of a device's times has to be shorter than all tau_c together, memory and time are bounded together.
With a price p of time in bytes, what fits into memory and into the sum has bytes + p time <= room + p sum, and the
least that its left side can be is a sum over the chunks too.  So that is a row like one of memory; there is one for
every row of memory, every chunk and every price at which a long run recomputes a little more.  The least is concave in
the price, so that between two prices for which it is known it is at least what a straight line says.

It is never too strict.  Times of layers are rounded down (`chunk_curves`), bytes are not rounded up, what recomputation
brings back counts as the least of its level, and of two long runs in one chunk the times are sampled; times so long
that the combinations of chunks would be too many to try hold everything.  So where layers cannot be dealt here no
assignment keeps those times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from debubble.kernels import jit
from debubble.papers.scope.program.chunk_curves import SAMPLE, SAMPLES, ChunkCurves
from debubble.papers.scope.program.ends import Ends, long_runs
from debubble.papers.scope.program.instance import Instance
from debubble.papers.scope.program.loads import Capacity, Load, dealt, largest_run
from debubble.search.effort import Effort

LEVEL = 4.0
"""Factor between the bytes that recomputation brings back on one level at most."""
TRIED_AT_MOST = 2**23
"""Combinations of loads of a device's chunks, on all devices that are alike, beyond which all are taken to fit."""
CALL, GROUP_CALL, CHUNK_CALL, TRIED = 1e-4, 4e-5, 3e-5, 1.2e-8
"""Seconds to ask what can be dealt; of that for devices that are alike, for a chunk of theirs, and a combination."""

Choice = tuple[tuple[int, int], ...]
"""The runs that a chunk may hold, each with the least number of its layers there."""

Times = tuple[int, ...]
"""The time of every chunk that no device exceeds."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Devices whose chunks may hold the same runs, and their numbers.

    Attributes:
        devices: These devices.
        choices: Per chunk, what it may hold.
        runs: The runs that they may hold.
        largest: The run with the most layers among these; -1 if they may not hold that.
        sizes: The most layers of each run that matter.
        strides: Per run, what a layer of it adds to a place in `Capacity.most`; 0 for the largest.
        weights: `weights[device][chunk][price][row]`: what a chunk's bytes with each price count for in a row.  Rows of
            memory come without a price of time first, and then again with each.
        rows: Rows without a price.
        prices: `prices[device][row]`: bytes for a unit of time.
        static: `static[device][run]`: bytes of a layer's states.
        restored: Bytes that recomputation may bring back at a time, at most, by level.
        room: `room[level][device][row]`: the room beside the least that is brought back.
        needed: By run, the layers without which a chunk would be empty.
    """

    devices: tuple[int, ...]
    choices: tuple[Choice, ...]
    runs: tuple[int, ...]
    largest: int
    sizes: Any
    strides: Any
    weights: Any
    rows: int
    prices: Any
    static: Any
    restored: tuple[float, ...]
    room: Any
    needed: dict[int, int]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of `Capacity.most`."""
        others = (size + 1 for at, size in enumerate(self.sizes.tolist()) if at != self.largest)
        return len(self.devices), *others


class ChunkDealer:
    """Deals layers within times of the chunks.

    Args:
        inst: The program.
        effort: Counter of the work.
        most: The longest time of a chunk that is asked for.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float) -> None:
        self._inst, self._effort = inst, effort
        self._curves = ChunkCurves(inst, effort, most)
        self._works: dict[tuple[int, ...], Any] = {}
        self._rows: Callable[[Choice, tuple[int, ...], tuple[int, ...]], tuple[Any, Any]] = cache(_new_rows)
        self._chunk: Callable[[Choice, tuple[int, ...], tuple[float, ...], int], tuple[Any, Any]] = cache(
            self._new_chunk
        )
        self._group: Callable[[tuple[Choice, ...], tuple[int, ...]], _Group] = cache(self._new_group)
        self._groups: Callable[[Ends], list[_Group]] = cache(self._new_groups)
        self._capacity: Callable[[tuple[Choice, ...], tuple[int, ...], Times, int | None], Capacity] = cache(
            self._new_capacity
        )

    def loads(self, times: Times, ends: Ends, total: int | None = None) -> list[Load] | None:
        """Loads of the devices that keep the times of the chunks; None if there are none.

        Args:
            times: Times that no device exceeds.
            ends: Where runs end.
            total: The time that no device exceeds in all its chunks; None: the sum of the others.
        """
        self._effort.spend(CALL)
        total = None if total is None or total >= sum(times) else total
        capacities = []
        work = 0
        for group in self._groups(ends):
            capacity = self._capacity(group.choices, group.devices, times, total)
            most = self._most_work(group, capacity)
            if most < 0:
                return None
            work += most
            capacities.append(capacity)
        if work < self._work(self._inst.counts):
            return None
        return dealt(self._inst.counts, capacities, self._effort)

    def step(self, run: int) -> int:
        """The time from which on a chunk of this run alone is taken to hold one layer, and so on."""
        return self._curves.step(run)

    def _most_work(self, group: _Group, capacity: Capacity) -> int:
        """The most work that its devices can hold, without recomputation; -1 if one of them cannot hold anything."""
        others = [run for at, run in enumerate(group.runs) if at != group.largest]
        key = *others, *group.shape[1:]
        if key not in self._works:
            axes = (
                self._inst.shortest[run] * np.arange(size) for run, size in zip(others, group.shape[1:], strict=True)
            )
            self._works[key] = np.ravel(sum(np.ix_(*axes), start=np.zeros(1, dtype=np.int64)))
        layer = self._inst.shortest[group.runs[group.largest]] if group.largest >= 0 else 0
        return int(_most_work(capacity.most.reshape(len(group.devices), -1), self._works[key], layer))

    def _work(self, counts: Sequence[int]) -> int:
        """The time of so many layers of each run, without recomputation."""
        return sum(self._inst.shortest[run] * count for run, count in enumerate(counts))

    def _new_groups(self, ends: Ends) -> list[_Group]:
        """The devices by the runs that each of their chunks may hold: all layers of those that no other stage may."""
        counts = self._inst.counts
        alike: dict[tuple[Choice, ...], list[int]] = {}
        for device, opened in enumerate(ends.opened(self._inst)):
            choices = tuple(tuple((r, counts[r] if len(ends.spans[r]) == 1 else 0) for r in runs) for runs in opened)
            alike.setdefault(choices, []).append(device)
        return [self._group(choices, tuple(devices)) for choices, devices in alike.items()]

    def _new_group(self, choices: tuple[Choice, ...], devices: tuple[int, ...]) -> _Group:
        inst, those = self._inst, [self._inst.devices[device] for device in devices]
        runs = tuple(sorted({run for choice in choices for run, _ in choice}))
        sizes = [
            min(inst.counts[r], sum(self._curves.layers(r) for choice in choices if r in dict(choice))) for r in runs
        ]
        largest = largest_run(inst.counts)
        strides, stride = [0] * len(runs), 1
        for at in range(len(runs) - 1, -1, -1):
            if runs[at] != largest:
                strides[at], stride = stride, stride * (sizes[at] + 1)
        levels = _levels(inst, runs)
        rows = max(1, *(len(each.alive) for each in those))  # without a limit one that holds everything
        alive = np.zeros((len(those), rows, inst.chunks))
        room = np.full((len(levels), len(those), rows), np.inf)
        for at, each in enumerate(those):
            alive[at, : len(each.alive)] = np.array(each.alive, dtype=float).reshape(-1, inst.chunks) / each.unit
            for level, (least, _) in enumerate(levels):
                left = each.room - least / each.unit
                room[level, at, : len(each.alive)] = left + 1e-6 * abs(left)
        prices = [np.zeros((len(those), rows))]
        prices += [price * alive[:, :, chunk] for chunk in range(inst.chunks) for price in self._curves.prices[:-1]]
        every = np.concatenate(prices, axis=1)
        return _Group(
            devices=devices,
            choices=choices,
            runs=runs,
            largest=runs.index(largest) if largest in runs else -1,
            sizes=np.array(sizes),
            strides=np.array(strides),
            weights=_weights(np.tile(alive, (1, len(prices), 1)), every, np.array((0.0, *self._curves.prices))),
            rows=rows,
            prices=every,
            static=np.array([[each.static[r] for r in runs] for each in those], dtype=float),
            restored=tuple(most for _, most in levels),
            room=np.tile(room, (1, 1, len(prices))),
            needed={r: sum(tuple(run for run, _ in choice) == (r,) for choice in choices) for r in runs},
        )

    def _new_capacity(
        self, choices: tuple[Choice, ...], devices: tuple[int, ...], times: Times, total: int | None
    ) -> Capacity:
        """What a group can hold in the times of its chunks."""
        group = self._group(choices, devices)
        chunks = [
            self._chunk(choice, group.runs, group.restored, time) for choice, time in zip(choices, times, strict=True)
        ]
        starts = np.cumsum([0, *(len(numbers) for numbers, _ in chunks)])
        numbers = np.concatenate([numbers for numbers, _ in chunks])
        kept = np.concatenate([kept for _, kept in chunks], axis=1)
        weights, room = group.weights, group.room
        if total is None:
            weights, room = (np.ascontiguousarray(each[..., : group.rows]) for each in (weights, room))
        else:
            room = room + total * group.prices
        most = np.full((len(devices), math.prod(group.shape[1:])), -1)
        tried = _fill_levels(
            most, group.largest, group.sizes, group.strides, starts, numbers, kept, weights, group.static, room
        )
        self._effort.spend(GROUP_CALL + TRIED * tried)
        return Capacity(devices, group.runs, most.reshape(group.shape), group.needed)

    def _new_chunk(
        self, choice: Choice, every: tuple[int, ...], restored: tuple[float, ...], time: int
    ) -> tuple[Any, Any]:
        """Layers of a device's runs that a chunk can hold within the time, a row each, and their bytes.

        Bytes are those of each level, first themselves, and then with each price of time.
        """
        self._effort.spend(CHUNK_CALL)
        runs = tuple(run for run, _ in choice)
        long = set(long_runs(self._inst))
        # A curve of all runs would be too large where two of them are long.
        at = next((i + 1 for i, run in enumerate(runs) if run in long), len(runs))
        first = self._curves.of(runs[:at], restored, time)
        shape = first.shape
        if at < len(runs):
            other = self._curves.of(runs[at:], restored, time)
            kept, priced = first.together(other, time)
            shape += other.shape
            self._effort.spend(SAMPLE * SAMPLES * kept.size)
        else:
            kept, priced = first.within(time)
        numbers, filled = self._rows(choice, every, shape)
        some = np.flatnonzero((kept[-1] < np.inf) & filled)
        return numbers[some], np.concatenate((kept[:, some, None], priced[:, some]), axis=2)


def _new_rows(choice: Choice, every: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Layers of a device's runs in the rows of a chunk's curve, and whether they fill it as they have to."""
    numbers = np.zeros((math.prod(shape), len(every)), dtype=np.int64)
    least = np.zeros(len(every), dtype=np.int64)
    for (run, some), layers in zip(choice, np.indices(shape), strict=True):
        numbers[:, every.index(run)] = layers.ravel()
        least[every.index(run)] = some
    return numbers, (numbers.sum(axis=1) > 0) & (numbers >= least).all(axis=1)


def _levels(inst: Instance, runs: Sequence[int]) -> list[tuple[float, float]]:
    """Bytes that recomputation may bring back at a time, at least and at most: none, or sizes that differ little."""
    levels = [(0.0, 0.0)]
    for size in sorted({size for r in runs for size in inst.restored[r]} - {0.0}):
        least, _ = levels[-1]
        if size <= LEVEL * least:
            levels[-1] = (least, size)
        else:
            levels.append((size, size))
    return levels


def _weights(alive: Any, each: Any, prices: Any) -> Any:
    """The `weights` of a `_Group`: the least in between two prices is at least what a straight line says.

    Args:
        alive: Micro-batches alive: by device, row of memory and chunk.
        each: The price of time: by device and row of memory.
        prices: The prices of the curves, the first of which is 0.
    """
    price = np.divide(each[..., None], alive, out=np.zeros_like(alive), where=alive > 0)
    above = np.searchsorted(prices, price, side="right").clip(1, len(prices) - 1)
    share = np.minimum(1.0, (price - prices[above - 1]) / (prices[above] - prices[above - 1]))
    weights = np.zeros((*alive.shape, len(prices)))
    np.put_along_axis(weights, above[..., None] - 1, (alive * (1 - share))[..., None], axis=-1)
    np.put_along_axis(weights, above[..., None], (alive * share)[..., None], axis=-1)
    return np.ascontiguousarray(weights.transpose(0, 2, 3, 1))


@jit
def _fill_levels(
    most: Any,
    largest: int,
    sizes: Any,
    strides: Any,
    starts: Any,
    numbers: Any,
    kept: Any,
    weights: Any,
    static: Any,
    room: Any,
) -> int:
    """Raise `most[device][place]` to what the chunks of each device can hold together, whatever is brought back.

    Args:
        most: By layers of each run but the largest: the most layers of that.
        largest: Which run that is; -1 if none of them.
        sizes: The most layers of each run that matter.
        strides: Per run, what a layer adds to the place.
        starts: Where the rows of each chunk begin, and in the end where they end.
        numbers: Per row, layers of each run, with more of the last one in later rows.
        kept: By level, row and price: a micro-batch's bytes and price of the time; infinite where they do not fit.
        weights: What these count for: by device, chunk, price and row of memory.
        static: Bytes of a layer's states: by device and run.
        room: Bytes: by level, device and row of memory.

    Returns:
        The number of rows that were tried.
    """
    devices, chunks, tried = len(room[0]), len(starts) - 1, 0
    begins = np.zeros_like(starts)
    for level in range(len(kept)):
        finite = np.flatnonzero(kept[level, :, 0] < np.inf)
        combinations = float(devices)
        for chunk in range(chunks):
            begins[chunk + 1] = np.searchsorted(finite, starts[chunk + 1])
            combinations *= begins[chunk + 1] - begins[chunk]
        if combinations == 0:
            continue
        if combinations > TRIED_AT_MOST:
            most[:] = sizes[largest] if largest >= 0 else 0
            break
        some = numbers[finite]
        size = _sizes(begins, some, kept[level][finite], weights, static)
        tried += _fill(most, largest, sizes, strides, begins, some, size, room[level])
    for run in range(len(sizes)):  # with fewer layers too
        if run != largest:
            for place in range(most.shape[1] - 1, -1, -1):
                if place // strides[run] % (sizes[run] + 1) < sizes[run]:
                    for device in range(devices):
                        most[device, place] = max(most[device, place], most[device, place + strides[run]])
    return tried


@jit
def _sizes(starts: Any, numbers: Any, kept: Any, weights: Any, static: Any) -> Any:
    """The bytes and the price of the time, at least: by device, row of a chunk and row of memory.

    The arguments are those of `_fill_levels`, at one level.
    """
    devices, chunks, prices, memories = weights.shape
    sizes = np.empty((devices, len(kept), memories))
    for device in range(devices):
        for chunk in range(chunks):
            for row in range(starts[chunk], starts[chunk + 1]):
                states = 0.0
                for run in range(numbers.shape[1]):
                    states += static[device, run] * numbers[row, run]
                size = sizes[device, row]
                size[:] = states
                for price in range(prices):
                    for memory in range(memories):
                        size[memory] += weights[device, chunk, price, memory] * kept[row, price]
    return sizes


@jit
def _fill(
    most: Any,
    largest: int,
    sizes: Any,
    strides: Any,
    starts: Any,
    numbers: Any,
    size: Any,
    room: Any,
) -> int:
    """The same as `_fill_levels` for one level, by the bytes of device, row and row of memory.

    Returns:
        The number of rows that were tried.
    """
    devices, memories = room.shape
    chunks, runs = len(starts) - 1, len(sizes)
    left = np.empty((chunks, memories))
    used = np.zeros((chunks + 1, memories))
    total = np.zeros((chunks + 1, runs), np.int64)
    row = np.zeros(chunks, np.int64)
    later = np.zeros(chunks, np.int64)
    tried, full = 0, 0
    for chunk in range(chunks - 2, -1, -1):
        later[chunk] = later[chunk + 1] + numbers[starts[chunk + 1] : starts[chunk + 2], 0].max()
    for device in range(devices):
        for chunk in range(chunks):
            left[chunk] = room[device]
        for chunk in range(chunks):
            for memory in range(memories):
                least = np.inf
                for at in range(starts[chunk], starts[chunk + 1]):
                    least = min(least, size[device, at, memory])
                for before in range(chunk):
                    left[before, memory] -= least
        chunk, row[0] = 0, starts[1]
        while chunk >= 0:
            row[chunk] -= 1
            at = row[chunk]
            if at < starts[chunk]:
                chunk -= 1
                continue
            for run in range(runs):
                total[chunk + 1, run] = total[chunk, run] + numbers[at, run]
            place, number = 0, 0
            if chunk == chunks - 1:
                for run in range(runs):
                    place += strides[run] * min(total[chunks, run], sizes[run])
                number = min(total[chunks, largest], sizes[largest]) if largest >= 0 else 0
                if number <= most[device, place]:
                    continue
            elif runs == 1 and strides[0] == 0 and total[chunk + 1, 0] + later[chunk] <= most[device, 0]:
                continue  # of one run alone only the largest number matters
            tried += 1
            if used[chunk, full] + size[device, at, full] > left[chunk, full]:
                continue
            over = 0
            for memory in range(memories):
                used[chunk + 1, memory] = used[chunk, memory] + size[device, at, memory]
                over += used[chunk + 1, memory] > left[chunk, memory]
            if over > 0:
                full = 0  # which will be the first to be asked the next time too
                while used[chunk + 1, full] <= left[chunk, full]:
                    full += 1
                continue
            if chunk < chunks - 1:
                chunk += 1
                row[chunk] = starts[chunk + 1]
            else:
                most[device, place] = number
    return tried


@jit
def _most_work(most: Any, works: Any, layer: int) -> int:
    """The sum over devices of the most work that each can hold; -1 if one of them cannot hold anything.

    Args:
        most: By device and layers of other runs: the most layers of the largest.
        works: The work of the other runs' layers.
        layer: The work of a layer of the largest run.
    """
    work = 0
    for device in range(len(most)):
        largest = -1
        for place in range(len(works)):
            if most[device, place] >= 0:
                largest = max(largest, works[place] + layer * most[device, place])
        if largest < 0:
            return -1
        work += largest
    return work
