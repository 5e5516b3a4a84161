"""Bounds from assignments of undivided units to devices.

Units cannot be split, and the states of a device's units must fit.  After its first forward arrives, a device does all
the work of its units for every micro-batch.  The *granular* bound is the shortest time in which all devices finish,
over all assignments of units to devices, for any order.

Stages are also runs of adjacent units.  If all devices have equally many stages, a device can only have units that form
that many runs: the *contiguous* bound is the shortest time over such assignments and over the numbers of stages.

docs/notes/bounds.md has the proofs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, combinations, product
from operator import mul, or_

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.planners.bounds.ramps import ROUNDING, Pieces, first_arrivals

MAX_SETS = 200_000
"""Maximum number of sets of units, by kind, for which the bounds are computed."""
MAX_ROWS = 600
"""Above this number of sets, not counting the most frequent kind, kinds of similar work are merged."""
HORIZON_FACTOR = 1.1
"""Each iteration of the contiguous bound searches up to this multiple of the known bound."""
MAX_SUMS = 2_000_000
"""Maximum number of sums of runs that are enumerated at once."""


def granular_bound(a: Pieces, *, arrivals: bool = False) -> float:
    """The shortest time in which all devices finish, over all assignments of pieces that fit; 0 if there are too many.

    A dynamic program over devices keeps, for every number of assigned pieces of the rare kinds, the largest number of
    the most frequent kind: as fewer pieces never take longer, the largest number dominates.

    With `arrivals` the wait for a device's first forward counts too; this requires equal capacities.
    """
    kinds = _merged(_kinds(a))
    if _set_count(kinds) > MAX_SETS or kinds[0].work <= 0:
        return 0.0
    assignment, waits = _Assignment.of_kinds(kinds), _waits(a, arrivals=arrivals)
    works = np.unique(
        assignment.work[:, None] + assignment.common.work * np.arange(assignment.common.count + 1)[None, :]
    )
    start = max(sum(piece.work for piece in a.pieces) / len(a.capacities), max(piece.work for piece in a.pieces))
    candidates = _candidates(works, waits, start=start)

    def possible(time: float) -> bool:
        limits = time * (1 + ROUNDING) - waits
        both = zip(limits, a.capacities, strict=True)
        return assignment.covered([assignment.max_common(limit, capacity * (1 + ROUNDING)) for limit, capacity in both])

    place = bisect_left(candidates, True, key=possible)
    return a.micro_batches * float(candidates[place]) * (1 - ROUNDING) if place < len(candidates) else math.inf


def contiguous_bound(a: Pieces, *, chunks: Sequence[int], known_bound: float, arrivals: bool = False) -> float:
    """The shortest time in which all devices finish if each has equally many stages, which are runs of adjacent pieces.

    With half-layers as units, for instance, a device of two stages cannot have four attentions without an MLP.  Runs of
    different devices may overlap in this relaxation.

    Args:
        a: The relaxed problem.
        chunks: The possible numbers of stages per device.
        known_bound: A known lower bound, such as the granular bound.
        arrivals: As for `granular_bound`.

    Returns:
        The time; `known_bound`, or as far as it could be raised, if there are too many runs.
    """
    kinds = _kinds(a)
    if _set_count(kinds) > MAX_SETS or math.isinf(known_bound):
        return known_bound
    waits, total = _waits(a, arrivals=arrivals), sum(piece.work for piece in a.pieces)
    while True:
        horizon = HORIZON_FACTOR * known_bound / a.micro_batches
        choices = _sums_of_runs(a, kinds, chunks, horizon)
        if choices is None:
            return known_bound
        works = np.unique(np.concatenate([sums.work for sums in choices]))
        candidates = _candidates(works, waits, start=known_bound / a.micro_batches, end=horizon)

        def possible(time: float, choices: Sequence[_Choices] = choices) -> bool:
            limits = time * (1 + ROUNDING) - waits
            both = list(zip(limits, a.capacities, strict=True))
            # A device that idles longer leaves more work than the others have time for.
            idle = limits.sum() - total * (1 - ROUNDING)
            return any(
                _covers_exactly(kinds, [sums.within(*limit, idle=idle) for limit in both]) for sums in reversed(choices)
            )

        place = bisect_left(candidates, True, key=possible)
        if place < len(candidates):
            return a.micro_batches * float(candidates[place]) * (1 - ROUNDING)
        if horizon > total + waits.max():
            return math.inf
        known_bound = a.micro_batches * horizon


@dataclass(frozen=True)
class _Kind:
    """Pieces of equal work and states, which are interchangeable."""

    work: float
    states: float
    count: int


def _kinds(a: Pieces) -> tuple[_Kind, ...]:
    """The kinds of the pieces, the most frequent first."""
    number = Counter((piece.work, piece.hosted) for piece in a.pieces)
    return tuple(_Kind(*kind, count) for kind, count in number.most_common())


def _merged(kinds: Sequence[_Kind]) -> Sequence[_Kind]:
    """Merge kinds of equal states and similar work, and keep the smaller work, until there are few enough sets."""
    while len(kinds) > 2 and _set_count(kinds[1:]) > MAX_ROWS:
        pairs = [(a, b) for a, b in combinations(kinds, 2) if a.states == b.states]
        if not pairs:
            break
        pair = min(pairs, key=lambda both: abs(both[0].work - both[1].work))
        both = _Kind(min(kind.work for kind in pair), pair[0].states, sum(kind.count for kind in pair))
        kinds = sorted([both, *(kind for kind in kinds if kind not in pair)], key=lambda kind: -kind.count)
    return kinds


def _set_count(kinds: Sequence[_Kind]) -> int:
    """The number of sets with some pieces of each kind."""
    return math.prod(kind.count + 1 for kind in kinds)


def _waits(a: Pieces, *, arrivals: bool) -> Floats:
    """Per device, the wait for its first forward, divided by the number of micro-batches."""
    return first_arrivals(a) / a.micro_batches if arrivals else np.zeros(len(a.capacities))


def _candidates(works: Floats, waits: Floats, *, start: float, end: float = math.inf) -> Floats:
    """The possible finishing times of a device with one of these works, from `start` to `end`."""
    sums = works[:, None] + np.unique(waits)[None, :]
    return np.unique(np.append(sums[(sums > start) & (sums < end)], start))


@dataclass(frozen=True)
class _Assignment:
    """All sets of pieces of the rare kinds: numbers of each kind, work, and bytes of states."""

    common: _Kind
    shape: tuple[int, ...]
    counts: Ints
    work: Floats
    states: Floats

    @staticmethod
    def of_kinds(kinds: Sequence[_Kind]) -> _Assignment:
        """The sets of all kinds but the first."""
        common, *rare = kinds
        shape = tuple(kind.count + 1 for kind in rare)
        counts = np.array([*product(*map(range, shape))], dtype=np.int64).reshape(math.prod(shape), len(shape))
        columns = np.array([(kind.work, kind.states) for kind in rare], dtype=np.float64).reshape(len(shape), 2)
        return _Assignment(common, shape, counts, counts @ columns[:, 0], counts @ columns[:, 1])

    def max_common(self, limit: float, capacity: float) -> Floats:
        """Per set, how many pieces of the most frequent kind a device can take with it; -1 if the set does not fit."""
        number = np.minimum((limit - self.work) / self.common.work, self.common.count)
        if self.common.states > 0:
            number = np.minimum(number, (capacity - self.states) / self.common.states)
        possible = (self.work <= limit) & (self.states <= capacity)
        return np.where(possible, np.floor(number + ROUNDING), -1)

    def covered(self, devices: Sequence[Floats]) -> bool:
        """Whether devices with these `max_common` take all pieces."""
        # A margin of unreachable entries keeps differences of indices within the array.
        sizes = np.array(self.shape, dtype=np.int64)
        places = np.cumprod(np.append(1, (2 * sizes - 1)[:0:-1]))[::-1] if self.shape else np.zeros(0, np.int64)
        inside = (self.counts + sizes - 1) @ places
        assigned = np.full(math.prod(2 * size - 1 for size in self.shape), -np.inf)
        assigned[inside[0]] = 0
        for numbers in devices:
            possible = np.flatnonzero(numbers >= 0)
            following = np.full(len(inside), -np.inf)
            step = max(1, MAX_SUMS // len(inside))
            for block in np.split(possible, range(step, len(possible), step)):
                sources = inside[:, None] - (self.counts[block] @ places)[None, :]
                following = np.maximum(following, (assigned[sources] + numbers[block]).max(axis=1, initial=-np.inf))
            assigned[inside] = following
        return bool(assigned[inside[-1]] >= self.common.count)


@dataclass(frozen=True)
class _Choices:
    """Sets of units that form runs: rows with the number of each kind, their work and the bytes of their states."""

    counts: Ints
    work: Floats
    states: Floats

    def within(self, limit: float, capacity: float, *, idle: float) -> Ints:
        """The rows that fit a device's time and capacity, and leave it idle for at most `idle`."""
        fits = (self.work <= limit) & (self.work >= limit - idle) & (self.states <= capacity * (1 + ROUNDING))
        return self.counts[fits]


