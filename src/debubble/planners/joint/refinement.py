"""Refines the recomputation strategy of single units, after the search chose one price per byte for each stage.

A price per byte is not exact because units cannot be cut: with memory to spare one unit may retain more, and if a
better order needs memory, one unit may retain less instead of the full stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, combinations

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.planners.problem import Solution
from debubble.search.effort import EVALUATION_PRICE, Effort


def refine(units: Units, time_of: Callable[[Solution], float], solution: Solution, effort: Effort) -> Solution:
    """Change the strategy of one unit, or of two on a device, while that makes the step faster in this order.

    Args:
        units: The model's units.
        time_of: Evaluates a solution's step time; infinite if it does not fit.
        solution: The initial plan.
        effort: The effort available.

    Returns:
        The fastest plan.
    """
    value, improved = time_of(solution), True
    while improved:
        improved = False
        for candidate in _neighbors(units, solution):
            if effort.over:
                return solution
            effort.spend(EVALUATION_PRICE * candidate.schedule.stages * candidate.schedule.micro_batches)
            time = time_of(candidate)
            if time < value:
                value, solution, improved = time, candidate, True
                break
    return solution


def _neighbors(units: Units, solution: Solution) -> Iterator[Solution]:
    """Plans with another strategy of one unit, or of two units on a device, by decreasing time saved."""
    partition, placement = solution.partition, solution.schedule.placement
    assert partition is not None

    def saved(change: tuple[int, int, str]) -> float:
        stage, position, name = change
        index, before = partition[stage][position]
        strategies = units.units[index].strategies
        return float(strategies[before].recompute) - float(strategies[name].recompute)

    changes = [
        [
            (stage, position, name)
            for stage in stages
            for position, (index, strategy) in enumerate(partition[stage])
            for name in units.units[index].strategies
            if name != strategy
        ]
        for stages in placement.stages_of
    ]
    single = sorted(chain.from_iterable(changes), key=saved, reverse=True)
    pairs = chain.from_iterable(
        combinations(sorted(device_changes, key=saved, reverse=True), 2) for device_changes in changes
    )
    for chosen in chain(((change,) for change in single), pairs):
        if sum(map(saved, chosen)) > 0:
            yield _changed(units, solution, partition, chosen)


def _changed(
    units: Units, solution: Solution, partition: Partition, chosen: tuple[tuple[int, int, str], ...]
) -> Solution:
    """Apply changes of strategies, given as (stage, position in the stage, strategy)."""
    stages = [list(stage) for stage in partition]
    for stage, position, name in chosen:
        stages[stage][position] = (stages[stage][position][0], name)
    changed = Partition(stages)
    not_recomputing = {*range(solution.schedule.stages)} - changed.recomputing
    schedule = solution.schedule.without_explicit_recompute(not_recomputing)
    schedule = replace(schedule, fused_recompute=changed.recomputing)
    costs = units.stage_costs(changed, schedule.placement, on_host=schedule.host_steps)
    return replace(solution, schedule=schedule, costs=costs, partition=changed)
