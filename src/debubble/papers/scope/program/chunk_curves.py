"""The least bytes that a chunk's layers keep within a time, as a curve over the time for each number of layers.

Times of layers are rounded down, so that a curve is never too strict, in the unit in which they lose least among some
shares of the largest run's layer: what a bound can prove ends where rounding begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from debubble.kernels import jit
from debubble.papers.scope.program.ends import long_runs
from debubble.papers.scope.program.instance import Instance
from debubble.search.effort import Effort

FINE, FINEST = 128, 256
"""Units of time of the shortest layer of a run, at least and at most."""
FEW = 5
"""Layers of a run whose rounding counts: as many as a chunk holds of a long one."""
SAMPLES = 128
"""Samples of the time of a chunk that two long runs share."""
COARSE = 16
"""Units of time that one number of a curve with prices stands for."""
PRICES, HIGH = 4, 64.0
"""Prices of time at most, and the highest one over the largest that saves bytes."""
REACH = 1.5
"""A curve reaches so much further than the time that is asked for."""
CELL, SAMPLE = 2e-9, 3e-10
"""Seconds of a number in a curve and of a sample."""


@dataclass(frozen=True)
class Curve:
    """The least bytes of a micro-batch's activations, by what recomputation may bring back, layers and time.

    Attributes:
        unit: Unit of the times.
        shape: One more than the most layers of each run; numbers of layers are rows in that order.
        kept: `kept[level][row][time]`: the least bytes within this time.
        priced: `priced[level][row][time // COARSE][price]`: the least sum of bytes and the price of the time they
            need, within the longest time of this number.
    """

    unit: int
    shape: tuple[int, ...]
    kept: Any
    priced: Any

    @property
    def longest(self) -> int:
        """The time beyond which it says nothing."""
        return int(self.unit * self.kept.shape[-1])

    def within(self, time: int) -> tuple[Any, Any]:
        """Bytes by level and row, infinite where the layers do not fit into the time; and by price too."""
        cell = min(time // self.unit, self.kept.shape[-1] - 1)
        return self.kept[..., cell], self.priced[:, :, cell // COARSE]

    def together(self, other: Curve, time: int) -> tuple[Any, Any]:
        """The same with layers of another curve: one of them takes up to a sample of the time, the other the rest."""
        step = time / SAMPLES
        samples = np.arange(SAMPLES + 1)
        # The first may take up to one step more than is taken from the second: never too strict.
        ours, theirs = self._sampled(np.minimum(time, (samples + 1) * step)), other._sampled(time - samples * step)
        kept = _least_sums(ours, np.ascontiguousarray(theirs.swapaxes(1, 2)))
        priced = self.within(time)[1][:, :, None] + other.within(time)[1][:, None]
        return kept, priced.reshape(*kept.shape, -1)

    def _sampled(self, times: Any) -> Any:
        return self.kept[..., np.minimum(times // self.unit, self.kept.shape[-1] - 1).astype(np.int64)]


class ChunkCurves:
    """The curves of all sets of runs; each is computed when it is first asked for.

    Args:
        inst: The program.
        effort: Counter of the work.
        most: The longest time of a chunk that is asked for.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float) -> None:
        self._inst, self._effort, self._most = inst, effort, most
        self._curves: dict[tuple[tuple[int, ...], tuple[float, ...]], Curve] = {}
        self.prices = _prices(inst)

    def layers(self, run: int, time: float | None = None) -> int:
        """The most layers of a run that a chunk can hold in a time, or in any that is asked for."""
        return min(
            self._inst.counts[run], int((self._most if time is None else time) // max(1, self._inst.shortest[run]))
        )

    def of(self, runs: tuple[int, ...], restored: tuple[float, ...], time: float) -> Curve:
        """The curve of some runs, with a level for all that may be brought back, which reaches the time at least."""
        known = self._curves.get((runs, restored))
        if known is None or known.longest < min(time, self._most):
            known = self._curves[runs, restored] = self._new_curve(runs, restored, min(REACH * time, self._most))
        return known

    def step(self, run: int) -> int:
        """The shortest time of a layer, as the curve of this run alone has it."""
        unit = self._unit((run,))
        return max(1, self._inst.shortest[run] // unit) * unit

    def _unit(self, runs: tuple[int, ...]) -> int:
        """The unit of time in which the layers of these runs lose least when their times are rounded down."""
        inst = self._inst
        layer = inst.shortest[max(runs, key=lambda r: inst.counts[r])]
        units = np.arange(max(1, layer // FINEST), max(1, layer // FINE) + 1)
        lost = sum(min(FEW, inst.counts[r]) * np.max([time % units for time in inst.times[r]], axis=0) for r in runs)
        return int(units[np.argmin(lost)])

    def _new_curve(self, runs: tuple[int, ...], restored: tuple[float, ...], longest: float) -> Curve:
        unit = self._unit(runs)
        cells = int(longest // unit) + 1
        kept = np.stack([self._least_bytes(runs, back, unit, longest) for back in restored])
        rows = kept.reshape(-1, cells)
        priced = _priced(rows, unit * np.array(self.prices)).reshape(
            len(kept), -1, (cells - 1) // COARSE + 1, len(self.prices)
        )
        return Curve(unit, kept.shape[1:-1], kept.reshape(len(kept), -1, cells), priced)

    def _least_bytes(self, runs: tuple[int, ...], restored: float, unit: int, longest: float) -> Any:
        """The least bytes by layers of each run and by time, where so many bytes may be brought back at a time."""
        inst = self._inst
        cells = int(longest // unit) + 1
        kept: Any = np.zeros(cells)
        for run in runs:
            some = zip(inst.times[run], inst.activations[run], inst.restored[run], strict=True)
            options = [(time // unit, size) for time, size, back in some if back <= restored]
            layers = [kept]
            for _ in range(self.layers(run, longest)):
                more = np.full_like(kept, np.inf)
                for time, size in options:
                    if time < cells:
                        np.minimum(more[..., time:], layers[-1][..., : cells - time] + size, out=more[..., time:])
                layers.append(more)
            self._effort.spend(CELL * kept.size * len(layers) * len(options))
            kept = np.stack(layers, axis=-2)
        return kept


@jit
def _least_sums(one: Any, other: Any) -> Any:
    """By level and for a row of each: the least sum of what stands in the same sample.

    Args:
        one: By level, row and sample.
        other: By level, sample and row.
    """
    levels, rows, samples = one.shape
    others = other.shape[2]
    least = np.full((levels, rows, others), np.inf)
    for level in range(levels):
        for row in range(rows):
            for sample in range(samples):
                # The innermost loop has sums of its own, so that the compiler does some at once.
                for beside in range(others):
                    total = one[level, row, sample] + other[level, sample, beside]
                    before = least[level, row, beside]
                    least[level, row, beside] = total if total < before else before
    return least.reshape(levels, rows * others)


@jit
def _priced(kept: Any, prices: Any) -> Any:
    """The `priced` of a `Curve`, in one row for all its layers."""
    rows, cells = kept.shape
    priced = np.empty((rows, (cells - 1) // COARSE + 1, len(prices)))
    for row in range(rows):
        for at in range(len(prices)):
            least = np.inf
            for cell in range(cells):
                least = min(least, kept[row, cell] + prices[at] * cell)
                if cell % COARSE == COARSE - 1 or cell == cells - 1:
                    priced[row, cell // COARSE, at] = least
    return priced


def _prices(inst: Instance) -> tuple[float, ...]:
    """Bytes that a unit of time saves where long runs recompute a little more, and in the end far more than any."""
    slopes: set[float] = set()
    for run in long_runs(inst):
        slopes |= set(_slopes(list(zip(inst.times[run], inst.activations[run], strict=True))))
    some = sorted(slopes) or [1.0]
    if len(some) > PRICES:
        some = [some[round(at * (len(some) - 1) / (PRICES - 1))] for at in range(PRICES)]
    return (*some, HIGH * some[-1])


def _slopes(points: list[tuple[int, float]]) -> list[float]:
    """Slopes of the lower convex hull."""
    hull: list[tuple[int, float]] = []
    for time, size in sorted(points):
        if hull and size >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (time - hull[-1][0]) >= (size - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((time, size))
    return [(a - b) / (t - s) for (s, a), (t, b) in pairwise(hull) if t > s]
