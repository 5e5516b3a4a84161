"""Runs all methods on one problem, as one stream of improving schedules and bounds.

Small problems go to CP-SAT after a short local search, which proves the optimum; large ones are searched locally.
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
from debubble.search.effort import START_PRICE, Effort
from debubble.search.exact.cp_sat import solve, tolerate_wrong_models
from debubble.search.problem import Incumbent, OrderProblem

MAX_EXACT_PAIRS = 72
"""CP-SAT usually closes the gap of problems with at most this many pairs (stages x micro-batches)."""
MIN_UNMODELED_PAIRS = 200
"""From this many pairs on, the model of several chunks is too large for CP-SAT."""
MIN_EXACT_GAP = 0.02
"""Gap above which CP-SAT is worth its time, and the second search is limited to half of the remaining effort."""
START_TOLERANCE = 0.1
"""Fraction by which a start that keeps the bottleneck busy may be slower than another: search improves it sooner."""


def optimize(
    problem: OrderProblem, *, starts: Iterable[Schedule] = (), effort: Effort | float = DEFAULT_EFFORT, workers: int = 1
) -> Iterator[Incumbent]:
    """Search a problem until the optimum is proven or the effort is spent; yields improving schedules and bounds.

    Args:
        problem: The operations to order.
        starts: Schedules to improve, in addition to the constructed ones and the shipped one.
        effort: Seconds of the reference machine (see `search.effort`), or an Effort with a deadline.
        workers: Number of parallel chains of the local search, each with the full effort.

    Returns:
        The stream; the last incumbent is the best, which depends only on the effort and the number of chains.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    best = fastest_start(problem, starts=starts, effort=effort.split_off(effort.remaining / 4))
    yield from improve_start(problem, best, effort=effort, workers=workers)


def fastest_start(problem: OrderProblem, *, starts: Iterable[Schedule] = (), effort: Effort) -> Incumbent:
    """Find the fastest of these schedules, the constructed ones and the shipped one.

    Raises InfeasibleError if nothing fits the memory limit.
    """
    shipped = cache.nearest(problem, cache.SHIPPED)
    *_, best = best_starts(problem, starts=[*starts, *(() if shipped is None else (shipped,))], effort=effort)
    return best


def improve_start(
    problem: OrderProblem, best: Incumbent, *, effort: Effort, seed: int = 0, workers: int = 1
) -> Iterator[Incumbent]:
    """Continue from an incumbent like `optimize`; the incumbent is the first of the stream."""
    for incumbent in _Optimizer(problem, best, effort, seed, workers).run():
        yield replace(incumbent, seconds=effort.spent)
        if incumbent.optimal:
            return


@dataclass
class _Optimizer:
    """Runs the methods one after the other, and stores the best schedule so far."""

    problem: OrderProblem
    best: Incumbent
    effort: Effort
    seed: int
    workers: int

    @property
    def remaining(self) -> float:
        """Remaining effort, in seconds of the reference machine."""
        return self.effort.remaining

    @property
    def pairs(self) -> int:
        """Stages times micro-batches."""
        return self.problem.stages * self.problem.micro_batches

    @property
    def is_modeled(self) -> bool:
        """Whether the CP-SAT model covers all choices and is not too large.

        The model has one level of recomputation, either fused or separate; the memory of several chunks makes it large.
        """
        areas = self.problem.placement.chunks > 1 and not self.problem.frees_memory
        too_large = areas and self.pairs >= MIN_UNMODELED_PAIRS
        return self.problem.levels < 2 and not self.problem.has_fused_and_explicit_recompute and not too_large

    @property
    def first_search_effort(self) -> float:
        """Effort of the local search before CP-SAT: little if CP-SAT can prove the optimum."""
        return min(self.remaining * 0.1, 2.0 if self.pairs <= MAX_EXACT_PAIRS else math.inf)

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
        yield from self.anneal(self.first_search_effort, turn=0)
        if self.pairs <= MAX_EXACT_PAIRS and self.is_modeled:
            yield from self.solve_exactly(self.remaining)
            return
        if self.best.gap > MIN_EXACT_GAP and self.is_modeled and not self.problem.frees_memory:
            yield from self.solve_exactly(self.remaining / 2)
        if self.problem.frees_memory and not self.best.optimal:
            divisor = 2 if self.best.gap > MIN_EXACT_GAP else 1
            yield from self.anneal_long(start, seconds=self.remaining / divisor)
        total = self.effort.seconds
        for turn in itertools.count(1):
            yield from self.anneal(max(min(2.0, total / 5), total / 10), turn=turn)
            if self.remaining < min(1.0, total / 20) or self.effort.over:
                return

    def adopt(self, stream: Iterator[Incumbent]) -> Iterator[Incumbent]:
        """Yield from a stream that continues from the best schedule, and store each improvement."""
        for better in stream:
            self.best = better
            yield better

    def anneal(self, seconds: float, *, turn: int) -> Iterator[Incumbent]:
        """Run local search with this effort."""
        effort, seed = self.effort.split_off(seconds), self.seed + turn
        yield from self.adopt(improve(self.problem, self.best, effort=effort, seed=seed, workers=self.workers))

    def anneal_long(self, start: Incumbent, *, seconds: float) -> Iterator[Incumbent]:
        """Search again from another start with a single slow cooling, which is the most reliable."""
        effort, seed = self.effort.split_off(seconds), self.seed + 1
        start = replace(self.busiest_start(start, effort), bound=self.best.bound)
        stream = improve(
            self.problem,
            start,
            effort=effort,
            seed=seed,
            workers=self.workers,
            temperatures=HOT_TEMPERATURES,
            coolings=(0.0, 1.0),
        )
        for incumbent in stream:
            if incumbent.value < self.best.value:
                self.best = incumbent
                yield incumbent

    def busiest_start(self, start: Incumbent, effort: Effort) -> Incumbent:
        """The best start that keeps the bottleneck busy, even if another one is slightly faster."""
        limit: Number = (1 + START_TOLERANCE) * start.value
        idle = idle_allowed(self.problem)
        for schedule in offloading_schedules(self.problem, idle=idle) if self.problem.offload else ():
            better = verify(self.problem, schedule, start, below=limit)
            if better is not None:
                start, limit = better, better.value
            effort.spend(START_PRICE * self.pairs)
            if effort.over:
                break
        return start

    def solve_exactly(self, seconds: float) -> Iterator[Incumbent]:
        """Run CP-SAT on the problem."""
        with tolerate_wrong_models():
            yield from self.adopt(solve(self.problem, self.best, effort=self.effort.split_off(seconds), seed=self.seed))
