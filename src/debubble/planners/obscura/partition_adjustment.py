"""Partition adjustment: units move from adjusted to other stages until both take about the same time.

Source: Huang et al., Obscura, USENIX ATC 2025, section 7, Algorithm 1.

C_adj and C_non are the largest 3 f_s + r_s of the adjusted and of the other stages.  As printed, the algorithm returns
the partition before its last move; with k + 1 adjusted stages the largest shrinks only every k + 1 moves, and so it
returns 1.225 where its own trace holds 1.263 (p = 8, k = 2, 144 equal units, r = 0.39 f, m = 128).  Here the whole
trace is returned, and the caller keeps the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Counts = tuple[int, ...]


def adjustments(
    counts: Counts,
    *,
    adjusted: int,
    micro_batches: int,
    times: Callable[[Counts], list[float] | None],
) -> Iterator[Counts]:
    """The partitions after each move, from `counts` units per stage on.

    `times`: 3 f_s + r_s of each stage of a partition, None if it does not fit in memory.
    """
    p = len(counts)
    each = times(counts)
    while each is not None and 0 < adjusted < p:
        slowest, other = max(each[:adjusted]), max(each[adjusted:])
        # Equation (5): T_k - C_adj > T_{k+1}, where T_k is either T_{k+1} + C_adj or C_adj m.
        if slowest * (micro_batches - 1) <= other * (micro_batches + p - 1 - adjusted):
            return
        giver = each.index(slowest)
        if counts[giver] == 1:
            return
        fitting = (
            (moved, after)
            for taker in sorted(range(adjusted, p), key=each.__getitem__)
            if (after := times(moved := _move(counts, giver, taker))) is not None
        )
        step = next(fitting, None)
        if step is None:
            return
        counts, each = step
        yield counts


def _move(counts: Counts, giver: int, taker: int) -> Counts:
    moved = list(counts)
    moved[giver] -= 1
    moved[taker] += 1
    return tuple(moved)
