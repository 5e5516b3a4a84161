"""Recomputation of a plan's units one by one: the search gives a stage's units one price; this frees some of it.

Choosing by time per byte is not exact, because units cannot be cut: where memory is left, a unit may keep more; where
some is lacking for a better order, one unit may keep less instead of a whole stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.planners.problem import Solution
from debubble.search.effort import EVALUATED, Effort


def refine(units: Units, time_of: Callable[[Solution], float], solution: Solution, effort: Effort) -> Solution:
    """Change the strategies of one unit, or of two on a device, as long as that makes the step faster in this order.

    Args:
        units: The model.
        time_of: The time of a solution's step; infinite if it does not fit.
        solution: Where it begins.
        effort: What it may spend.

    Returns:
        The fastest plan.
    """
    value, improved = time_of(solution), True
    while improved:
        improved = False
        for changed in _neighbours(units, solution):
            if effort.over:
                return solution
            effort.spend(EVALUATED * changed.schedule.stages * changed.schedule.micro_batches)
            time = time_of(changed)
            if time < value:
                value, solution, improved = time, changed, True
                break
    return solution


def _neighbours(units: Units, solution: Solution) -> Iterator[Solution]:
    """Plans that differ in a unit's strategy, or in those of two units of a device; what saves most time first."""
    partition, placement = solution.partition, solution.schedule.placement
    assert partition is not None

    def saved(change: tuple[int, int, str]) -> float:
        stage, at, name = change
        index, before = partition[stage][at]
        strategies = units.units[index].strategies
        return float(strategies[before].recompute) - float(strategies[name].recompute)

    changes = [
        [
            (stage, at, name)
            for stage in stages
            for at, (index, strategy) in enumerate(partition[stage])
            for name in units.units[index].strategies
            if name != strategy
        ]
        for stages in placement.stages_of
    ]
    single = sorted(chain.from_iterable(changes), key=saved, reverse=True)
    pairs = chain.from_iterable(combinations(sorted(each, key=saved, reverse=True), 2) for each in changes)
    for chosen in chain(((change,) for change in single), pairs):
        if sum(map(saved, chosen)) > 0:
            yield _changed(units, solution, partition, chosen)


def _changed(
    units: Units, solution: Solution, partition: Partition, chosen: tuple[tuple[int, int, str], ...]
) -> Solution:
    """The plan with other strategies of some units, as (stage, place in it, strategy)."""
    stages = [list(stage) for stage in partition]
    for stage, at, name in chosen:
        stages[stage][at] = (stages[stage][at][0], name)
    changed = Partition(stages)
    kept = {*range(solution.schedule.stages)} - changed.recomputing
    schedule = solution.schedule.without_explicit_recompute(kept)
    schedule = replace(schedule, fused_recompute=changed.recomputing)
    costs = units.stage_costs(changed, schedule.placement, on_host=schedule.host_steps)
    return replace(solution, schedule=schedule, costs=costs, partition=changed)
