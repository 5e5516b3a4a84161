"""Bounds that assign whole units to devices.

Units cannot be cut, and the states of a device's units must fit.  Every plan assigns the units to devices in some way,
and a device has all the work of its units, for every micro-batch, after the first forward has come to it.  The least
time in which all devices can be done, over all ways to assign, is the *granular* bound, whatever the order.

Stages are runs of units besides.  Where every device has as many stages as any other, not every mixture of units is
that many runs, nor has every device that many units: that is the *contiguous* bound, the least over the numbers of
stages.

docs/notes/bounds.md has the proofs at length.
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

MAX_WAYS = 200_000
"""Ways to assign units of each kind up to which the bounds are computed."""
MAX_ROWS = 600
"""Numbers of units of all kinds but the most frequent, up to which kinds of nearly the same work stay apart."""
HORIZON_FACTOR = 1.1
"""Times of the known bound within which a better one is sought at a time."""
MAX_SUMS = 2_000_000
"""Sums of runs up to which all that a device can hold is listed."""


def granular_bound(a: Pieces, *, arrivals: bool = False) -> float:
    """The least time in which all devices do their work, over all ways to assign pieces that fit; 0 if too many.

    Devices are taken one after the other.  For what is assigned of all kinds but one, the most of that one is kept:
    fewer pieces never take a device longer, so that what covers more covers all.

    With `arrivals` the time counts from the first forward on, which comes late to all devices but one; devices are then
    taken to have the same room.
    """
    kinds = _merged(_kinds(a))
    if _ways(kinds) > MAX_WAYS or kinds[0].work <= 0:
        return 0.0
    assignment, waits = _Assignment.of(kinds), _waits(a, arrivals=arrivals)
    works = np.unique(
        assignment.work[:, None] + assignment.common.work * np.arange(assignment.common.count + 1)[None, :]
    )
    least = max(sum(piece.work for piece in a.pieces) / len(a.rooms), max(piece.work for piece in a.pieces))
    candidates = _candidates(works, waits, least=least)

    def possible(time: float) -> bool:
        limits = time * (1 + ROUNDING) - waits
        both = zip(limits, a.rooms, strict=True)
        return assignment.covered(
            [assignment.most_within(limit, capacity * (1 + ROUNDING)) for limit, capacity in both]
        )

    place = bisect_left(candidates, True, key=possible)
    return a.micro_batches * float(candidates[place]) * (1 - ROUNDING) if place < len(candidates) else math.inf


def contiguous_bound(a: Pieces, *, chunks: Sequence[int], least: float, arrivals: bool = False) -> float:
    """The least time in which all devices do their work, where each has so many stages: runs of neighbouring pieces.

    A model with layers of two halves, say, leaves a device of two stages no four attentions without an MLP.  That the
    runs of different devices must not overlap is abandoned.

    Args:
        a: The pieces, and the devices that they are assigned to.
        chunks: The numbers of stages that every device may have.
        least: A time that is known to be needed, such as the granular bound.
        arrivals: As of `granular_bound`.

    Returns:
        The time; `least`, or what was excluded beyond it, if there are too many ways.
    """
    kinds = _kinds(a)
    if _ways(kinds) > MAX_WAYS or math.isinf(least):
        return least
    waits, total = _waits(a, arrivals=arrivals), sum(piece.work for piece in a.pieces)
    while True:
        within = HORIZON_FACTOR * least / a.micro_batches
        choices = _sums_of_runs(a, kinds, chunks, within)
        if choices is None:
            return least
        works = np.unique(np.concatenate([each.work for each in choices]))
        candidates = _candidates(works, waits, least=least / a.micro_batches, most=within)

        def possible(time: float, choices: Sequence[_Choices] = choices) -> bool:
            limits = time * (1 + ROUNDING) - waits
            both = list(zip(limits, a.rooms, strict=True))
            # Who works less than this leaves the others more than they can do.
            idle = limits.sum() - total * (1 - ROUNDING)
            return any(
                _exactly(kinds, [each.within(*limit, idle=idle) for limit in both]) for each in reversed(choices)
            )

        place = bisect_left(candidates, True, key=possible)
        if place < len(candidates):
            return a.micro_batches * float(candidates[place]) * (1 - ROUNDING)
        if within > total + waits.max():
            return math.inf
        least = a.micro_batches * within


@dataclass(frozen=True)
class _Kind:
    """Pieces of equal work and states; an assignment need not tell them apart."""

    work: float
    states: float
    count: int


def _kinds(a: Pieces) -> tuple[_Kind, ...]:
    """The kinds of the pieces, the commonest first."""
    number = Counter((piece.work, piece.hosted) for piece in a.pieces)
    return tuple(_Kind(*kind, count) for kind, count in number.most_common())


def _merged(kinds: Sequence[_Kind]) -> Sequence[_Kind]:
    """Fewer kinds, where there are many ways to assign them: two of equal states become one with the less work."""
    while len(kinds) > 2 and _ways(kinds[1:]) > MAX_ROWS:
        pairs = [(a, b) for a, b in combinations(kinds, 2) if a.states == b.states]
        if not pairs:
            break
        pair = min(pairs, key=lambda both: abs(both[0].work - both[1].work))
        both = _Kind(min(kind.work for kind in pair), pair[0].states, sum(kind.count for kind in pair))
        kinds = sorted([both, *(kind for kind in kinds if kind not in pair)], key=lambda kind: -kind.count)
    return kinds


def _ways(kinds: Sequence[_Kind]) -> int:
    """The number of ways to take some pieces of each kind."""
    return math.prod(kind.count + 1 for kind in kinds)


def _waits(a: Pieces, *, arrivals: bool) -> Floats:
    """The time until the first forward of each device, per micro-batch."""
    return first_arrivals(a) / a.micro_batches if arrivals else np.zeros(len(a.rooms))


def _candidates(works: Floats, waits: Floats, *, least: float, most: float = math.inf) -> Floats:
    """The times within which devices can be done, from the least on, where these are the works that they can have."""
    sums = works[:, None] + np.unique(waits)[None, :]
    return np.unique(np.append(sums[(sums > least) & (sums < most)], least))


@dataclass(frozen=True)
class _Assignment:
    """All numbers of pieces of each kind but the commonest, with their work and their states' bytes."""

    common: _Kind
    shape: tuple[int, ...]
    counts: Ints
    work: Floats
    states: Floats

    @staticmethod
    def of(kinds: Sequence[_Kind]) -> _Assignment:
        """The numbers of all kinds but the first."""
        common, *others = kinds
        shape = tuple(kind.count + 1 for kind in others)
        counts = np.array([*product(*map(range, shape))], dtype=np.int64).reshape(math.prod(shape), len(shape))
        columns = np.array([(kind.work, kind.states) for kind in others], dtype=np.float64).reshape(len(shape), 2)
        return _Assignment(common, shape, counts, counts @ columns[:, 0], counts @ columns[:, 1])

    def most_within(self, limit: float, capacity: float) -> Floats:
        """The most pieces of the commonest kind that fit on a device, by number of the others; -1: not even these."""
        most = np.minimum((limit - self.work) / self.common.work, self.common.count)
        if self.common.states > 0:
            most = np.minimum(most, (capacity - self.states) / self.common.states)
        possible = (self.work <= limit) & (self.states <= capacity)
        return np.where(possible, np.floor(most + ROUNDING), -1)

    def covered(self, most: Sequence[Floats]) -> bool:
        """Tell whether devices that can take so many of the commonest, next to each number of the others, take all."""
        # A margin of what cannot be assigned keeps differences of numbers within the array.
        sizes = np.array(self.shape, dtype=np.int64)
        places = np.cumprod(np.append(1, (2 * sizes - 1)[:0:-1]))[::-1] if self.shape else np.zeros(0, np.int64)
        inside = (self.counts + sizes - 1) @ places
        assigned = np.full(math.prod(2 * size - 1 for size in self.shape), -np.inf)
        assigned[inside[0]] = 0
        for each in most:
            possible = np.flatnonzero(each >= 0)
            following = np.full(len(inside), -np.inf)
            step = max(1, MAX_SUMS // len(inside))
            for block in np.split(possible, range(step, len(possible), step)):
                sources = inside[:, None] - (self.counts[block] @ places)[None, :]
                following = np.maximum(following, (assigned[sources] + each[block]).max(axis=1, initial=-np.inf))
            assigned[inside] = following
        return bool(assigned[inside[-1]] >= self.common.count)


@dataclass(frozen=True)
class _Choices:
    """The sets of units that fit on a device: rows of numbers of each kind, with their work and state bytes."""

    counts: Ints
    work: Floats
    states: Floats

    def within(self, limit: float, capacity: float, *, idle: float) -> Ints:
        """The rows that a device has the time and the room for, and with which it idles no longer than that."""
        fits = (self.work <= limit) & (self.work >= limit - idle) & (self.states <= capacity * (1 + ROUNDING))
        return self.counts[fits]


def _sums_of_runs(a: Pieces, kinds: Sequence[_Kind], chunks: Sequence[int], within: float) -> list[_Choices] | None:
    """All sums of so many runs of pieces within a limit of work, by number of chunks; None if they are too many."""
    place = {(kind.work, kind.states): n for n, kind in enumerate(kinds)}
    works, states, counts = np.array([(kind.work, kind.states, kind.count) for kind in kinds]).T
    found: set[tuple[int, ...]] = set()
    for begin in range(len(a.pieces)):
        run, work = [0] * len(kinds), 0.0
        for piece in a.pieces[begin:]:
            run[place[piece.work, piece.hosted]] += 1
            work += piece.work
            if work > within * (1 + ROUNDING):
                break
            found.add(tuple(run))
    runs = np.array(sorted(found), dtype=np.int64).reshape(-1, len(kinds))
    sums, choices = np.zeros((1, len(kinds)), dtype=np.int64), []
    for number in range(1, max(chunks) + 1):
        if len(sums) * len(runs) * max(chunks) > MAX_SUMS:
            return None
        sums = (sums[:, None] + runs[None, :]).reshape(-1, len(kinds))
        sums = np.unique(sums[(sums @ works <= within * (1 + ROUNDING)) & (sums <= counts).all(axis=1)], axis=0)
        if number in chunks:
            choices.append(_Choices(sums, sums @ works, sums @ states))
    return choices


def _exactly(kinds: Sequence[_Kind], choices: Sequence[Ints]) -> bool:
    """Tell whether devices, each with one of its rows of numbers, hold all pieces.

    Bit n of a number stands for what has been assigned, in digits of n per kind, which are large enough for the sum of
    that and of what one more device holds.
    """
    place = [1, *accumulate((2 * kind.count + 1 for kind in kinds), mul)]
    all_of_them = sum(kind.count * digit for kind, digit in zip(kinds, place, strict=False))
    exist = 1
    for kind, digit in zip(kinds, place, strict=False):
        exist = reduce(or_, (exist << number * digit for number in range(kind.count + 1)))
    assigned = 1
    for rows in choices:
        moves = (rows @ np.array(place[:-1])).tolist()
        assigned = reduce(or_, (assigned << move for move in moves), 0) & exist
    return bool(assigned >> all_of_them & 1)
