"""Packing of tensors with known lifetimes into one arena (dynamic storage allocation).

The peak of live bytes is a lower bound on the arena.  A skyline stores the height of the placed tensors over time; the
tensor of highest priority among those that live within a lowest segment is placed there; if there is none, the segment
rises to its lower neighbor (Sekiyama et al., Profile-guided memory optimization for deep neural networks, 2018).
Priorities by lifetime, size and load are improved by random changes until an arena equals the peak or a fixed number is
reached, so a program has the same addresses on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import jit

MAX_CHANGES, MAX_PAIR_WORK = 3_000, 5 * 10**8
"""Limits on the changes of priorities, and on the sum of squared tensor counts over all changes."""
CHANGE_SHARES, CHANGE_RANGE = (0.01, 0.1, 0.3), 1.0
"""Fractions of the priorities that a change modifies, one of which is drawn, and the width of the range added to their
logarithms."""
FIT_BONUS = 1.0
"""Added to the logarithm of a priority for each end of the lifetime that coincides with an end of the segment."""
BLOCK_SIZE = 32
"""Tensors per block; blocks whose highest priority does not exceed the best one are skipped."""


class Packing(NamedTuple):
    """Offsets in an arena, with its size and its lower bound."""

    offset: Ints
    arena: int
    peak: int


def pack(start: Ints, end: Ints, size: Ints) -> Packing:
    """Place tensors in an arena so that tensors that are live at the same time do not overlap.

    Args:
        start: When each tensor becomes live, as integers, ascending.
        end: When each tensor is freed, after its start.
        size: Positive sizes in bytes, or in multiples of another unit.
    """
    if not len(size):
        return Packing(size, 0, 0)
    # Two tensors that are live at the same time both are when the later one starts.
    moments = np.unique(start)
    start, end = np.searchsorted(moments, start), np.searchsorted(moments, end)
    load = _load(start, end, size)
    peak = int(load.max())
    chains = [_Chain(start, end, size, priority) for priority in _priorities(start, end, size, load)]
    random = np.random.default_rng(0)
    for trial in range(min(MAX_CHANGES, MAX_PAIR_WORK // len(size) ** 2)):
        if min(chain.arena for chain in chains) == peak:
            break
        chains[trial % len(chains)].change(random)
    best = min(chains, key=lambda chain: chain.arena)
    return Packing(best.offset, best.arena, peak)


class _Chain:
    """Local search over one vector of priorities: a change is kept unless it enlarges the arena."""

    def __init__(self, start: Ints, end: Ints, size: Ints, priority: Floats) -> None:
        self._tensors, self._priority = (start, end, size), priority
        self.offset = np.zeros_like(size)
        self.arena = int(_compiled()(*self._tensors, priority, self.offset, size.sum()))

    def change(self, random: np.random.Generator) -> None:
        """Change the priority of some tensors."""
        count = len(self.offset)
        share = CHANGE_SHARES[random.integers(len(CHANGE_SHARES))]
        changed = random.random(count) < share
        priority = self._priority + changed * random.uniform(-CHANGE_RANGE / 2, CHANGE_RANGE / 2, count)
        offset = np.zeros_like(self.offset)
        arena = int(_compiled()(*self._tensors, priority, offset, self.arena))
        if arena <= self.arena:
            self._priority, self.offset, self.arena = priority, offset, arena


def _load(start: Ints, end: Ints, size: Ints) -> Ints:
    """The live bytes from each start to the next."""
    change = np.zeros(max(end) + 1, dtype=np.int64)
    np.add.at(change, start, size)
    np.add.at(change, end, -size)
    load: Ints = np.cumsum(change)[:-1]
    return load


def _priorities(start: Ints, end: Ints, size: Ints, load: Ints) -> list[Floats]:
    """Logarithms of the initial priorities."""
    lifetime = (end - start).astype(np.float64)
    total = np.concatenate(([0.0], np.cumsum(load, dtype=np.float64)))
    values = (lifetime, lifetime * size, total[end] - total[start], lifetime * np.sqrt(size), 1.0 * size)
    return [np.log(value) for value in values]


def place_on_skyline(start: Ints, end: Ints, size: Ints, priority: Floats, offset: Ints, limit: int) -> int:
    """Write every tensor's offset and return the arena; stops once the arena exceeds the limit.

    Priorities are logarithms.  Segments of the skyline are identified by their begin and form a doubly linked list.
    """
    count, last = len(start), end.max()
    next_, previous = np.full(last + 1, last), np.full(last + 1, -1)
    height = np.zeros(last + 1, np.int64)
    # Tensors that start at t are first[t] : first[t + 1]; those that end are by_end[last_end[t] : last_end[t + 1]].
    by_end = np.argsort(end)
    first, last_end = np.searchsorted(start, np.arange(last + 1)), np.searchsorted(end[by_end], np.arange(last + 2))
    unplaced = priority.copy()  # -infinity for placed tensors
    block_max = np.array([unplaced[i : i + BLOCK_SIZE].max() for i in range(0, count, BLOCK_SIZE)])
    arena = 0
    begin = 0
    while count > 0:
        # Segments lower than both neighbors are independent, so any of them can be chosen instead of the lowest.
        while True:
            prior, later = previous[begin], next_[begin]
            if prior >= 0 and height[prior] < height[begin]:
                begin = prior
            elif later < last and height[later] < height[begin]:
                begin = later
            else:
                break
        stop, level = next_[begin], height[begin]
        chosen, best_value = -1, -np.inf
        for i in range(first[begin], first[begin + 1]):
            value = unplaced[i] + FIT_BONUS * (1 + (end[i] == stop))
            if value > best_value and end[i] <= stop:
                chosen, best_value = i, value
        for i in by_end[last_end[stop] : last_end[stop + 1]]:
            if unplaced[i] + FIT_BONUS > best_value and start[i] > begin:
                chosen, best_value = i, unplaced[i] + FIT_BONUS
        i = first[begin + 1]
        while i < first[stop]:
            if i % BLOCK_SIZE == 0 and block_max[i // BLOCK_SIZE] <= best_value:
                i += BLOCK_SIZE
                continue
            if unplaced[i] > best_value and end[i] < stop:
                chosen, best_value = i, unplaced[i]
            i += 1
        if chosen < 0:
            lower = later if prior < 0 or (later < last and height[later] < height[prior]) else prior
            height[begin] = height[lower]
        else:
            count -= 1
            unplaced[chosen] = -np.inf
            block = chosen // BLOCK_SIZE
            block_max[block] = unplaced[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].max()
            offset[chosen] = level
            arena = max(arena, int(level + size[chosen]))
            if arena > limit:
                return arena
            # Cut the segment at the tensor's start and end.
            for cut in (start[chosen], end[chosen]):
                if begin < cut < stop:
                    next_[cut], previous[cut] = stop, begin
                    next_[begin] = cut
                    if stop < last:
                        previous[stop] = cut
                    height[cut] = level
                    if cut == start[chosen]:
                        begin = cut
            height[begin] = level + size[chosen]
        # Join adjacent segments of equal height.
        while next_[begin] < last and height[next_[begin]] == height[begin]:
            next_[begin] = next_[next_[begin]]
            if next_[begin] < last:
                previous[next_[begin]] = begin
        if previous[begin] >= 0 and height[previous[begin]] == height[begin]:
            next_[previous[begin]] = next_[begin]
            if next_[begin] < last:
                previous[next_[begin]] = previous[begin]
            begin = previous[begin]
    return arena


@cache
def _compiled() -> Callable[..., int]:
    return jit(place_on_skyline)
