"""The engine: every method in turn on one problem, as one stream of better schedules and better bounds.

Local search finds, CP-SAT proves: small problems, and those where nothing is moved, are given to CP-SAT after a short
search; large ones are searched, with bounds from relaxations and, where the search stalls, neighbourhoods solved by
CP-SAT.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from debubble.ir import Number, Op, Schedule
from debubble.solver import cache
from debubble.solver.bounds import lower_bound
from debubble.solver.cp_sat import device_bound, solve
from debubble.solver.growing import grown
from debubble.solver.patterns import periodic
from debubble.solver.problem import Incumbent, OrderProblem
from debubble.solver.search import Clock, improve, search
from debubble.solver.tight import LARGEST, skeleton_bound

PROVABLE = 72
"""Stages x micro-batches up to which CP-SAT usually closes the gap."""
LARGE = 200
"""Stages x micro-batches from which a periodic pattern is a start worth its time."""


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

    `starts`: schedules to improve.  The cache gives another one if it holds a similar problem's, and keeps the result.
    Raises InfeasibleError if nothing fits.
    """
    begin = time.monotonic()
    best: Incumbent | None = None
    for best in _methods(problem, starts=starts, deadline=deadline, seed=seed, workers=workers, use_cache=use_cache):
        yield replace(best, seconds=time.monotonic() - begin)
        if best.optimal:
            break
    if best is not None and use_cache:
        cache.keep(problem, best)


def _methods(
    problem: OrderProblem, *, starts: Iterable[Schedule], deadline: float, seed: int, workers: int, use_cache: bool
) -> Iterator[Incumbent]:
    begin = time.monotonic()

    def left() -> float:
        return deadline - (time.monotonic() - begin)

    candidates = list(starts)
    cached = cache.nearest(problem) if use_cache else None
    candidates.extend(() if cached is None else (cached,))
    pairs = problem.stages * problem.micro_batches
    if pairs >= LARGE:
        start = grown(problem, seconds=left() * 0.6, seed=seed, workers=workers)
        start = start or periodic(problem, seconds=min(left() / 4, 10.0), seed=seed)
        candidates.extend(() if start is None else (start,))
    only_order = pairs <= LARGEST and not (problem.offload or problem.recompute)
    first = max(0.5, left() * (0.1 if only_order or pairs <= PROVABLE else 0.6))
    best: Incumbent | None = None
    for best in search(problem, starts=candidates, deadline=first, seed=seed, workers=workers):
        yield best
    assert best is not None
    if best.optimal:
        return
    if pairs <= PROVABLE:
        yield from solve(problem, best, seconds=left(), seed=seed, workers=workers)
        return
    if problem.offload or problem.recompute:
        best = replace(
            best, bound=max(best.bound, single_device_bounds(problem, best.value, seconds=min(5, left() / 4)))
        )
    else:
        for incumbent in solve(problem, best, seconds=left() / 2, seed=seed, workers=workers):
            best = incumbent
            yield best
        best = replace(best, bound=skeleton_bound(problem, horizon=best.value, seconds=left() / 2, bound=best.bound))
    yield best
    if best.optimal:
        return
    for turn in itertools.count(1):
        slot = min(left(), max(2.0, deadline / 10))
        clock = Clock.starting(slot)
        for incumbent in improve(problem, best, clock=clock, steps=None, seed=seed + turn, workers=workers):
            best = incumbent
            yield best
        if left() < 1 or best.optimal:
            return
        window = _window(problem, best.schedule, seed + turn)
        for incumbent in solve(problem, best, seconds=min(left(), 3.0), seed=turn, workers=workers, free=window):
            best = incumbent
            yield best


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
