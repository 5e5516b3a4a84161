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
from functools import cache
from typing import Any

import numpy as np

from debubble.kernels import jit
from debubble.planners.scope.chunk_curves import SAMPLE, SAMPLES, ChunkCurves, sampled
from debubble.planners.scope.ends import Ends, long_runs
from debubble.planners.scope.instance import Instance
from debubble.planners.scope.loads import Capacity, Load, dealt, largest_run
from debubble.search.effort import Effort

LEVEL = 4.0
"""Factor between the bytes that recomputation brings back on one level at most."""
TRIED_AT_MOST = 2**23
"""Combinations of loads of a device's chunks, on all devices that are alike, beyond which all are taken to fit."""
CALL, LEVEL_CALL, TRIED = 6e-5, 6e-5, 1e-8
"""Seconds to ask what can be dealt, of that for one level of some devices, and of a combination that is tried."""

Choice = tuple[tuple[int, int], ...]
"""The runs that a chunk may hold, each with the least number of its layers there."""

Times = tuple[int, ...]
"""The time of every chunk that no device exceeds."""


@dataclass(frozen=True)
class _Group:
    """Devices whose chunks may hold the same runs, and their numbers.

    Attributes:
        devices: These devices.
        choices: Per chunk, what it may hold.
        runs: The runs that they may hold.
        largest: The run with the most layers among these; -1 if they may not hold that.
        sizes: The most layers of each run that matter.
        strides: Per run, what a layer of it adds to a place in `Capacity.most`; 0 for the largest.
        alive: `alive[device][row][chunk]`: micro-batches alive, in the device's unit of bytes.
        static: `static[device][run]`: bytes of a layer's states.
        levels: Bytes that recomputation may bring back at a time, at most, and the room[device][row] beside the least.
        prices: `prices[device][row]`: bytes for a unit of time, for all rows of memory without one and then with each.
    """

    devices: tuple[int, ...]
    choices: tuple[Choice, ...]
    runs: tuple[int, ...]
    largest: int
    sizes: Any
    strides: Any
    alive: Any
    static: Any
    levels: tuple[tuple[float, Any], ...]
    prices: Any

    @property
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
        self._chunk: Callable[[Choice, tuple[int, ...], int, float], tuple[Any, Any]] = cache(self._new_chunk)
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
        rows = max(len(each.alive) for each in those)
        alive = np.zeros((len(those), rows, inst.chunks))
        levels = [(most, np.full((len(those), rows), np.inf)) for _, most in _levels(inst, runs)]
        for at, each in enumerate(those):
            alive[at, : len(each.alive)] = np.array(each.alive, dtype=float).reshape(-1, inst.chunks) / each.unit
            for (least, _), (_, room) in zip(_levels(inst, runs), levels, strict=True):
                left = each.room - least / each.unit
                room[at, : len(each.alive)] = left + 1e-6 * abs(left)
        # Rows of memory, and then again with every price of time.
        prices = [np.zeros((len(those), rows))]
        prices += [price * alive[:, :, chunk] for chunk in range(inst.chunks) for price in self._curves.prices[:-1]]
        return _Group(
            devices=devices,
            choices=choices,
            runs=runs,
            largest=runs.index(largest) if largest in runs else -1,
            sizes=np.array(sizes),
            strides=np.array(strides),
            alive=alive,
            static=np.array([[each.static[r] for r in runs] for each in those], dtype=float),
            levels=tuple(levels),
            prices=np.concatenate(prices, axis=1),
        )

    def _new_capacity(
        self, choices: tuple[Choice, ...], devices: tuple[int, ...], times: Times, total: int | None
    ) -> Capacity:
        """What a group can hold in the times of its chunks."""
        group = self._group(choices, devices)
        shape = group.shape
        most = np.full((len(devices), math.prod(shape[1:])), -1)
        rows = group.alive.shape[1]
        price = group.prices[:, :rows] if total is None else group.prices
        repeats = price.shape[1] // rows
        alive = np.tile(group.alive, (1, repeats, 1))
        for restored, room in group.levels:
            chunks = [
                self._chunk(choice, group.runs, time, restored) for choice, time in zip(choices, times, strict=True)
            ]
            lengths = [len(kept) for _, kept in chunks]
            self._effort.spend(LEVEL_CALL)
            if not all(lengths):
                continue
            if math.prod(lengths) * len(devices) > TRIED_AT_MOST:
                most[:] = group.sizes[group.largest] if group.largest >= 0 else 0
                break
            numbers, kept = (np.concatenate(some) for some in zip(*chunks, strict=True))
            starts = np.cumsum([0, *lengths])
            room = np.tile(room, (1, repeats)) + price * (total or 0)
            sizes = _sizes(starts, numbers, kept, np.array((0.0, *self._curves.prices)), alive, price, group.static)
            tried = _fill(most, group.largest, group.sizes, group.strides, starts, numbers, sizes, room)
            self._effort.spend(TRIED * tried)
        most = most.reshape(shape)
        for axis in range(1, most.ndim):  # with fewer layers too
            most = np.flip(np.maximum.accumulate(np.flip(most, axis), axis=axis), axis)
        needed = {r: sum(tuple(run for run, _ in choice) == (r,) for choice in choices) for r in group.runs}
        return Capacity(devices, group.runs, most, needed)

    def _new_chunk(self, choice: Choice, every: tuple[int, ...], time: int, restored: float) -> tuple[Any, Any]:
        """Layers of a device's runs that a chunk can hold within the time, a row each, and their bytes by price."""
        runs, least = (tuple(each) for each in zip(*choice, strict=True))
        long = set(long_runs(self._inst))
        # A curve of all runs would be too large where two of them are long.
        at = next((i + 1 for i, run in enumerate(runs) if run in long), len(runs))
        first = self._curves.of(runs[:at], restored, time)
        if at < len(runs):
            other = self._curves.of(runs[at:], restored, time)
            kept = sampled(first, other, time)
            self._effort.spend(SAMPLE * SAMPLES * kept.size)
            one, two = first.priced_within(time), other.priced_within(time)
            priced = one.reshape(*one.shape[:-1], *(1,) * (two.ndim - 1), -1) + two
        else:
            kept = first.within(time)
            priced = first.priced_within(time)
        some = np.stack(np.nonzero(kept < np.inf), axis=-1)
        some = some[(some.sum(axis=1) > 0) & (some >= least).all(axis=1)]
        numbers = np.zeros((len(some), len(every)), dtype=np.int64)
        numbers[:, [every.index(run) for run in runs]] = some
        return numbers, np.concatenate((kept[tuple(some.T)][:, None], priced[tuple(some.T)]), axis=1)


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


