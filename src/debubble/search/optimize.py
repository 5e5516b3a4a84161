"""All methods in turn on one problem, as one stream of better schedules and better bounds.

Local search finds, CP-SAT proves: small problems are given to CP-SAT after a short search, large ones are searched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from debubble.ir import DEFAULT_EFFORT, Number, Schedule
from debubble.search import cache
from debubble.search.annealing.search import (
    HOT_TEMPERATURES,
    best_starts,
    compile_kernel,
    improve,
    may_compile,
    verify,
)
from debubble.search.bounds import idle_allowed
from debubble.search.constructive.initial import offloading_schedules
from debubble.search.effort import START, Effort
from debubble.search.exact.cp_sat import solve, tolerate_wrong_models
from debubble.search.problem import Incumbent, OrderProblem

MAX_EXACT_PAIRS = 72
"""Stages x micro-batches up to which CP-SAT usually closes the gap."""
UNMODELLED_PAIRS = 200
"""Stages x micro-batches from which the model of several chunks is too large for CP-SAT."""
WIDE_GAP = 0.02
"""Gap from which CP-SAT is worth its time, and a second search has half of what is left."""
START_TOLERANCE = 0.1
"""Share of time that a start which keeps the bottleneck busy may take more: what it lacks a search finds sooner."""


def optimize(
    problem: OrderProblem,
    *,
    starts: Iterable[Schedule] = (),
    effort: Effort | float = DEFAULT_EFFORT,
    workers: int = 1,
) -> Iterator[Incumbent]:
    """Better and better schedules with rising bounds until the optimum is proven or the effort is spent.

    Args:
        problem: The operations to order.
        starts: Schedules to improve, next to the constructed ones and what is shipped for such a problem.
        effort: Seconds of the reference machine (see `search.effort`), or an Effort with a deadline.
        workers: Chains of the local search in parallel, each with the whole effort.

    Returns:
        The stream; the last one is the best, which depends on the effort and the number of chains alone.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    best = fastest_start(problem, starts=starts, effort=effort.part(effort.left / 4))
    yield from improve_start(problem, best, effort=effort, workers=workers)


def fastest_start(problem: OrderProblem, *, starts: Iterable[Schedule] = (), effort: Effort) -> Incumbent:
    """Find the fastest of these schedules, the constructed ones and what is shipped for such a problem.

    Raises InfeasibleError if nothing fits the memory limit.
    """
    shipped = cache.nearest(problem, cache.SHIPPED)
    *_, best = best_starts(problem, starts=[*starts, *(() if shipped is None else (shipped,))], effort=effort)
    return best


def improve_start(
    problem: OrderProblem, best: Incumbent, *, effort: Effort, seed: int = 0, workers: int = 1
) -> Iterator[Incumbent]:
    """Continue from a start as `optimize` does, which is the first of the stream."""
    for incumbent in _Optimizer(problem, best, effort, seed, workers).run():
        yield replace(incumbent, seconds=effort.spent)
        if incumbent.optimal:
            return


@dataclass
class _Optimizer:
    """Runs every method in turn, and holds the best schedule so far."""

    problem: OrderProblem
    best: Incumbent
    effort: Effort
    seed: int
    workers: int

    @property
    def left(self) -> float:
        """Effort that is left, in seconds of the reference machine."""
        return self.effort.left

    @property
    def pairs(self) -> int:
        """Stages times micro-batches."""
        return self.problem.stages * self.problem.micro_batches

    @property
    def is_modelled(self) -> bool:
        """True if CP-SAT's models have all choices, and are not too large: of several chunks they see areas of memory.

        They know one level of recomputation, and one way.
        """
        areas = self.problem.placement.chunks > 1 and not self.problem.frees_memory
        too_large = areas and self.pairs >= UNMODELLED_PAIRS
        return self.problem.levels < 2 and not self.problem.recomputes_in_two_ways and not too_large

    @property
    def first_search(self) -> float:
        """Effort of local search before CP-SAT gets its turn: little where that can prove the optimum."""
        return min(self.left * 0.1, 2.0 if self.pairs <= MAX_EXACT_PAIRS else math.inf)

    def run(self) -> Iterator[Incumbent]:
        """Run all methods."""
        yield self.best
        if self.best.optimal:
            return
        if not may_compile(self.effort.deadline):
            self.effort.deadline.expire()
            self.effort.deadline.check()
            return
        self.effort.deadline.extend_for_kernels(compile_kernel(self.problem, self.best))
        start = self.best
        yield from self.anneal(self.first_search, turn=0)
        if self.pairs <= MAX_EXACT_PAIRS and self.is_modelled:
            yield from self.solve_exactly(self.left)
            return
        if self.best.gap > WIDE_GAP and self.is_modelled and not self.problem.frees_memory:
            yield from self.solve_exactly(self.left / 2)
        if self.problem.frees_memory and not self.best.optimal:
            yield from self.anneal_long(start, seconds=self.left / 2 if self.best.gap > WIDE_GAP else self.left)
        whole = self.effort.seconds
        for turn in itertools.count(1):
            yield from self.anneal(max(min(2.0, whole / 5), whole / 10), turn=turn)
            if self.left < min(1.0, whole / 20) or self.effort.over:
                return

    def adopt(self, stream: Iterator[Incumbent]) -> Iterator[Incumbent]:
        """Take over the best of a stream that continues from the best so far."""
        for better in stream:
            self.best = better
            yield better

    def anneal(self, seconds: float, *, turn: int) -> Iterator[Incumbent]:
        """Search locally with that much effort."""
        effort, seed = self.effort.part(seconds), self.seed + turn
        yield from self.adopt(improve(self.problem, self.best, effort=effort, seed=seed, workers=self.workers))

    def anneal_long(self, start: Incumbent, *, seconds: float) -> Iterator[Incumbent]:
        """Search again, from another start, and as slowly as can be: the slower it cools, the surer it is."""
        effort, seed = self.effort.part(seconds), self.seed + 1
        start = replace(self.busiest_start(start, effort), bound=self.best.bound)
        stream = improve(
            self.problem,
            start,
            effort=effort,
            seed=seed,
            workers=self.workers,
            hot=HOT_TEMPERATURES,
            coolings=(0.0, 1.0),
        )
        for incumbent in stream:
            if incumbent.value < self.best.value:
                self.best = incumbent
                yield incumbent

    def busiest_start(self, start: Incumbent, effort: Effort) -> Incumbent:
        """Find the best start that keeps the bottleneck busy, even if it is worse than another."""
        limit: Number = (1 + START_TOLERANCE) * start.value
        idle = idle_allowed(self.problem)
        for schedule in offloading_schedules(self.problem, idle=idle) if self.problem.offload else ():
            better = verify(self.problem, schedule, start, below=limit)
            if better is not None:
                start, limit = better, better.value
            effort.spend(START * self.pairs)
            if effort.over:
                break
        return start

    def solve_exactly(self, seconds: float) -> Iterator[Incumbent]:
        """Run CP-SAT on the problem."""
        with tolerate_wrong_models():
            yield from self.adopt(solve(self.problem, self.best, effort=self.effort.part(seconds), seed=self.seed))
