"""SCOPE's per-chunk reading: within which times of the chunks all layers can be dealt.

Chunks do not make up for each other there, and max T is the sum of the times tau_c that no device exceeds in chunk c.
Once they are given, chunks of a device share nothing but its memory: of a number of layers in a chunk only the least
bytes matter that they can keep within tau_c, and whether a device can hold a load is a sum over its chunks.  So every
load of every device is decided at once, whole layers and strategies included.

It is never too strict.  Times of layers are rounded down to a share of the long run's, bytes are not rounded up, what
recomputation brings back counts as the least of its level, and of two long runs in one chunk the times are sampled.  So
where layers cannot be dealt here no assignment keeps those times.
"""

from __future__ import annotations

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
LEVEL = 2.0
"""Factor between the bytes that recomputation brings back on one level at most."""
DEVICE, CELL = 2e-4, 3e-9
"""Seconds to decide what one device can hold, and of a number in a curve."""

Choice = tuple[tuple[int, int], ...]
"""The runs that a chunk may hold, each with the least number of its layers there."""


@dataclass(frozen=True)
class _Curve:
    """The least bytes of a micro-batch's activations, by layers of each run and by time in units."""

    unit: int
    kept: Any

    def within(self, time: float) -> Any:
        """By layers of each run; infinite where they do not fit into that time."""
        at = min(int(time // self.unit), self.kept.shape[-1] - 1)
        return self.kept[..., at] if time >= 0 else np.full(self.kept.shape[:-1], np.inf)


class ChunkDealer:
    """Deals layers within times of the chunks.

    Args:
        inst: The program.
        effort: Counter of the work.
        most: The longest time of a chunk that is asked for.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float) -> None:
        self._inst, self._effort, self._most = inst, effort, most
        self._curve: Callable[[tuple[int, ...], tuple[int, ...], float], _Curve] = cache(self._new_curve)
        self._chunk: Callable[[Choice, float, float], tuple[Any, Any]] = cache(self._new_chunk)
        self._capacity: Callable[[int, tuple[Choice, ...], tuple[float, ...]], Capacity] = cache(self._new_capacity)

    def loads(self, times: Sequence[float], ends: Ends) -> list[Load] | None:
        """Loads of the devices that keep the times of the chunks; None if there are none."""
        self._effort.spend(DEAL)
        capacities = []
        for device, choices in enumerate(self._choices(ends)):
            capacity = self._capacity(device, choices, tuple(times))
            if not capacity.fits.any():
                return None
            capacities.append(capacity)
        return dealt(self._inst.counts, capacities)

    def _choices(self, ends: Ends) -> list[tuple[Choice, ...]]:
        """Per device and chunk, the runs that it may hold: all of those that no other stage may hold."""
        counts = self._inst.counts
        return [
            tuple(tuple((r, counts[r] if len(ends.spans[r]) == 1 else 0) for r in runs) for runs in opened)
            for opened in ends.opened(self._inst)
        ]

    def _new_capacity(self, device: int, choices: tuple[Choice, ...], times: tuple[float, ...]) -> Capacity:
        self._effort.spend(DEVICE)
        inst, its = self._inst, self._inst.devices[device]
        runs = tuple(sorted({run for choice in choices for run, _ in choice}))
        sizes = [min(inst.counts[r], sum(self._layers(r) for choice in choices if r in dict(choice))) for r in runs]
        fits = np.zeros([size + 1 for size in sizes], dtype=bool)
        for least, most in _levels(inst, runs):
            chunks = [self._chunk(choice, time, most) for choice, time in zip(choices, times, strict=True)]
            if all(len(kept) for _, kept in chunks):
                numbers = _held(its, runs, choices, chunks, its.room - least / its.unit)
                fits[tuple(np.minimum(numbers, sizes).T)] = True
        for axis in range(fits.ndim):  # with fewer layers too
            fits = np.flip(np.logical_or.accumulate(np.flip(fits, axis), axis=axis), axis)
        needed = tuple(sum(tuple(run for run, _ in choice) == (r,) for choice in choices) for r in runs)
        return Capacity(runs, fits, needed)

    def _layers(self, run: int) -> int:
        """The most layers of a run that a chunk can hold."""
        return min(self._inst.counts[run], int(self._most // max(1, min(self._inst.times[run]))))

    def _new_chunk(self, choice: Choice, time: float, restored: float) -> tuple[Any, Any]:
        """Layers of each run that a chunk can hold within the time, a row each, and the least bytes that they keep."""
        runs, least = (tuple(each) for each in zip(*choice, strict=True))
        long = set(long_runs(self._inst))
        # A curve of all runs would be too large where two of them are long.
        at = next((i + 1 for i, run in enumerate(runs) if run in long), len(runs))
        first = self._curve(runs[:at], least[:at], restored)
        kept = first.within(time)
        if at < len(runs):
            other = self._curve(runs[at:], least[at:], restored)
            kept = _sampled(first, other, time)
            self._effort.spend(CELL * SAMPLES * kept.size)
        numbers = np.argwhere(np.isfinite(kept))
        numbers = numbers[numbers.sum(axis=1) > 0]
        return numbers, kept[tuple(numbers.T)]

    def _new_curve(self, runs: tuple[int, ...], least: tuple[int, ...], restored: float) -> _Curve:
        inst = self._inst
        unit = max(1, min(inst.times[max(runs, key=lambda r: inst.counts[r])]) // FINE)
        cells = int(self._most // unit) + 1
        kept: Any = np.zeros(cells)
        for run, fixed in zip(runs, least, strict=True):
            some = zip(inst.times[run], inst.activations[run], inst.restored[run], strict=True)
            options = [(time // unit, size) for time, size, back in some if back <= restored]
            layers = [kept]
            for _ in range(self._layers(run)):
                more = np.full_like(kept, np.inf)
                for time, size in options:
                    if time < cells:
                        np.minimum(more[..., time:], layers[-1][..., : cells - time] + size, out=more[..., time:])
                layers.append(more)
            self._effort.spend(CELL * kept.size * len(layers) * len(options))
            impossible = np.full_like(kept, np.inf)
            kept = np.stack([impossible if number < fixed else one for number, one in enumerate(layers)], axis=-2)
        return _Curve(unit, kept)


def _sampled(one: _Curve, other: _Curve, time: float) -> Any:
    """The least bytes of both together: one of them takes up to a sample of the time, the other one the rest."""
    step = time / SAMPLES
    shape = (*one.kept.shape[:-1], *other.kept.shape[:-1])
    least = np.full(shape, np.inf)
    for sample in range(SAMPLES + 1):
        # The first may take up to one step more than is taken from the second: never too strict.
        mine, rest = one.within(min(time, (sample + 1) * step)), other.within(time - sample * step)
        np.minimum(least, np.add.outer(mine, rest), out=least)
    return least


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
    device: DeviceInstance,
    runs: Sequence[int],
    choices: Sequence[Choice],
    chunks: Sequence[tuple[Any, Any]],
    room: float,
) -> Any:
    """Layers of each run that the chunks can hold together in that room, a row each."""
    alive = np.array(device.alive, dtype=float).reshape(-1, len(chunks)) / device.unit
    static = np.array([device.static[r] for r in runs])
    parts = []
    for chunk, (choice, (some, kept)) in enumerate(zip(choices, chunks, strict=True)):
        numbers = np.zeros((len(some), len(runs)), dtype=np.int64)
        numbers[:, [runs.index(run) for run, _ in choice]] = some
        parts.append((numbers, np.outer(kept, alive[:, chunk]) + (numbers @ static)[:, None]))
    least = [sizes.min(axis=0) for _, sizes in parts]
    held, used = np.zeros((1, len(runs)), dtype=np.int64), np.zeros((1, len(alive)))
    for at, (numbers, sizes) in enumerate(parts):
        both = used[:, None] + sizes[None]
        fits = (both + sum(least[at + 1 :]) <= room + 1e-6 * abs(room)).all(axis=2)
        held, used = (held[:, None] + numbers[None])[fits], both[fits]
    return held
