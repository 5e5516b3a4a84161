"""All methods in turn on one problem, as one stream of better schedules and better bounds.

Local search finds, CP-SAT proves: small problems, and those where nothing is moved, are given to CP-SAT after a short
search; large ones are searched, with bounds from relaxations and, where the search stalls, neighbourhoods solved by
CP-SAT.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from debubble.ir import Number, Op, Schedule
from debubble.search import cache
from debubble.search.annealing.search import HOT_TEMPERATURES, best_starts, compile_kernel, improve, verify
from debubble.search.bounds import idle_allowed, lower_bound
from debubble.search.constructive.initial import offloading_schedules
from debubble.search.effort import START, Effort
from debubble.search.exact.cp_sat import device_bound, solve, tolerate_wrong_models
from debubble.search.exact.tight_memory import skeleton_bound
from debubble.search.exact.time_indexed_bound import running_prover
from debubble.search.periodic.repetition import periodic_schedule
from debubble.search.problem import Incumbent, OrderProblem

PROVABLE = 72
"""Stages x micro-batches up to which CP-SAT usually closes the gap."""
LARGE = 200
"""Stages x micro-batches from which a periodic pattern is a start worth its time."""
PATTERNED = 0.85
"""Share of the effort for a pattern of several chunks and its one slow cooling, which short ones behind it add little
to."""
LONG = 4
"""Micro-batches per stage above which it still is where list schedules may offload."""

WIDE = 0.02
"""Gap from which relaxations are worth their time: near the bound it is mostly the schedule that can be better."""

WORSE = 0.1
"""Share of time that a start which keeps the bottleneck busy may take more: what it lacks a search finds sooner."""

FRUITLESS = 2
"""Neighbourhoods in a row without a better schedule after which CP-SAT is given no more of them."""


def optimize(
    problem: OrderProblem,
    *,
    starts: Iterable[Schedule] = (),
    effort: Effort | float = 10.0,
    seed: int = 0,
    workers: int = 1,
) -> Iterator[Incumbent]:
    """Better and better schedules with rising bounds until the optimum is proven or the effort is spent.

    Args:
        problem: The operations to order.
        starts: Schedules to improve, beside the constructed ones and what is shipped for such a problem.
        effort: Seconds of the reference machine (see `search.effort`), or an Effort with a brake on the clock.
        seed: The last of the stream depends on it, on the effort and on the number of walkers alone.
        workers: Walkers of the local search side by side, each with the whole effort.

    Returns:
        The stream; the last one is the best.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    best = fastest_start(problem, starts=starts, effort=effort.part(effort.left / 4))
    yield from improve_start(problem, best, effort=effort, seed=seed, workers=workers)


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
    """Go on from a start as `optimize` does, which is the first of the stream."""
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

        They know one level of recomputation.
        """
        areas = self.problem.placement.chunks > 1 and not self.problem.frees_memory
        return self.problem.levels < 2 and not (areas and self.pairs >= LARGE)

    @property
    def first_search(self) -> float:
        """Effort of local search before CP-SAT gets its turn: little where that can prove the optimum."""
        return min(self.left * 0.1, 2.0 if self.pairs <= PROVABLE else math.inf)

    @property
    def tries_patterns(self) -> bool:
        """True if a periodic middle may be a better start than the constructed ones."""
        many = self.problem.micro_batches > LONG * self.problem.stages
        if self.problem.placement.chunks > 1:
            # Building blocks are patterns too, and are followed more closely.
            return self.pairs >= LARGE and self.best.gap > WIDE and not self.problem.offload
        return self.pairs >= LARGE and (many or not self.problem.offload)

    def run(self) -> Iterator[Incumbent]:
        """Run all methods, with the prover of bounds beside them."""
        yield self.best
        if self.best.optimal:
            return
        self.effort.brake.delay(compile_kernel(self.problem, self.best))
        proof = Effort(self.left if self.best.gap > WIDE else 0, brake=self.effort.brake)
        with running_prover(self.problem, bound=self.best.bound, below=self.best.value, effort=proof) as prover:
            for best in self.search():
                yield best
                if prover.bound >= best.value:
                    break
            yield self.raise_bound(self.best.value if prover.bound >= self.best.value else prover.finish())

    def search(self) -> Iterator[Incumbent]:
        """Run the methods that search on this core."""
        if self.tries_patterns:
            yield from self.repeat_pattern()
        start = self.best
        yield from self.anneal(self.first_search, turn=0)
        if self.pairs <= PROVABLE and self.is_modelled:
            yield from self.solve_exactly(self.left)
            return
        if self.best.gap > WIDE and self.is_modelled:
            yield from self.bound_by_relaxation()
        if self.problem.frees_memory and not self.best.optimal:
            yield from self.anneal_slowly(start, seconds=self.left / 2 if self.best.gap > WIDE else self.left)
        whole, fruitless = self.effort.seconds, 0
        for turn in itertools.count(1):
            yield from self.anneal(max(min(2.0, whole / 5), whole / 10), turn=turn)
            if self.left < min(1.0, whole / 20) or self.effort.over:
                return
            if fruitless < FRUITLESS and self.is_modelled:
                before = self.best.value
                yield from self.solve_exactly(min(3.0, whole / 5), turn=turn)
                fruitless = 0 if self.best.value < before else fruitless + 1

    def adopt(self, stream: Iterator[Incumbent]) -> Iterator[Incumbent]:
        """Take over the best of a stream that goes on from the best so far."""
        for better in stream:
            self.best = better
            yield better

    def raise_bound(self, bound: Number) -> Incumbent:
        """Raise the bound of the best schedule, if this one is higher."""
        self.best = replace(self.best, bound=max(self.best.bound, bound))
        return self.best

    def repeat_pattern(self) -> Iterator[Incumbent]:
        """Try a schedule with a periodic middle."""
        effort = self.effort.part(self.left * (PATTERNED if self.problem.placement.chunks > 1 else 0.6))
        schedule = periodic_schedule(self.problem, effort=effort, seed=self.seed, workers=self.workers)
        better = None if schedule is None else verify(self.problem, schedule, self.best, below=self.best.value)
        if better is not None:
            self.best = replace(better, source="pattern")
            yield self.best

    def anneal(self, seconds: float, *, turn: int) -> Iterator[Incumbent]:
        """Search locally with that much effort."""
        effort, seed = self.effort.part(seconds), self.seed + turn
        yield from self.adopt(improve(self.problem, self.best, effort=effort, seed=seed, workers=self.workers))

    def anneal_slowly(self, start: Incumbent, *, seconds: float) -> Iterator[Incumbent]:
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
        limit: Number = (1 + WORSE) * start.value
        idle = idle_allowed(self.problem)
        for schedule in offloading_schedules(self.problem, idle=idle) if self.problem.offload else ():
            better = verify(self.problem, schedule, start, below=limit)
            if better is not None:
                start, limit = better, better.value
            effort.spend(START * self.pairs)
            if effort.over:
                break
        return start

    def solve_exactly(self, seconds: float, *, turn: int | None = None) -> Iterator[Incumbent]:
        """Run CP-SAT on the whole, or on a window of micro-batches that differs by turn."""
        free = None if turn is None else _window(self.problem, self.best.schedule, self.seed + turn)
        effort, seed = self.effort.part(seconds), turn or self.seed
        with tolerate_wrong_models():
            yield from self.adopt(solve(self.problem, self.best, effort=effort, seed=seed, free=free))

    def bound_by_relaxation(self) -> Iterator[Incumbent]:
        """Raise the bound by CP-SAT: from single devices where activations leave memory, else from a common order."""
        if self.problem.frees_memory:
            effort = self.effort.part(min(5, self.left / 4))
            with tolerate_wrong_models():
                yield self.raise_bound(single_device_bound(self.problem, self.best.value, effort=effort))
            return
        yield from self.solve_exactly(self.left / 2)
        best, effort = self.best, self.effort.part(self.left / 2)
        with tolerate_wrong_models():
            yield self.raise_bound(skeleton_bound(self.problem, horizon=best.value, effort=effort, bound=best.bound))


def single_device_bound(problem: OrderProblem, horizon: Number, *, effort: Effort) -> Number:
    """Bound the problem by its first, a middle and its last device, each exact alone; some schedule takes `horizon`."""
    devices = sorted({0, problem.devices // 2, problem.devices - 1})
    bound = lower_bound(problem)
    for device in devices:
        part = effort.part(effort.seconds / len(devices))
        bound = max(bound, device_bound(problem, device, horizon=horizon, effort=part))
    return bound


def _window(problem: OrderProblem, schedule: Schedule, seed: int) -> frozenset[Op]:
    """Draw a few successive micro-batches, and return their operations."""
    width = max(2, min(problem.micro_batches, PROVABLE // problem.stages))
    begin = random.Random(seed).randrange(max(1, problem.micro_batches - width + 1))
    return frozenset(op for op in schedule.operations if begin <= op.micro_batch < begin + width)
