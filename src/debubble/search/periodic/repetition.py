"""Schedules for many micro-batches that are searched with few: a periodic middle is repeated.

A pattern (modulo.py) is unrolled for as many micro-batches as its way up, a few periods, and its way down need.  The
search changes what lies before and behind these periods, and all of them alike; then they are repeated.  Each
repetition takes a period, so that what is above the bound stays the same, however many micro-batches there are.

How far forwards run ahead of backwards in the middle decides how fast the last micro-batches can drain: several
patterns are tried, and the worse half is given up again and again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from debubble.ir import DebubbleError, Kind, Op, Schedule
from debubble.search.annealing.arrays import PeriodicBlock, later
from debubble.search.annealing.layout import OF_CHUNKS
from debubble.search.annealing.search import improve
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.periodic.modulo import Pattern, find_pattern_of_chunks, find_patterns, unroll
from debubble.search.problem import Incumbent, OrderProblem

PERIODS = 6
"""Periods that the search sees: with fewer, one that takes longer than it should goes unnoticed."""
HEAD, TAIL = 3, 3
"""Micro-batches beside those that are under way when the periodic part begins, and when it ends."""
AHEAD = 5
"""Patterns that are tried."""
TEMPERATURES_OF_CHUNKS = (0.2, 0.15)
"""First temperatures of the one slow cooling of a pattern of several chunks, in mean operation times: what keeps it
from its bound is where micro-batches pass each other, on all devices."""


def periodic_schedule(problem: OrderProblem, *, effort: Effort, seed: int = 0, workers: int = 1) -> Schedule | None:
    """Search a schedule with a periodic middle; a third of the effort finds patterns, the rest improves them.

    The best schedule found; with too few micro-batches the shortest pattern unrolled; None without any pattern.  With
    several chunks per device the pattern is one for equal times, and all of what it unrolls to is improved.
    """
    if problem.placement.chunks > 1:
        return _schedule_of_chunks(problem, effort=effort, seed=seed, workers=workers)
    patterns = find_patterns(problem, AHEAD, effort=effort.part(effort.left / 3), seed=seed)
    first = next(patterns, None)
    if first is None:
        return None
    if not _is_worthwhile(problem, first):
        return unroll(problem, first)
    cores = [PeriodicCore.of(problem, pattern) for pattern in (first, *patterns) if _is_worthwhile(problem, pattern)]
    while True:
        rounds = len(cores).bit_length()
        share = effort.left / (rounds * len(cores))
        improved = (core.improve(effort.part(share), seed=seed, workers=workers) for core in cores)
        cores = sorted(improved, key=lambda core: core.excess)
        if len(cores) == 1 or effort.over:
            return cores[0].extend(problem)
        cores = cores[: (len(cores) + 1) // 2]


def _schedule_of_chunks(problem: OrderProblem, *, effort: Effort, seed: int, workers: int) -> Schedule | None:
    """Unroll a pattern of several chunks per device, whose way up and down is long, and improve all of it."""
    pattern = find_pattern_of_chunks(problem, effort=effort.part(effort.left / 2), seed=seed)
    if pattern is None:
        return None
    schedule = unroll(problem, pattern)
    start = Incumbent(
        schedule=schedule, value=problem.value(schedule), bound=lower_bound(problem), source="pattern"
    )  # fmt: skip
    stream = improve(
        problem,
        start,
        effort=effort,
        seed=seed,
        workers=workers,
        hot=TEMPERATURES_OF_CHUNKS,
        coolings=(0.0, 1.0),
        shares=OF_CHUNKS,
    )
    *_, best = start, *stream
    return best.schedule


def _core_size(pattern: Pattern) -> int:
    """Least number of micro-batches of a pattern's core."""
    return HEAD + (2 * pattern.depth + PERIODS) * pattern.step + TAIL


def _is_worthwhile(problem: OrderProblem, pattern: Pattern) -> bool:
    """Tell whether the core is so much smaller than the problem that searching it saves time."""
    return 3 * _core_size(pattern) <= 2 * problem.micro_batches


@dataclass(frozen=True)
class PeriodicCore:
    """A schedule of a few micro-batches whose middle repeats every period; `extend` repeats it further.

    Attributes:
        small: The problem with these few micro-batches.
        best: Its best schedule so far.
        time: Time of a micro-batch in the middle, in the costs' unit.
        block: The part of the lists that repeats itself.
    """

    small: OrderProblem
    best: Incumbent
    time: float
    block: PeriodicBlock

    @staticmethod
    def of(problem: OrderProblem, pattern: Pattern) -> PeriodicCore:
        """Unroll a pattern for as few micro-batches of the problem as its core needs."""
        size = _core_size(pattern)
        # Whole periods are left to be repeated.
        small = replace(problem, micro_batches=size + (problem.micro_batches - size) % pattern.step)
        schedule = unroll(small, pattern)
        best = Incumbent(schedule=schedule, value=small.value(schedule), bound=lower_bound(small), source="pattern")
        middle = HEAD + pattern.depth * pattern.step
        windows = tuple(_between(order, middle, middle + pattern.step) for order in schedule.orders)
        return PeriodicCore(small, best, pattern.time, PeriodicBlock(windows, PERIODS, pattern.step))

    @cached_property
    def excess(self) -> float:
        """Time beyond the periods, once these are repeated: cores of different size are compared by it.

        It is infinite if they cannot be repeated: moves may have shifted the blocks of two devices so far apart that
        their orders, which deadlock side by side, never met among the few micro-batches.
        """
        larger = replace(self.small, micro_batches=self.small.micro_batches + 3 * PERIODS * self.block.step)
        try:
            return float(larger.value(self.extend(larger)) - larger.micro_batches * self.time)
        except DebubbleError:
            return math.inf

    def improve(self, effort: Effort, *, seed: int, workers: int) -> PeriodicCore:
        """Improve head and tail by local search, unless every repetition would pay for that."""
        stream = improve(self.small, self.best, effort=effort, seed=seed, workers=workers, block=self.block)
        *_, best = self.best, *stream
        return min((replace(self, best=best), self), key=lambda core: core.excess)

    def extend(self, problem: OrderProblem) -> Schedule:
        """Repeat the middle until there are as many micro-batches as in a problem of the same costs."""
        copies, step = problem.micro_batches - self.small.micro_batches, self.block.step
        orders = []
        places = zip(self.block.begins(self.best.schedule), self.block.windows, strict=True)
        for order, (begin, window) in zip(self.best.schedule.orders, places, strict=True):
            repeated = (later(op, by) for by in range(0, copies, step) for op in order[begin : begin + window])
            orders.append((*order[:begin], *repeated, *(later(op, copies) for op in order[begin:])))
        return problem.schedule(orders)


def _between(order: tuple[Op, ...], first: int, last: int) -> int:
    """Operations in a list from the forward of one micro-batch to that of another."""
    stage = order[0].stage
    return order.index(Op(Kind.F, stage, last)) - order.index(Op(Kind.F, stage, first))