@jit
def _sizes(starts: Any, numbers: Any, kept: Any, prices: Any, alive: Any, price: Any, static: Any) -> Any:
    """The bytes and the price of the time, at least: by device, row of a chunk and row of memory.

    Args:
        starts: Where the rows of each chunk begin, and in the end where they end.
        numbers: Per row, layers of each run.
        kept: Per row, a micro-batch's bytes and price of the time, for each of the prices.
        prices: These prices, the first of which is 0.
        alive: Micro-batches alive: by device, row of memory and chunk.
        price: The price of time: by device and row of memory.
        static: Bytes of a layer's states: by device and run.
    """
    devices, memories, chunks = alive.shape
    sizes = np.empty((devices, len(kept), memories))
    for device in range(devices):
        for chunk in range(chunks):
            for memory in range(memories):
                many = alive[device, memory, chunk]
                at, share = 0, 0.0
                if many > 0:
                    each = price[device, memory] / many
                    while at < len(prices) - 2 and prices[at + 1] <= each:
                        at += 1
                    share = min(1.0, (each - prices[at]) / (prices[at + 1] - prices[at]))
                for row in range(starts[chunk], starts[chunk + 1]):
                    size = 0.0
                    if many > 0:
                        size = many * ((1 - share) * kept[row, at] + share * kept[row, at + 1])
                    for run in range(numbers.shape[1]):
                        size += static[device, run] * numbers[row, run]
                    sizes[device, row, memory] = size
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
    """Raise `most[device][place]` to what the chunks of each device can hold together in its room.

    Args:
        most: By layers of each run but the largest: the most layers of that.
        largest: Which run that is; -1 if none of them.
        sizes: The most layers of each run that matter.
        strides: Per run, what a layer adds to the place.
        starts: Where the rows of each chunk begin, and in the end where they end.
        numbers: Per row, layers of each run, with more of the last one in later rows.
        size: Bytes: by device, row and row of memory.
        room: Bytes: by device and row of memory.

    Returns:
        The number of rows that were tried.
    """
    devices, memories = room.shape
    chunks, runs = len(starts) - 1, len(sizes)
    rest = np.empty((chunks, memories))
    used = np.zeros((chunks + 1, memories))
    total = np.zeros((chunks + 1, runs), np.int64)
    row = np.zeros(chunks, np.int64)
    later = np.zeros(chunks, np.int64)
    tried, full = 0, 0
    for chunk in range(chunks - 2, -1, -1):
        later[chunk] = later[chunk + 1] + numbers[starts[chunk + 1] : starts[chunk + 2], 0].max()
    for device in range(devices):
        rest[:] = 0.0
        for chunk in range(chunks):
            for memory in range(memories):
                least = np.inf
                for at in range(starts[chunk], starts[chunk + 1]):
                    least = min(least, size[device, at, memory])
                for before in range(chunk):
                    rest[before, memory] += least
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
            fits = True
            for step in range(memories):
                memory = (full + step) % memories
                used[chunk + 1, memory] = used[chunk, memory] + size[device, at, memory]
                if used[chunk + 1, memory] > room[device, memory] - rest[chunk, memory]:
                    fits, full = False, memory  # which will be the first to be full the next time too
                    break
            if not fits:
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
