"""SCOPE's per-chunk reading: within which times of the chunks all layers can be dealt.

Chunks do not make up for each other there, and max T is the sum of the times tau_c that no device exceeds in chunk c.
Once they are given, chunks of a device share nothing but its memory: of a number of layers in a chunk only the least
bytes matter that they can keep within tau_c, and whether a device can hold a load is a sum over its chunks.  So every
load of every device is decided at once, whole layers and strategies included.

It is never too strict.  Times of layers are rounded down to a share of the long run's, bytes are not rounded up, what
recomputation brings back counts as the least of its level, and of two long runs in one chunk the times are sampled;
times so long that the combinations of chunks would be too many to try hold everything.  So where layers cannot be dealt
here no assignment keeps those times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from debubble.planners.scope.ends import Ends, long_runs
from debubble.planners.scope.instance import DeviceInstance, Instance
from debubble.planners.scope.loads import DEAL, Capacity, Load, dealt
from debubble.search.effort import Effort

FINE = 256
"""Units of time of the shortest layer of a run."""
SAMPLES = 128
"""Samples of the time of a chunk that two long runs share."""
AT_ONCE = 2**21
"""Sums of samples that are held at once."""
LEVEL = 2.0
"""Factor between the bytes that recomputation brings back on one level at most."""
TRIED_AT_MOST = 2**21
"""Combinations of loads of a device's chunks, on all devices that are alike, beyond which all are taken to fit."""
REACH = 1.5
"""A curve reaches so much further than the time that is asked for."""
DEVICES, CELL, TRIED = 1.2e-4, 2e-9, 2e-8
"""Seconds to decide what some devices can hold on one level, of a number in a curve or a sample, and of a size that is
compared with a device's room."""

Choice = tuple[tuple[int, int], ...]
"""The runs that a chunk may hold, each with the least number of its layers there."""


