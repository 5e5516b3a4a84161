"""A lower bound on the CPU optimizer steps of the device with most of them, for undivided units.

A device that cannot hold the optimizer states of all its units offloads those of some, whose CPU optimizer steps run
sequentially.  Memory summed over devices gives a weak bound for large units: a device that lacks a tenth of a layer's
bytes has to offload the full layer.  So the bound minimizes the longest CPU step time of a device over all assignments
of units to devices, each device with its cheapest feasible offload.

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

MAX_SETS = 300
"""Maximum number of sets of units, without those of the most frequent kind, for which the bound is computed."""


def min_host_steps(a: Pieces) -> float:
    """Minimize the longest CPU optimizer step time of a device over all assignments of pieces to devices.

    Returns:
        The time; infinite if no assignment fits; 0 if all states fit on devices, if none can be offloaded, or if there
        are too many assignments.
    """
    sets = _sets(a)
    if sets is None:
        return 0.0
    steps = {capacity: sets.host_steps(capacity * (1 + ROUNDING)) for capacity in set(a.capacities)}
    candidates = np.unique(np.concatenate([times[np.isfinite(times)] for times in steps.values()]))

    def possible(longest: float) -> bool:
        return sets.covered([(sets.max_common(steps[size], longest), n) for size, n in Counter(a.capacities).items()])

    low, high = 0, len(candidates)
    if high and possible(float(candidates[0])):
        high = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(float(candidates[middle])) else (middle + 1, high)
    return float(candidates[low]) * (1 - ROUNDING) if low < len(candidates) else math.inf


def finished_units(a: Pieces, *, longest: float, min_step: float) -> Iterator[FinishedUnits]:
    """Kinds of units of which every device offloads some if no device has CPU optimizer steps longer than `longest`.

    Kinds whose steps are shorter than `min_step` are skipped.
    """
    sets = _sets(a)
    for kind in [] if sets is None else sets.kinds:
        if sets is None or kind.host_step < max(min_step, ROUNDING) or kind.count < len(a.capacities):
            continue
        number = 0
        while not _is_feasible_with(sets, a, kind, number, longest):
            number += 1
        if number:
            places = [n for n, piece in enumerate(a.pieces) if _StateKind.of_piece(piece) == replace(kind, count=1)]
            drain = min(a.pieces[n].gradient_offload for n in places)
            yield FinishedUnits(number * kind.host_step * (1 - ROUNDING) + drain, tuple(places))


def _is_feasible_with(sets: _UnitSets, a: Pieces, kind: _StateKind, number: int, longest: float) -> bool:
    """Whether some device can offload at most `number` of a kind if no device has CPU steps longer than `longest`."""
    for size in set(a.capacities):
        peers = Counter(a.capacities)
        peers[size] -= 1
        devices = [(sets.max_common(sets.host_steps(s * (1 + ROUNDING)), longest), n) for s, n in peers.items()]
        few = sets.max_common(sets.host_steps(size * (1 + ROUNDING), at_most=(kind, number)), longest)
        if sets.covered([*devices, (few, 1)]):
            return True
    return number >= kind.count


@dataclass(frozen=True)
class _StateKind:
    """Pieces with equal states, CPU step and transient bytes."""

    static: float
    hosted: float
    host_step: float
    workspace: float
    activation: float
    count: int = 1

    @staticmethod
    def of_piece(piece: Piece) -> _StateKind:
        return _StateKind(piece.static, piece.hosted, piece.host_step, piece.workspace, piece.activation)


def _sets(a: Pieces) -> _UnitSets | None:
    """The sets of a model's pieces; None if no states can be offloaded or there are too many sets."""
    number = Counter(map(_StateKind.of_piece, a.pieces))
    kinds = [replace(kind, count=count) for kind, count in number.most_common()]
    sets = math.prod(kind.count + 1 for kind in kinds[1:])
    return None if sets > MAX_SETS or not any(kind.host_step for kind in kinds) else _UnitSets.of_kinds(kinds)


