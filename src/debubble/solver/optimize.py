"""The engine: every method in turn on one problem, as one stream of better schedules and better bounds.

Local search finds, CP-SAT proves: small problems, and those where nothing is moved, are given to CP-SAT after a short
search; large ones are searched, with bounds from relaxations and, where the search stalls, neighbourhoods solved by
CP-SAT.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from debubble.ir import Number, Op, Schedule
from debubble.solver import cache
from debubble.solver.bounds import idle_allowed, lower_bound
from debubble.solver.counting import proving
from debubble.solver.cp_sat import device_bound, solve, without_wrong_models
from debubble.solver.growing import grown
from debubble.solver.problem import Incumbent, OrderProblem
from debubble.solver.search import HOT, Clock, improve, readied, search, verified
from debubble.solver.starts import moving
from debubble.solver.tight import skeleton_bound

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
    deadline: float = 10.0,
    seed: int = 0,
    workers: int = 1,
    use_cache: bool = True,
) -> Iterator[Incumbent]:
    """Better and better schedules with rising bounds until the optimum is proven or `deadline` seconds are over.

    Those that compiling the kernel takes, once on a machine, are not counted.
    `starts`: schedules to improve.  The cache gives another one if it holds a similar problem's, and keeps the result.
    Raises InfeasibleError if nothing fits.
    """
    begin = time.monotonic()
    cached = cache.nearest(problem) if use_cache else None
    candidates = [*starts, *(() if cached is None else (cached,))]
    *_, best = search(problem, starts=candidates, deadline=deadline / 4, steps=0, seed=seed)
    run = _Run(problem, best, Clock(begin, begin + deadline), seed, workers)
    for best in run.methods():
        yield replace(best, seconds=run.clock.passed)
        if best.optimal:
            break
    if use_cache:
        cache.keep(problem, run.best)


@dataclass
class _Run:
    """Every method in turn, and the best that they have found so far."""

    problem: OrderProblem
    best: Incumbent
    clock: Clock
    seed: int
    workers: int

    @property
    def left(self) -> float:
        """Seconds."""
        return self.clock.left

    @property
    def pairs(self) -> int:
        return self.problem.stages * self.problem.micro_batches

    @property
    def moves(self) -> bool:
        """Whether anything may leave memory."""
        return self.problem.offload or self.problem.recompute

    @property
    def opening(self) -> float:
        """Seconds of local search before CP-SAT gets its turn: few where that can prove the optimum."""
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
        self.clock = self.clock.later(readied(self.problem, self.best))
        seconds = self.left if self.best.gap > WIDE else 0
        with proving(self.problem, bound=self.best.bound, below=self.best.value, seconds=seconds) as prover:
            if self.periodic:
                yield from self.repeated()
            start = self.best
            yield from self.searched(self.opening, turn=0)
            yield self.bounded(prover.bound)
            if self.pairs <= PROVABLE:
                yield from self.solved(self.left)
                return
            if self.best.gap > WIDE:
                yield from self.relaxed()
            if self.moves and not self.best.optimal:
                yield from self.again(start, seconds=self.left / 2 if self.best.gap > WIDE else self.left)
            fruitless = 0
            for turn in itertools.count(1):
                yield from self.searched(max(2.0, (self.clock.end - self.clock.begin) / 10), turn=turn)
                yield self.bounded(prover.bound)
                if self.left < 1:
                    return
                if fruitless < FRUITLESS:
                    before = self.best.value
                    yield from self.solved(3.0, turn=turn)
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
        schedule = grown(self.problem, seconds=self.left * 0.6, seed=self.seed, workers=self.workers)
        better = None if schedule is None else verified(self.problem, schedule, self.best, below=self.best.value)
        if better is not None:
            self.best = replace(better, source="pattern")
            yield self.best

    def searched(self, seconds: float, *, turn: int) -> Iterator[Incumbent]:
        """Local search for some seconds."""
        clock = Clock.starting(min(self.left, max(seconds, 0.5)))
        seed = self.seed + turn
        yield from self.follow(
            improve(self.problem, self.best, clock=clock, steps=None, seed=seed, workers=self.workers)
        )

    def again(self, start: Incumbent, *, seconds: float) -> Iterator[Incumbent]:
        """Another search, from another start, and as slow as can be: the slower it cools, the surer it is."""
        clock, seed = Clock.starting(seconds), self.seed + 1
        start = replace(self.busy(start), bound=self.best.bound)
        slow = improve(
            self.problem,
            start,
            clock=clock,
            steps=None,
            seed=seed,
            workers=self.workers,
            hot=HOT,
            coolings=(0.0, 1.0),
        )
        for found in slow:
            if found.value < self.best.value:
                self.best = found
                yield found

    def busy(self, start: Incumbent) -> Incumbent:
        """The best start that keeps the bottleneck busy, even if it is worse than another."""
        limit: Number = (1 + WORSE) * start.value
        for schedule in moving(self.problem, idle=idle_allowed(self.problem)) if self.problem.offload else ():
            found = verified(self.problem, schedule, start, below=limit)
            if found is not None:
                start, limit = found, found.value
            if self.clock.over:
                break
        return start

    def solved(self, seconds: float, *, turn: int | None = None) -> Iterator[Incumbent]:
        """CP-SAT on the whole, or on a window of micro-batches that differs by turn."""
        free = None if turn is None else _window(self.problem, self.best.schedule, self.seed + turn)
        seconds, seed = min(self.left, seconds), turn or self.seed
        with without_wrong_models():
            yield from self.follow(
                solve(self.problem, self.best, seconds=seconds, seed=seed, workers=self.workers, free=free)
            )

    def relaxed(self) -> Iterator[Incumbent]:
        """CP-SAT's bounds: of single devices where something is moved, else of the order that all have."""
        if self.moves:
            seconds = min(5, self.left / 4)
            with without_wrong_models():
                yield self.bounded(single_device_bounds(self.problem, self.best.value, seconds=seconds))
            return
        yield from self.solved(self.left / 2)
        best, seconds = self.best, self.left / 2
        with without_wrong_models():
            yield self.bounded(skeleton_bound(self.problem, horizon=best.value, seconds=seconds, bound=best.bound))


def single_device_bounds(problem: OrderProblem, horizon: Number, *, seconds: float) -> Number:
    """The best bound from the first, a middle and the last device, each exact alone."""
    devices = sorted({0, problem.devices // 2, problem.devices - 1})
    bound = lower_bound(problem)
    for device in devices:
        bound = max(bound, device_bound(problem, device, horizon=horizon, seconds=seconds / len(devices)))
    return bound


def _window(problem: OrderProblem, schedule: Schedule, seed: int) -> frozenset[Op]:
    """The operations of a few successive micro-batches."""
    width = max(2, min(problem.micro_batches, PROVABLE // problem.stages))
    begin = random.Random(seed).randrange(max(1, problem.micro_batches - width + 1))
    return frozenset(op for op in schedule.operations if begin <= op.micro_batch < begin + width)
