"""The least time that CPU optimizer steps take on some device, as units are whole and the others' states must fit.

A device that cannot hold the optimizer states of all its units offloads some of them, whose CPU optimizer steps run one
after the other.  The sum over all devices says little where units are large: a device that lacks a tenth of a layer's
states offloads a whole layer's.  So all ways to assign units to devices are tried, with the least time of CPU steps for
each set of units, and the longest time of a device is minimised.

docs/notes/bounds.md has the proof.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.planners.bounds.ramps import ROUNDING, FinishedUnits, Piece, Pieces

SETS = 300
"""Sets of units next to those of the most frequent kind, up to which they are assigned."""


def least_host_steps(a: Pieces) -> float:
    """The least time of the CPU optimizer steps of the device with most of them, over all ways to assign pieces.

    Returns:
        The time; infinite if no way fits; 0 if all states fit on devices, if none can be offloaded, and if there are
        too many ways.
    """
    sets = _sets(a)
    if sets is None:
        return 0.0
    steps = {capacity: sets.host_steps(capacity * (1 + ROUNDING)) for capacity in set(a.rooms)}
    candidates = np.unique(np.concatenate([each[np.isfinite(each)] for each in steps.values()]))

    def possible(longest: float) -> bool:
        return sets.covered([(sets.most_within(steps[size], longest), n) for size, n in Counter(a.rooms).items()])

    low, high = 0, len(candidates)
    if high and possible(float(candidates[0])):
        high = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(float(candidates[middle])) else (middle + 1, high)
    return float(candidates[low]) * (1 - ROUNDING) if low < len(candidates) else math.inf


def finished_units(a: Pieces, *, longest: float, least: float) -> Iterator[FinishedUnits]:
    """Units of one kind, some of which every device offloads if CPU optimizer steps take no longer than `longest`.

    Kinds whose steps take less than `least` are left out.
    """
    sets = _sets(a)
    for kind in [] if sets is None else sets.kinds:
        if sets is None or kind.host_step < max(least, ROUNDING) or kind.count < len(a.rooms):
            continue
        number = 0
        while not _possible_with_few(sets, a, kind, number, longest):
            number += 1
        if number:
            places = [n for n, piece in enumerate(a.pieces) if _StateKind.of(piece) == replace(kind, count=1)]
            drained = min(a.pieces[n].gradient_offload for n in places)
            yield FinishedUnits(number * kind.host_step * (1 - ROUNDING) + drained, tuple(places))


def _possible_with_few(sets: _UnitSets, a: Pieces, kind: _StateKind, number: int, longest: float) -> bool:
    """Tell whether a device may offload at most so many of a kind, where CPU steps take no longer than that."""
    for size in set(a.rooms):
        others = Counter(a.rooms)
        others[size] -= 1
        devices = [(sets.most_within(sets.host_steps(s * (1 + ROUNDING)), longest), n) for s, n in others.items()]
        few = sets.most_within(sets.host_steps(size * (1 + ROUNDING), at_most=(kind, number)), longest)
        if sets.covered([*devices, (few, 1)]):
            return True
    return number >= kind.count


@dataclass(frozen=True)
class _StateKind:
    """Pieces whose states, step and transient bytes are equal."""

    static: float
    hosted: float
    host_step: float
    workspace: float
    activation: float
    count: int = 1

    @staticmethod
    def of(piece: Piece) -> _StateKind:
        """The kind of a piece."""
        return _StateKind(piece.static, piece.hosted, piece.host_step, piece.workspace, piece.activation)


def _sets(a: Pieces) -> _UnitSets | None:
    """The sets of a model's pieces; None if no states can be offloaded, or there are too many."""
    number = Counter(map(_StateKind.of, a.pieces))
    kinds = [replace(kind, count=count) for kind, count in number.most_common()]
    sets = math.prod(kind.count + 1 for kind in kinds[1:])
    return None if sets > SETS or not any(kind.host_step for kind in kinds) else _UnitSets.of(kinds)


