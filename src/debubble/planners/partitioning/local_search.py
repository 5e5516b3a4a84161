"""Local search over partitions on one order of operations, scored by simulation.

Every point takes the least recomputation that fits; a move shifts one or two units from one stage to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from debubble.costs.units import Partition, Units, recomputing
from debubble.ir import InfeasibleError, Schedule, StageCosts
from debubble.planners.partitioning.balance import counts_of
from debubble.planners.partitioning.recomputation import cheapest_stages, cheapest_strategies
from debubble.planners.problem import Problem
from debubble.search.effort import REPRICED, SCORED, Effort
from debubble.simulator import Repricer


@dataclass(frozen=True)
class Candidate:
    """One feasible point of a search."""

    time: float
    """Of a step, as the problem counts it."""
    schedule: Schedule
    costs: StageCosts
    partition: Partition | None


def repriced(repricer: Repricer, problem: Problem) -> Candidate:
    """The schedule on the problem's fixed costs, with the fewest stages that must recompute."""
    costs = problem.costs
    assert costs is not None
    schedule = repricer.schedule
    fused = cheapest_stages(repricer, costs) | schedule.fused_recompute
    price = repricer.price(costs, fused_recompute=fused)
    return Candidate(float(problem.time_of(price)), replace(schedule, fused_recompute=fused), costs, None)


def priced(
    problem: Problem, repricer: Repricer, counts: Sequence[int], strategies: Sequence[str] | None = None
) -> Candidate:
    """The partition with `counts` units per stage; raises InfeasibleError if it does not fit.

    `strategies`: those that units may use beside `none` (None: all).
    """
    assert problem.units is not None
    return scored(problem, repricer, cheapest_strategies(repricer, problem.units, counts, strategies))


def scored(problem: Problem, repricer: Repricer, partition: Partition) -> Candidate:
    """A partition of the problem's units on the schedule, with its simulated time; the limit is not checked."""
    assert problem.units is not None
    costs = problem.units.stage_costs(partition, repricer.schedule.placement)
    fused = recomputing(partition)
    price = repricer.price(costs, fused_recompute=fused)
    return Candidate(float(problem.time_of(price)), replace(repricer.schedule, fused_recompute=fused), costs, partition)


def improve(
    problem: Problem, start: Candidate, *, effort: Effort, strategies: Sequence[str] | None = None
) -> Candidate:
    """Move units between stages, then change their strategies, while that makes the step faster and the effort lasts.

    `strategies`: as in `priced`.  Returns the start if nothing helps.
    """
    if start.partition is None:
        return start
    repricer = Repricer(start.schedule)
    best = _move_units(problem, repricer, start, effort, strategies)
    assert best.partition is not None
    fine = refine(problem, repricer, best, effort=effort, strategies=strategies)
    for neighbour in _neighbours(counts_of(best.partition), _load(best)):
        if effort.over:
            break
        _spend(effort, repricer, REPRICED)
        try:
            found = priced(problem, repricer, neighbour, strategies)
        except InfeasibleError:
            continue
        if found.time < fine.time * NEAR:
            again = refine(problem, repricer, found, effort=effort, strategies=strategies)
            fine = min(fine, again, key=lambda c: c.time)
    return fine


NEAR = 1.2
"""How much slower a neighbouring partition may be for its strategies to be worth refining."""


def _move_units(
    problem: Problem, repricer: Repricer, start: Candidate, effort: Effort, strategies: Sequence[str] | None
) -> Candidate:
    assert start.partition is not None
    best, counts = start, tuple(counts_of(start.partition))
    tried = {counts}
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(counts, _load(best)):
            if neighbour in tried:
                continue
            if effort.over:
                return best
            _spend(effort, repricer, REPRICED)
            tried.add(neighbour)
            try:
                found = priced(problem, repricer, neighbour, strategies)
            except InfeasibleError:
                continue
            if found.time < best.time:
                best, counts, improved = found, neighbour, True
                break
    return best


def refine(
    problem: Problem,
    repricer: Repricer,
    start: Candidate,
    *,
    effort: Effort,
    strategies: Sequence[str] | None = None,
) -> Candidate:
    """Change the strategies of one unit, or of two on the same device, as long as that makes the step faster.

    Choosing by time per byte is not exact, because units cannot be cut; this mends it.
    """
    best = start
    improved = True
    while improved:
        improved = False
        assert best.partition is not None
        for partition in _other_strategies(problem, repricer, best.partition, strategies):
            if effort.over:
                return best
            _spend(effort, repricer, SCORED)
            found = scored(problem, repricer, partition)
            if found.time < best.time and _fits(problem, repricer, found):
                best, improved = found, True
                break
    return best


def _spend(effort: Effort, repricer: Repricer, price: tuple[float, float]) -> None:
    schedule = repricer.schedule
    effort.spend(price[0] + price[1] * schedule.stages * schedule.micro_batches)


def _fits(problem: Problem, repricer: Repricer, candidate: Candidate) -> bool:
    peaks = repricer.peak_memory(candidate.costs, fused_recompute=candidate.schedule.fused_recompute)
    return all(peak <= limit for peak, limit in zip(peaks, problem.limits, strict=True))


def _other_strategies(
    problem: Problem, repricer: Repricer, partition: Partition, strategies: Sequence[str] | None
) -> Iterator[Partition]:
    """Partitions that differ in one unit's strategy, or in those of two units of one device."""
    assert problem.units is not None
    for stages in repricer.schedule.placement.stages_of:
        changes = [
            (stage, at, name)
            for stage in stages
            for at, (index, strategy) in _representatives(problem.units, partition[stage])
            for name in problem.units.units[index].strategies
            if name != strategy and (strategies is None or name in ("none", *strategies))
        ]
        for chosen in chain(((c,) for c in changes), combinations(changes, 2)):
            other = [list(stage) for stage in partition]
            for stage, at, name in chosen:
                other[stage][at] = (other[stage][at][0], name)
            yield other


def _representatives(units: Units, stage: Sequence[tuple[int, str]]) -> list[tuple[int, tuple[int, str]]]:
    """One unit per type and strategy with its place in the stage: equal units can stand for each other."""
    found = {(units.units[index].type, strategy): (at, (index, strategy)) for at, (index, strategy) in enumerate(stage)}
    return list(found.values())


def _load(candidate: Candidate) -> list[float]:
    """Per stage, how long its device is busy per micro-batch, recomputation included."""
    costs, schedule = candidate.costs, candidate.schedule
    load = [0.0] * schedule.stages
    for stages in schedule.placement.stages_of:
        total = sum(
            float(costs.work(s)) + (float(costs.recompute[s]) if s in schedule.fused_recompute else 0.0) for s in stages
        )
        for s in stages:
            load[s] = total
    return load


def _neighbours(counts: Sequence[int], load: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """From the busiest devices to the idlest first; two units at a time after all moves of one."""
    stages = range(len(counts))
    pairs = sorted(
        ((giver, taker) for giver in stages for taker in stages if giver != taker),
        key=lambda pair: load[pair[1]] - load[pair[0]],
    )
    for step in (1, 2):
        for giver, taker in pairs:
            if counts[giver] > step:
                moved = list(counts)
                moved[giver] -= step
                moved[taker] += step
                yield tuple(moved)
