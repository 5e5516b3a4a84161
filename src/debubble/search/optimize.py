"""The engine: every method in turn on one problem, as one stream of better schedules and better bounds.

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
from debubble.search.annealing.search import HOT, begun, compiled, improve, verified
from debubble.search.bounds import idle_allowed, lower_bound
from debubble.search.constructive.initial import moving
from debubble.search.effort import START, Effort
from debubble.search.exact.cp_sat import device_bound, solve, without_wrong_models
from debubble.search.exact.tight_memory import skeleton_bound
from debubble.search.exact.time_indexed_bound import proving
from debubble.search.periodic.repetition import grown
from debubble.search.problem import Incumbent, OrderProblem

PROVABLE = 72
"""Stages x micro-batches up to which CP-SAT usually closes the gap."""
LARGE = 200
"""Stages x micro-batches from which a periodic pattern is a start worth its time."""
LONG = 4
"""Micro-batches per stage above which it still is where list schedules may offload."""

WIDE = 0.02
"""Gap from which relaxations are worth their time: near the bound it is mostly the schedule that can be better."""

WORSE = 0.1
"""By how much more a start may take that keeps the bottleneck busy: what it lacks a search finds sooner."""

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
        problem: What is ordered.
        starts: Schedules to improve, beside the constructed ones and what is shipped for such a problem.
        effort: Seconds of the reference machine (see `solver.effort`), or an Effort with a brake on the clock.
        seed: The last of the stream depends on it, on the effort and on the number of walkers alone.
        workers: Walkers of the local search side by side, each with the whole effort.

    Returns:
        The stream; the last one is the best.

    Raises:
        InfeasibleError: Nothing fits the memory limit.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    shipped = cache.nearest(problem, cache.SHIPPED)
    candidates = [*starts, *(() if shipped is None else (shipped,))]
    *_, best = begun(problem, starts=candidates, effort=effort.part(effort.left / 4))
    run = _Run(problem, best, effort, seed, workers)
    for best in run.methods():
        yield replace(best, seconds=effort.spent)
        if best.optimal:
            return


@dataclass
class _Run:
    """Every method in turn, and the best that they have found so far."""

    problem: OrderProblem
    best: Incumbent
    effort: Effort
    seed: int
    workers: int

    @property
    def left(self) -> float:
        """Of the effort."""
        return self.effort.left

    @property
    def pairs(self) -> int:
        return self.problem.stages * self.problem.micro_batches

    @property
    def moves(self) -> bool:
        """Whether anything may leave memory."""
        return self.problem.offload or self.problem.recompute

    @property
    def opening(self) -> float:
        """Effort of local search before CP-SAT gets its turn: little where that can prove the optimum."""
        return min(self.left * 0.1, 2.0 if self.pairs <= PROVABLE else math.inf)

    @property
    def periodic(self) -> bool:
        """Whether a periodic middle may be a better start than the constructed ones."""
        many = self.problem.micro_batches > LONG * self.problem.stages
        return self.pairs >= LARGE and (many or not self.problem.offload)

    def methods(self) -> Iterator[Incumbent]:
        """What each finds."""
        yield self.best
        if self.best.optimal:
            return
        self.effort.brake.delay(compiled(self.problem, self.best))
        beside = Effort(self.left if self.best.gap > WIDE else 0, brake=self.effort.brake)
        with proving(self.problem, bound=self.best.bound, below=self.best.value, effort=beside) as prover:
            for best in self.searches():
                yield best
                if prover.bound >= best.value:
                    break
            yield self.bounded(self.best.value if prover.bound >= self.best.value else prover.finish())

    def searches(self) -> Iterator[Incumbent]:
        """What the methods find that search on this core."""
        if self.periodic:
            yield from self.repeated()
        start = self.best
        yield from self.searched(self.opening, turn=0)
        if self.pairs <= PROVABLE:
            yield from self.solved(self.left)
            return
        if self.best.gap > WIDE:
            yield from self.relaxed()
        if self.moves and not self.best.optimal:
            yield from self.again(start, seconds=self.left / 2 if self.best.gap > WIDE else self.left)
        whole, fruitless = self.effort.seconds, 0
        for turn in itertools.count(1):
            yield from self.searched(max(min(2.0, whole / 5), whole / 10), turn=turn)
            if self.left < min(1.0, whole / 20) or self.effort.over:
                return
            if fruitless < FRUITLESS:
                before = self.best.value
                yield from self.solved(min(3.0, whole / 5), turn=turn)
                fruitless = 0 if self.best.value < before else fruitless + 1

    def follow(self, found: Iterator[Incumbent]) -> Iterator[Incumbent]:
        """Remember the best of a stream that goes on from the best so far."""
        for better in found:
            self.best = better
            yield better

    def bounded(self, bound: Number) -> Incumbent:
        """The best with a better bound."""
        self.best = replace(self.best, bound=max(self.best.bound, bound))
        return self.best

    def repeated(self) -> Iterator[Incumbent]:
        """A schedule with a periodic middle."""
        effort = self.effort.part(self.left * 0.6)
        schedule = grown(self.problem, effort=effort, seed=self.seed, workers=self.workers)
        better = None if schedule is None else verified(self.problem, schedule, self.best, below=self.best.value)
        if better is not None:
            self.best = replace(better, source="pattern")
            yield self.best

    def searched(self, seconds: float, *, turn: int) -> Iterator[Incumbent]:
        """Local search with that much effort."""
        effort, seed = self.effort.part(seconds), self.seed + turn
        yield from self.follow(improve(self.problem, self.best, effort=effort, seed=seed, workers=self.workers))

    def again(self, start: Incumbent, *, seconds: float) -> Iterator[Incumbent]:
        """Another search, from another start, and as slow as can be: the slower it cools, the surer it is."""
        effort, seed = self.effort.part(seconds), self.seed + 1
        start = replace(self.busy(start, effort), bound=self.best.bound)
        slow = improve(
            self.problem,
            start,
            effort=effort,
            seed=seed,
            workers=self.workers,
            hot=HOT,
            coolings=(0.0, 1.0),
        )
        for found in slow:
            if found.value < self.best.value:
                self.best = found
                yield found

    def busy(self, start: Incumbent, effort: Effort) -> Incumbent:
        """The best start that keeps the bottleneck busy, even if it is worse than another."""
        limit: Number = (1 + WORSE) * start.value
        for schedule in moving(self.problem, idle=idle_allowed(self.problem)) if self.problem.offload else ():
            found = verified(self.problem, schedule, start, below=limit)
            if found is not None:
                start, limit = found, found.value
            effort.spend(START * self.pairs)
            if effort.over:
                break
        return start

    def solved(self, seconds: float, *, turn: int | None = None) -> Iterator[Incumbent]:
        """CP-SAT on the whole, or on a window of micro-batches that differs by turn."""
        free = None if turn is None else _window(self.problem, self.best.schedule, self.seed + turn)
        effort, seed = self.effort.part(seconds), turn or self.seed
        with without_wrong_models():
            yield from self.follow(solve(self.problem, self.best, effort=effort, seed=seed, free=free))

    def relaxed(self) -> Iterator[Incumbent]:
        """CP-SAT's bounds: of single devices where something is moved, else of the order that all have."""
        if self.moves:
            effort = self.effort.part(min(5, self.left / 4))
            with without_wrong_models():
                yield self.bounded(single_device_bounds(self.problem, self.best.value, effort=effort))
            return
        yield from self.solved(self.left / 2)
        best, effort = self.best, self.effort.part(self.left / 2)
        with without_wrong_models():
            yield self.bounded(skeleton_bound(self.problem, horizon=best.value, effort=effort, bound=best.bound))


def single_device_bounds(problem: OrderProblem, horizon: Number, *, effort: Effort) -> Number:
    """The best bound from the first, a middle and the last device, each exact alone."""
    devices = sorted({0, problem.devices // 2, problem.devices - 1})
    bound = lower_bound(problem)
    for device in devices:
        part = effort.part(effort.seconds / len(devices))
        bound = max(bound, device_bound(problem, device, horizon=horizon, effort=part))
    return bound


def _window(problem: OrderProblem, schedule: Schedule, seed: int) -> frozenset[Op]:
    """The operations of a few successive micro-batches."""
    width = max(2, min(problem.micro_batches, PROVABLE // problem.stages))
    begin = random.Random(seed).randrange(max(1, problem.micro_batches - width + 1))
    return frozenset(op for op in schedule.operations if begin <= op.micro_batch < begin + width)
