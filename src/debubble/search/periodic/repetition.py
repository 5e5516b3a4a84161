"""Schedules for many micro-batches that are searched with few: a periodic middle is repeated.

A pattern (patterns.py) is unrolled for as many micro-batches as its way up, a few periods, and its way down need.
The search changes what lies before and behind these periods, and all of them alike; then they are repeated.  Each
repetition takes a period, so that what is above the bound stays the same, however many micro-batches there are.

How far forwards run ahead of backwards in the middle decides how fast the last micro-batches can drain: several
patterns are tried, and the worse half is given up again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from debubble.ir import Kind, Op, Schedule
from debubble.search.annealing.arrays import PeriodicBlock, later
from debubble.search.annealing.search import improve
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.periodic.modulo import Pattern, patterns, unrolled
from debubble.search.problem import Incumbent, OrderProblem

PERIODS = 6
"""Periods that the search sees: with fewer, one that takes longer than it should goes unnoticed."""
HEAD, TAIL = 3, 3
"""Micro-batches beside those that are under way when the periodic part begins, and when it ends."""
AHEAD = 5
"""Patterns that are tried."""


def grown(problem: OrderProblem, *, effort: Effort, seed: int = 0, workers: int = 1) -> Schedule | None:
    """The best schedule found in this way; None where there is no pattern.

    With too few micro-batches it is the shortest pattern unrolled.
    """
    found = patterns(problem, AHEAD, effort=effort.part(effort.left / 3), seed=seed)
    first = next(found, None)
    if first is None:
        return None
    if not _enough(problem, first):
        return unrolled(problem, first)
    left = [_Seedling.of(problem, pattern) for pattern in (first, *found) if _enough(problem, pattern)]
    while True:
        rounds = len(left).bit_length()
        share = effort.left / (rounds * len(left))
        searched = (each.searched(effort.part(share), seed=seed, workers=workers) for each in left)
        left = sorted(searched, key=lambda s: s.excess)
        if len(left) == 1 or effort.over:
            return left[0].grown(problem)
        left = left[: (len(left) + 1) // 2]


def _size(pattern: Pattern) -> int:
    """Micro-batches that a seedling has, at least."""
    return HEAD + (2 * pattern.depth + PERIODS) * pattern.step + TAIL


def _enough(problem: OrderProblem, pattern: Pattern) -> bool:
    """Whether a seedling is so much smaller than the problem that it is worth its time."""
    return 3 * _size(pattern) <= 2 * problem.micro_batches


@dataclass(frozen=True)
class _Seedling:
    """A schedule of few micro-batches with a periodic middle."""

    small: OrderProblem
    best: Incumbent
    time: float
    """Of a micro-batch in the middle."""
    block: PeriodicBlock

    @staticmethod
    def of(problem: OrderProblem, pattern: Pattern) -> _Seedling:
        """The pattern unrolled."""
        size = _size(pattern)
        # Whole periods are left to be repeated.
        small = replace(problem, micro_batches=size + (problem.micro_batches - size) % pattern.step)
        schedule = unrolled(small, pattern)
        best = Incumbent(schedule=schedule, value=small.value(schedule), bound=lower_bound(small), source="pattern")
        middle = HEAD + pattern.depth * pattern.step
        windows = tuple(_between(order, middle, middle + pattern.step) for order in schedule.orders)
        return _Seedling(small, best, pattern.time, PeriodicBlock(windows, PERIODS, pattern.step))

    @cached_property
    def excess(self) -> float:
        """Its time beyond the periods, once these are repeated: what seedlings of different size are compared by."""
        larger = replace(self.small, micro_batches=self.small.micro_batches + 3 * PERIODS * self.block.step)
        return float(larger.value(self.grown(larger)) - larger.micro_batches * self.time)

    def searched(self, effort: Effort, *, seed: int, workers: int) -> _Seedling:
        """With its head and its tail improved, unless that is paid for by every repetition."""
        *_, best = (
            self.best,
            *improve(
                self.small,
                self.best,
                effort=effort,
                seed=seed,
                workers=workers,
                block=self.block,
            ),
        )
        return min((replace(self, best=best), self), key=lambda each: each.excess)

    def grown(self, problem: OrderProblem) -> Schedule:
        """The schedule of the whole problem."""
        copies, step = problem.micro_batches - self.small.micro_batches, self.block.step
        orders = []
        places = zip(self.block.begins(self.best.schedule), self.block.windows, strict=True)
        for order, (begin, window) in zip(self.best.schedule.orders, places, strict=True):
            repeated = (later(op, by) for by in range(0, copies, step) for op in order[begin : begin + window])
            orders.append((*order[:begin], *repeated, *(later(op, copies) for op in order[begin:])))
        return problem.schedule("searched", tuple(orders))


def _between(order: tuple[Op, ...], first: int, last: int) -> int:
    """How many operations there are from the forward of one micro-batch to that of another."""
    stage = order[0].stage
    return order.index(Op(Kind.F, stage, last)) - order.index(Op(Kind.F, stage, first))