@dataclass(frozen=True)
class _UnitSets:
    """All sets of pieces: a row is the number of pieces of each rare kind, a column that of the most frequent kind."""

    common: _StateKind
    rare: tuple[_StateKind, ...]
    counts: Ints
    """Shape (rows, rare kinds)."""

    @staticmethod
    def of_kinds(kinds: Sequence[_StateKind]) -> _UnitSets:
        common, *rare = kinds
        counts = np.array([*product(*(range(kind.count + 1) for kind in rare))], dtype=np.int64)
        rows = math.prod(kind.count + 1 for kind in rare)
        return _UnitSets(common, tuple(rare), counts.reshape(rows, len(rare)))

    @property
    def kinds(self) -> tuple[_StateKind, ...]:
        return (self.common, *self.rare)

    @property
    def shape(self) -> tuple[int, ...]:
        """Per rare kind, the number of its counts, zero included."""
        return tuple(kind.count + 1 for kind in self.rare)

    def host_steps(self, capacity: float, *, at_most: tuple[_StateKind, int] | None = None) -> Floats:
        """The shortest CPU steps of a device with this capacity, by row and column; infinite if the set does not fit.

        `at_most` limits the number of offloaded pieces of one kind.
        """
        limits = {kind: kind.count for kind in self.kinds}
        if at_most is not None:
            limits[at_most[0]] = at_most[1]
        columns = np.arange(self.common.count + 1)
        columns_of = [(kind.static, kind.static - kind.hosted, kind.host_step) for kind in self.rare]
        static, freed, step = np.array(columns_of, dtype=np.float64).reshape(-1, 3).T
        lacking = (self.counts @ static)[:, None] + columns[None, :] * self.common.static + self._transient() - capacity
        min_time = np.full(lacking.shape, np.inf)
        freed_by_common = self.common.static - self.common.hosted
        for hosted in self.counts[(self.counts <= [limits[kind] for kind in self.rare]).all(axis=1)]:
            rows = np.flatnonzero((self.counts >= hosted).all(axis=1))
            excess = lacking[rows] - hosted @ freed
            needed = np.ceil(excess / freed_by_common) if freed_by_common > 0 else columns + 1
            number = np.where(excess > 0, needed, 0)
            time = hosted @ step + number * self.common.host_step
            min_time[rows] = np.minimum(
                min_time[rows], np.where(number <= np.minimum(columns, limits[self.common]), time, np.inf)
            )
        return min_time

    def _transient(self) -> Floats:
        """Bytes in addition to states: the largest workspace plus the largest activation that a backward reads."""
        present = np.concatenate([self.counts > 0, np.zeros((len(self.counts), 1), dtype=np.bool_)], axis=1)
        total = np.zeros((len(self.counts), self.common.count + 1))
        for name in ("workspace", "activation"):
            sizes = np.array([*(getattr(kind, name) for kind in self.rare), 0.0])
            largest = np.where(present, sizes, 0.0).max(axis=1)
            total += largest[:, None]
            total[:, 1:] += np.maximum(getattr(self.common, name) - largest, 0.0)[:, None]
        return total

    def max_common(self, steps: Floats, longest: float) -> Ints:
        """Per row, the largest column whose CPU steps take at most `longest`; -1 if there is none.

        The time never decreases with the column.
        """
        columns: Ints = (steps <= longest * (1 + ROUNDING)).sum(axis=1) - 1
        return columns

    def covered(self, devices: Sequence[tuple[Ints, int]]) -> bool:
        """Whether the devices take all pieces, given `max_common` and the number of devices of each type."""
        assigned = np.full(len(self.counts), -1, dtype=np.int64)
        assigned[0] = 0
        for power, number in devices:
            while number:
                if number & 1:
                    assigned = self._together(assigned, power)
                number >>= 1
                if number:
                    power = self._together(power, power)
        return bool(assigned[-1] >= self.common.count)

    def _together(self, one: Ints, other: Ints) -> Ints:
        """Per row, the largest number of the most frequent kind that two (groups of) devices take together."""
        one, result = one.reshape(self.shape), np.full(self.shape, -1, dtype=np.int64)
        for index in np.flatnonzero(other >= 0):
            count = self.counts[index]
            source = tuple(slice(0, size - c) for size, c in zip(self.shape, count, strict=True))
            target = tuple(slice(c, None) for c in count)
            number = one[source]
            result[target] = np.maximum(result[target], np.where(number >= 0, number + other[index], -1))
        return np.minimum(result, self.common.count).ravel()
