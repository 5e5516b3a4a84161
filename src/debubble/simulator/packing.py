"""Packing of tensors with known lifetimes into one arena (dynamic storage allocation).

The peak of live bytes is a lower bound of the arena.  A skyline has the height of what is placed at every moment; the
tensor of highest priority among those that live within a lowest segment is placed there, and where none does, the
segment rises to its lower neighbour (Sekiyama et al., Profile-guided memory optimization for deep neural networks,
2018).  Priorities by lifetime, size and load are improved by random changes until an arena is the peak or their number
is reached, so that a program has the same addresses everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import jit

CHANGES, PAIRS = 3_000, 5 * 10**8
"""The most changes of priorities, and the most pairs of tensors in all changes."""
CHANGED, WIDTH = (0.01, 0.1, 0.3), 1.0
"""Shares of the priorities of which a change concerns one, and the range of what it adds to their logarithms."""
FIT = 1.0
"""Addend to the logarithm of a priority for each end of the lifetime that is an end of the segment."""
BLOCK = 32
"""Tensors in a block; blocks whose highest priority is not above the one found are skipped."""


class Packing(NamedTuple):
    """Offsets in an arena, with its size and its lower bound."""

    offset: Ints
    arena: int
    peak: int


def pack(start: Ints, end: Ints, size: Ints) -> Packing:
    """Place tensors in an arena so that no two that live at the same time overlap.

    Args:
        start: The moments from which the tensors live, as whole numbers, ascending.
        end: The moments from which they no longer do, each after its start.
        size: Positive bytes, or multiples of another unit.
    """
    if not len(size):
        return Packing(size, 0, 0)
    # Two tensors that live at the same time do so where one of them starts.
    moments = np.unique(start)
    start, end = np.searchsorted(moments, start), np.searchsorted(moments, end)
    load = _load(start, end, size)
    peak = int(load.max())
    chains = [_Chain(start, end, size, priority) for priority in _priorities(start, end, size, load)]
    random = np.random.default_rng(0)
    for trial in range(min(CHANGES, PAIRS // len(size) ** 2)):
        if min(chain.arena for chain in chains) == peak:
            break
        chains[trial % len(chains)].change(random)
    best = min(chains, key=lambda chain: chain.arena)
    return Packing(best.offset, best.arena, peak)


class _Chain:
    """Changes of one priority, each of which is kept unless the arena becomes larger."""

    def __init__(self, start: Ints, end: Ints, size: Ints, priority: Floats) -> None:
        self._tensors, self._priority = (start, end, size), priority
        self.offset = np.zeros_like(size)
        self.arena = int(_compiled()(*self._tensors, priority, self.offset, size.sum()))

    def change(self, random: np.random.Generator) -> None:
        """Change the priority of some tensors."""
        count = len(self.offset)
        share = CHANGED[random.integers(len(CHANGED))]
        changed = random.random(count) < share
        priority = self._priority + changed * random.uniform(-WIDTH / 2, WIDTH / 2, count)
        offset = np.zeros_like(self.offset)
        arena = int(_compiled()(*self._tensors, priority, offset, self.arena))
        if arena <= self.arena:
            self._priority, self.offset, self.arena = priority, offset, arena


def _load(start: Ints, end: Ints, size: Ints) -> Ints:
    """The bytes that live from each start to the next."""
    change = np.zeros(max(end) + 1, dtype=np.int64)
    np.add.at(change, start, size)
    np.add.at(change, end, -size)
    load: Ints = np.cumsum(change)[:-1]
    return load


def _priorities(start: Ints, end: Ints, size: Ints, load: Ints) -> list[Floats]:
    """Logarithms of the priorities that are tried first."""
    lifetime = (end - start).astype(np.float64)
    total = np.concatenate(([0.0], np.cumsum(load, dtype=np.float64)))
    values = (lifetime, lifetime * size, total[end] - total[start], lifetime * np.sqrt(size), 1.0 * size)
    return [np.log(value) for value in values]


def place_on_skyline(start: Ints, end: Ints, size: Ints, priority: Floats, offset: Ints, limit: int) -> int:
    """Write every tensor's offset, and return the arena; once it exceeds the limit, what it has reached.

    Priorities are logarithms.  A segment of the skyline is known by the moment at which it begins; the next one and the
    one before it form a list.
    """
    count, last = len(start), end.max()
    following, before = np.full(last + 1, last), np.full(last + 1, -1)
    height = np.zeros(last + 1, np.int64)
    # Tensors that start at a moment are from the first to the next one's; those that end there are so in `by_end`.
    by_end = np.argsort(end)
    first, final = np.searchsorted(start, np.arange(last + 1)), np.searchsorted(end[by_end], np.arange(last + 2))
    waiting = priority.copy()  # and -infinity for those that are placed
    highest = np.array([waiting[i : i + BLOCK].max() for i in range(0, count, BLOCK)])
    arena = 0
    begin = 0
    while count > 0:
        # Segments that are lower than both neighbours do not concern each other: any of them is as good as the lowest.
        while True:
            left, right = before[begin], following[begin]
            if left >= 0 and height[left] < height[begin]:
                begin = left
            elif right < last and height[right] < height[begin]:
                begin = right
            else:
                break
        stop, level = following[begin], height[begin]
        chosen, greatest = -1, -np.inf
        for i in range(first[begin], first[begin + 1]):
            value = waiting[i] + FIT * (1 + (end[i] == stop))
            if value > greatest and end[i] <= stop:
                chosen, greatest = i, value
        for i in by_end[final[stop] : final[stop + 1]]:
            if waiting[i] + FIT > greatest and start[i] > begin:
                chosen, greatest = i, waiting[i] + FIT
        i = first[begin + 1]
        while i < first[stop]:
            if i % BLOCK == 0 and highest[i // BLOCK] <= greatest:
                i += BLOCK
                continue
            if waiting[i] > greatest and end[i] < stop:
                chosen, greatest = i, waiting[i]
            i += 1
        if chosen < 0:
            lower = right if left < 0 or (right < last and height[right] < height[left]) else left
            height[begin] = height[lower]
        else:
            count -= 1
            waiting[chosen] = -np.inf
            block = chosen // BLOCK
            highest[block] = waiting[block * BLOCK : (block + 1) * BLOCK].max()
            offset[chosen] = level
            arena = max(arena, int(level + size[chosen]))
            if arena > limit:
                return arena
            # Cut the segment where the tensor starts and where it ends
            for cut in (start[chosen], end[chosen]):
                if begin < cut < stop:
                    following[cut], before[cut] = stop, begin
                    following[begin] = cut
                    if stop < last:
                        before[stop] = cut
                    height[cut] = level
                    if cut == start[chosen]:
                        begin = cut
            height[begin] = level + size[chosen]
        # Join segments of one height
        while following[begin] < last and height[following[begin]] == height[begin]:
            following[begin] = following[following[begin]]
            if following[begin] < last:
                before[following[begin]] = begin
        if before[begin] >= 0 and height[before[begin]] == height[begin]:
            following[before[begin]] = following[begin]
            if following[begin] < last:
                before[following[begin]] = before[begin]
            begin = before[begin]
    return arena


@cache
def _compiled() -> Callable[..., int]:
    return jit(place_on_skyline)