@dataclass(frozen=True)
class _Curve:
    """The least bytes of a micro-batch's activations, by layers of each run and by time in units."""

    unit: int
    kept: Any

    @property
    def longest(self) -> int:
        """The time beyond which it says nothing."""
        return int(self.unit * self.kept.shape[-1])

    def within(self, times: Any) -> Any:
        """By layers of each run and by time; infinite where they do not fit into it."""
        return self.kept[..., np.clip(times // self.unit, 0, self.kept.shape[-1] - 1).astype(np.int64)]


class ChunkDealer:
    """Deals layers within times of the chunks.

    Args:
        inst: The program.
        effort: Counter of the work.
        most: The longest time of a chunk that is asked for.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float) -> None:
        self._inst, self._effort, self._most = inst, effort, most
        self._curves: dict[tuple[tuple[int, ...], float], _Curve] = {}
        self._capacities: dict[tuple[tuple[Choice, ...], tuple[float, ...]], dict[int, Capacity]] = {}
        self._works: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}
        self._chunk: Callable[[Choice, float, float], tuple[Any, Any]] = cache(self._new_chunk)
        self._devices_by_choices: Callable[[Ends], dict[tuple[Choice, ...], list[int]]] = cache(
            self._new_devices_by_choices
        )

    def loads(self, times: Sequence[float], ends: Ends) -> list[Load] | None:
        """Loads of the devices that keep the times of the chunks; None if there are none."""
        self._effort.spend(DEVICES)
        found: dict[int, Capacity] = {}
        for choices, devices in self._devices_by_choices(ends).items():
            found |= dict(zip(devices, self._capacities_of(devices, choices, tuple(times)), strict=True))
            if not all(found[device].fits.any() for device in devices):
                return None
        if sum(self._most_work(capacity) for capacity in found.values()) < self._work(self._inst.counts):
            return None
        self._effort.spend(DEAL)
        return dealt(self._inst.counts, [found[device] for device in range(len(self._inst.devices))])

    def _most_work(self, capacity: Capacity) -> int:
        """The most work that a device can hold, without recomputation."""
        fits = capacity.fits
        key = capacity.runs, fits.shape
        if key not in self._works:
            axes = (self._shortest(run) * np.arange(size) for run, size in zip(capacity.runs, fits.shape, strict=True))
            self._works[key] = sum(np.ix_(*axes))
        return int(self._works[key][fits].max())

    def _work(self, counts: Sequence[int]) -> int:
        """The time of so many layers of each run, without recomputation."""
        return sum(self._shortest(run) * count for run, count in enumerate(counts))

    def _capacities_of(
        self, devices: Sequence[int], choices: tuple[Choice, ...], times: tuple[float, ...]
    ) -> list[Capacity]:
        """What these devices can hold; what is known is not computed again."""
        known = self._capacities.setdefault((choices, times), {})
        new = [device for device in devices if device not in known]
        if new:
            known.update(zip(new, self._new_capacities(new, choices, times), strict=True))
        return [known[device] for device in devices]

    def _new_devices_by_choices(self, ends: Ends) -> dict[tuple[Choice, ...], list[int]]:
        """The devices by the runs that each of their chunks may hold: all layers of those that no other stage may."""
        counts = self._inst.counts
        alike: dict[tuple[Choice, ...], list[int]] = {}
        for device, opened in enumerate(ends.opened(self._inst)):
            choices = tuple(tuple((r, counts[r] if len(ends.spans[r]) == 1 else 0) for r in runs) for runs in opened)
            alike.setdefault(choices, []).append(device)
        return alike

    def _new_capacities(
        self, devices: Sequence[int], choices: Sequence[Choice], times: Sequence[float]
    ) -> list[Capacity]:
        """What each of these devices can hold in the times of its chunks."""
        inst, those = self._inst, [self._inst.devices[device] for device in devices]
        runs = tuple(sorted({run for choice in choices for run, _ in choice}))
        sizes = [min(inst.counts[r], sum(self._layers(r) for choice in choices if r in dict(choice))) for r in runs]
        fits = np.zeros([len(those), *(size + 1 for size in sizes)], dtype=bool)
        for least, most in _levels(inst, runs):
            self._effort.spend(DEVICES)
            chunks = [self._chunk(choice, time, most) for choice, time in zip(choices, times, strict=True)]
            if math.prod((len(those), *(len(kept) for _, kept in chunks))) > TRIED_AT_MOST:
                fits[:] = True
            elif all(len(kept) for _, kept in chunks):
                rooms = [each.room - least / each.unit for each in those]
                each_device, numbers, tried = _held(those, runs, choices, chunks, rooms)
                self._effort.spend(TRIED * tried)
                fits[(each_device, *np.minimum(numbers, sizes).T)] = True
        for axis in range(1, fits.ndim):  # with fewer layers too
            fits = np.flip(np.logical_or.accumulate(np.flip(fits, axis), axis=axis), axis)
        needed = tuple(sum(tuple(run for run, _ in choice) == (r,) for choice in choices) for r in runs)
        return [Capacity(runs, each, needed) for each in fits]

    def _layers(self, run: int, time: float | None = None) -> int:
        """The most layers of a run that a chunk can hold in a time, or in any that is asked for."""
        return min(self._inst.counts[run], int((self._most if time is None else time) // max(1, self._shortest(run))))

    def _shortest(self, run: int) -> int:
        return min(self._inst.times[run])

    def _new_chunk(self, choice: Choice, time: float, restored: float) -> tuple[Any, Any]:
        """Layers of each run that a chunk can hold within the time, a row each, and the least bytes that they keep."""
        runs, least = (tuple(each) for each in zip(*choice, strict=True))
        long = set(long_runs(self._inst))
        # A curve of all runs would be too large where two of them are long.
        at = next((i + 1 for i, run in enumerate(runs) if run in long), len(runs))
        first = self._curve(runs[:at], restored, time)
        if at < len(runs):
            other = self._curve(runs[at:], restored, time)
            kept = _sampled(first, other, time)
            self._effort.spend(CELL * SAMPLES * kept.size)
        else:
            kept = first.within(np.array(time))
        numbers = np.argwhere(np.isfinite(kept))
        numbers = numbers[(numbers.sum(axis=1) > 0) & (numbers >= least).all(axis=1)]
        return numbers, kept[tuple(numbers.T)]

    def _curve(self, runs: tuple[int, ...], restored: float, time: float) -> _Curve:
        """The curve of some runs, which reaches the time at least."""
        known = self._curves.get((runs, restored))
        if known is None or known.longest < min(time, self._most):
            known = self._curves[runs, restored] = self._new_curve(runs, restored, min(REACH * time, self._most))
        return known

    def _new_curve(self, runs: tuple[int, ...], restored: float, longest: float) -> _Curve:
        inst = self._inst
        unit = max(1, self._shortest(max(runs, key=lambda r: inst.counts[r])) // FINE)
        cells = int(longest // unit) + 1
        kept: Any = np.zeros(cells)
        for run in runs:
            some = zip(inst.times[run], inst.activations[run], inst.restored[run], strict=True)
            options = [(time // unit, size) for time, size, back in some if back <= restored]
            layers = [kept]
            for _ in range(self._layers(run, longest)):
                more = np.full_like(kept, np.inf)
                for time, size in options:
                    if time < cells:
                        np.minimum(more[..., time:], layers[-1][..., : cells - time] + size, out=more[..., time:])
                layers.append(more)
            self._effort.spend(CELL * kept.size * len(layers) * len(options))
            kept = np.stack(layers, axis=-2)
        return _Curve(unit, kept)


def _sampled(one: _Curve, other: _Curve, time: float) -> Any:
    """The least bytes of both together: one of them takes up to a sample of the time, the other one the rest."""
    step = time / SAMPLES
    samples = np.arange(SAMPLES + 1)
    # The first may take up to one step more than is taken from the second: never too strict.
    mine = one.within(np.minimum(time, (samples + 1) * step)).reshape(-1, SAMPLES + 1)
    rest = other.within(time - samples * step).reshape(-1, SAMPLES + 1)
    some = max(1, AT_ONCE // rest.size)
    least = [(mine[at : at + some, None] + rest).min(axis=-1) for at in range(0, len(mine), some)]
    return np.concatenate(least).reshape(*one.kept.shape[:-1], *other.kept.shape[:-1])


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


def _held(
    devices: Sequence[DeviceInstance],
    runs: Sequence[int],
    choices: Sequence[Choice],
    chunks: Sequence[tuple[Any, Any]],
    rooms: Sequence[float],
) -> tuple[Any, Any, int]:
    """What the chunks of each device can hold together in its room: devices, and layers of each run, a row each.

    The last part of the answer is the number of sizes that were compared with the room.
    """
    rows = max(len(each.alive) for each in devices)
    alive = np.zeros((len(devices), rows, len(chunks)))
    room = np.full((len(devices), rows), np.inf)
    for at, each in enumerate(devices):
        room[at, : len(each.alive)] = rooms[at] + 1e-6 * abs(rooms[at])
        alive[at, : len(each.alive)] = np.array(each.alive, dtype=float).reshape(-1, len(chunks)) / each.unit
    static = np.array([[each.static[r] for r in runs] for each in devices])
    parts = []
    for chunk, (choice, (some, kept)) in enumerate(zip(choices, chunks, strict=True)):
        numbers = np.zeros((len(some), len(runs)), dtype=np.int64)
        numbers[:, [runs.index(run) for run, _ in choice]] = some
        sizes = kept[None, :, None] * alive[:, None, :, chunk] + (static @ numbers.T)[:, :, None]
        parts.append((numbers, sizes))
    least = [sizes.min(axis=1) for _, sizes in parts]
    held, used = np.zeros((1, len(runs)), dtype=np.int64), np.zeros((len(devices), 1, rows))
    tried = 0
    for at, (numbers, sizes) in enumerate(parts):
        both = used[:, :, None] + sizes[:, None]
        left = room - sum(least[at + 1 :], np.zeros_like(room))
        fits = (both <= left[:, None, None]).all(axis=3)
        tried += both.size
        somewhere = fits.any(axis=0)
        held, used = (held[:, None] + numbers[None])[somewhere], both[:, somewhere]
    fitting, which = np.nonzero(fits[:, somewhere])
    return fitting, held[which], tried
