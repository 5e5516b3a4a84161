"""Fast figures of one choice of degrees: what its step takes at least, and what a quick plan takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from debubble.costs.units import Strategy, Unit
from debubble.ir import DebubbleError, InfeasibleError
from debubble.planners.bounds import lower_bound
from debubble.planners.degrees.memory import units_of
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule
from debubble.planners.problem import Problem, Solution, closest
from debubble.schedules import schedules
from debubble.search.effort import REPRICED
from debubble.simulator import Repricer

QUICK = (("1f1b", 1), ("interleaved", 2))
"""Schedules of the quick plan, with their chunks."""
DEEPER = (4, 6, 8, 12, 16)
"""Chunks that are tried where two are faster than one."""


def step_bound(problem: Problem) -> float:
    """Seconds that every plan's step takes at least: the busiest device's share of the work, and the least tail."""
    return float(problem.step_bound(lower_bound(problem)))


def rough_step(problem: Problem) -> float:
    """Estimate the seconds of a step of 1F1B with even stages; infinite if it does not fit.

    The first device holds min(m, p) micro-batches of its even share and recomputes as much as that asks for: first the
    cheap operators (`cmb`), then everything.
    """
    units, p, m = units_of(problem), problem.devices, problem.micro_batches
    kinds = _kinds(units.units)
    static = sum(n * float(unit.static) for unit, n in kinds) / p + max(float(unit.workspace) for unit, _ in kinds)
    room = min(problem.limits) - static - float(units.static)
    points = []
    for name in ("none", "cmb", "full"):
        kept = sum(n * float(_of(unit, name).activation) for unit, n in kinds) * min(m, p) / p
        restored = max(float(unit.activation - _of(unit, name).activation) for unit, _ in kinds)
        points.append((kept + restored, sum(n * float(_of(unit, name).recompute) for unit, n in kinds)))
    again = _recompute_within(room, points)
    busiest = max((float(units.work) + again) / p, *(float(unit.work) for unit, _ in kinds))
    tail = 0.0 if problem.tail is None else problem.tail.of(None)
    return (m + p - 1) * busiest + tail


def _kinds(units: Sequence[Unit]) -> list[tuple[Unit, int]]:
    """Units of every kind with their number: layers of one kind have one table of strategies."""
    counts = Counter(id(unit.strategies) for unit in units)
    firsts = {id(unit.strategies): unit for unit in units}
    return [(unit, counts[key]) for key, unit in firsts.items()]


def _of(unit: Unit, name: str) -> Strategy:
    return unit.strategies.get(name, unit.strategies["none"])


def _recompute_within(room: float, points: Sequence[tuple[float, float]]) -> float:
    """The least recomputation with which activations fit, along a line through (bytes, seconds); infinite if none."""
    if points[0][0] <= room:
        return points[0][1]
    for (larger, less), (smaller, more) in pairwise(points):
        if smaller <= room:
            return less + (more - less) * (larger - room) / (larger - smaller)
    return math.inf


def quick_step(problem: Problem) -> tuple[float, Solution]:
    """Seconds of a step of the quick plan, and the plan: balanced stages, 1F1B or interleaved, the least recomputation.

    Raises:
        InfeasibleError: if none of them fits, however much it recomputes.
    """
    reasons: list[DebubbleError] = []
    found: list[tuple[float, PricedSchedule]] = []
    for name, chunks in _schedules(problem):
        try:
            candidate = _fitted(problem, name, chunks)
        except DebubbleError as reason:
            reasons.append(reason)
        else:
            tail = 0.0 if problem.tail is None else problem.tail.of(candidate.schedule)
            found.append((candidate.time + tail, candidate))
    if not found:
        raise closest(reasons) if reasons else InfeasibleError("No schedule has that many chunks.")
    step, best = min(found, key=lambda pair: pair[0])
    return step, Solution(schedule=best.schedule, costs=best.costs, partition=best.partition)


def deepened_step(problem: Problem) -> tuple[float, Solution]:
    """Seconds of a step of the quick plan with as many chunks as make it faster, and that plan.

    Raises:
        InfeasibleError: as `quick_step` does.
    """
    step, best = quick_step(problem)
    if problem.chunks is not None or best.schedule.placement.chunks < 2:
        return step, best
    for chunks in DEEPER:
        try:
            deeper, plan = quick_step(replace(problem, chunks=chunks))
        except DebubbleError:
            break
        if deeper >= step:
            break
        step, best = deeper, plan
    return step, best


def quick_price(problem: Problem) -> float:
    """Seconds of the reference machine that `quick_step` takes."""
    once, per_pair = REPRICED
    return sum(once + per_pair * problem.devices * v * problem.micro_batches for _, v in _schedules(problem))


def _schedules(problem: Problem) -> list[tuple[str, int]]:
    if problem.chunks is not None:
        choices = [("1f1b" if problem.chunks == 1 else "interleaved", problem.chunks)]
    elif problem.devices == 1:
        choices = [("1f1b", 1)]
    else:
        choices = [(name, v) for name, v in QUICK if problem.devices * v <= len(units_of(problem).units)]
    return [(name, v) for name, v in choices if problem.allows(name)]


def _fitted(problem: Problem, name: str, chunks: int) -> PricedSchedule:
    lengths = balanced_counts(units_of(problem), problem.devices * chunks)
    placed: dict[str, Any] = {"chunks": chunks} if chunks > 1 else {}
    schedule = schedules[name](devices=problem.devices, micro_batches=problem.micro_batches, **placed)
    return PartitionSearch(problem, units_of(problem), Repricer(schedule)).fitted(lengths)