@dataclass(frozen=True)
class _UnitSets:
    """Sets of pieces: some number of each kind but the most frequent (a row), and of that (a column)."""

    common: _StateKind
    others: tuple[_StateKind, ...]
    counts: Ints
    """Per row, the number of each other kind."""

    @staticmethod
    def of(kinds: Sequence[_StateKind]) -> _UnitSets:
        common, *others = kinds
        counts = np.array([*product(*(range(kind.count + 1) for kind in others))], dtype=np.int64)
        ways = math.prod(kind.count + 1 for kind in others)
        return _UnitSets(common, tuple(others), counts.reshape(ways, len(others)))

    @property
    def kinds(self) -> tuple[_StateKind, ...]:
        """All kinds."""
        return (self.common, *self.others)

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of each other kind, none included."""
        return tuple(kind.count + 1 for kind in self.others)

    def host_steps(self, capacity: float, *, at_most: tuple[_StateKind, int] | None = None) -> Floats:
        """The least time of CPU steps of a device with so many bytes, by row and column; infinite: too few bytes.

        It offloads at most so many pieces of one kind.
        """
        limits = {kind: kind.count for kind in self.kinds}
        if at_most is not None:
            limits[at_most[0]] = at_most[1]
        columns = np.arange(self.common.count + 1)
        columns_of = [(kind.static, kind.static - kind.hosted, kind.host_step) for kind in self.others]
        static, freed, step = np.array(columns_of, dtype=np.float64).reshape(-1, 3).T
        lacking = (self.counts @ static)[:, None] + columns[None, :] * self.common.static + self._transient() - capacity
        least = np.full(lacking.shape, np.inf)
        each = self.common.static - self.common.hosted
        for hosted in self.counts[(self.counts <= [limits[kind] for kind in self.others]).all(axis=1)]:
            rows = np.flatnonzero((self.counts >= hosted).all(axis=1))
            left = lacking[rows] - hosted @ freed
            number = np.where(left > 0, np.ceil(left / each) if each > 0 else columns + 1, 0)
            time = hosted @ step + number * self.common.host_step
            least[rows] = np.minimum(
                least[rows], np.where(number <= np.minimum(columns, limits[self.common]), time, np.inf)
            )
        return least

    def _transient(self) -> Floats:
        """Bytes next to states: the largest workspace, and the largest activation that a backward reads."""
        present = np.concatenate([self.counts > 0, np.zeros((len(self.counts), 1), dtype=np.bool_)], axis=1)
        total = np.zeros((len(self.counts), self.common.count + 1))
        for name in ("workspace", "activation"):
            sizes = np.array([*(getattr(kind, name) for kind in self.others), 0.0])
            largest = np.where(present, sizes, 0.0).max(axis=1)
            total += largest[:, None]
            total[:, 1:] += np.maximum(getattr(self.common, name) - largest, 0.0)[:, None]
        return total

    def most_within(self, steps: Floats, longest: float) -> Ints:
        """The most of the most frequent kind, by row, with which CPU steps take no longer; -1: not even none.

        Fewer pieces never need longer.
        """
        most: Ints = (steps <= longest * (1 + ROUNDING)).sum(axis=1) - 1
        return most

    def covered(self, devices: Sequence[tuple[Ints, int]]) -> bool:
        """Tell whether devices take all pieces: entries per row of a device, and the number of devices like it."""
        assigned = np.full(len(self.counts), -1, dtype=np.int64)
        assigned[0] = 0
        for most, number in devices:
            power = most
            while number:
                if number & 1:
                    assigned = self._together(assigned, power)
                number >>= 1
                if number:
                    power = self._together(power, power)
        return bool(assigned[-1] >= self.common.count)

    def _together(self, one: Ints, other: Ints) -> Ints:
        """The most of the most frequent kind that two devices, or groups of them, take together, by row."""
        one, result = one.reshape(self.shape), np.full(self.shape, -1, dtype=np.int64)
        for index in np.flatnonzero(other >= 0):
            count = self.counts[index]
            source = tuple(slice(0, size - c) for size, c in zip(self.shape, count, strict=True))
            target = tuple(slice(c, None) for c in count)
            here = one[source]
            result[target] = np.maximum(result[target], np.where(here >= 0, here + other[index], -1))
        return np.minimum(result, self.common.count).ravel()