def _sums_of_runs(a: Pieces, kinds: Sequence[_Kind], chunks: Sequence[int], horizon: float) -> list[_Choices] | None:
    """Per number of chunks, all sums of that many runs with at most `horizon` work; None if there are too many."""
    place = {(kind.work, kind.states): n for n, kind in enumerate(kinds)}
    works, states, counts = np.array([(kind.work, kind.states, kind.count) for kind in kinds]).T
    distinct: set[tuple[int, ...]] = set()
    for begin in range(len(a.pieces)):
        run, work = [0] * len(kinds), 0.0
        for piece in a.pieces[begin:]:
            run[place[piece.work, piece.hosted]] += 1
            work += piece.work
            if work > horizon * (1 + ROUNDING):
                break
            distinct.add(tuple(run))
    runs = np.array(sorted(distinct), dtype=np.int64).reshape(-1, len(kinds))
    sums, choices = np.zeros((1, len(kinds)), dtype=np.int64), []
    for number in range(1, max(chunks) + 1):
        if len(sums) * len(runs) * max(chunks) > MAX_SUMS:
            return None
        sums = (sums[:, None] + runs[None, :]).reshape(-1, len(kinds))
        sums = np.unique(sums[(sums @ works <= horizon * (1 + ROUNDING)) & (sums <= counts).all(axis=1)], axis=0)
        if number in chunks:
            choices.append(_Choices(sums, sums @ works, sums @ states))
    return choices


def _covers_exactly(kinds: Sequence[_Kind], choices: Sequence[Ints]) -> bool:
    """Whether the devices can take exactly all pieces, each with one of its rows.

    The reachable sets are bits of an integer.  The index of a set has one digit per kind, in a base that is large
    enough to add one device's row without a carry.
    """
    place = [1, *accumulate((2 * kind.count + 1 for kind in kinds), mul)]
    all_pieces = sum(kind.count * digit for kind, digit in zip(kinds, place, strict=False))
    exist = 1
    for kind, digit in zip(kinds, place, strict=False):
        exist = reduce(or_, (exist << number * digit for number in range(kind.count + 1)))
    assigned = 1
    for rows in choices:
        moves = (rows @ np.array(place[:-1])).tolist()
        assigned = reduce(or_, (assigned << move for move in moves), 0) & exist
    return bool(assigned >> all_pieces & 1)
