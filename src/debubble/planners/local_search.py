"""Local search over partitions on one order of operations, scored by simulation.

Every point takes the least recomputation that fits; a move shifts one or two units from one stage to another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.costs.units import Partition, recomputing
from debubble.ir import InfeasibleError, Schedule, StageCosts
from debubble.planners.partition import counts_of
from debubble.planners.problem import Problem
from debubble.planners.recomputation import cheapest_stages, cheapest_strategies
from debubble.simulator import Repricer


@dataclass(frozen=True)
class Candidate:
    """One feasible point of a search."""

    makespan: float
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
    return Candidate(price.makespan, replace(schedule, fused_recompute=fused), costs, None)


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
    return Candidate(price.makespan, replace(repricer.schedule, fused_recompute=fused), costs, partition)


def improve(problem: Problem, start: Candidate, *, until: float, strategies: Sequence[str] | None = None) -> Candidate:
    """Move one or two units between stages as long as that makes the step faster; the start if nothing does."""
    if start.partition is None:
        return start
    best, repricer = start, Repricer(start.schedule)
    counts = tuple(counts_of(start.partition))
    tried = {counts}
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(counts, _load(best)):
            if neighbour in tried:
                continue
            if time.perf_counter() > until:
                return best
            tried.add(neighbour)
            try:
                found = priced(problem, repricer, neighbour, strategies)
            except InfeasibleError:
                continue
            if found.makespan < best.makespan:
                best, counts, improved = found, neighbour, True
                break
    return best


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
