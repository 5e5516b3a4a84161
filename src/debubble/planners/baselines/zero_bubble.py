"""Zero-bubble schedules as a planner: each on even and on balanced stages.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, and Pipeline Parallelism with Controllable Memory,
NeurIPS 2024.  The papers recompute nothing; here all layers may recompute, selectively or fully, where that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from debubble.costs.partition import Partition
from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, StageCosts
from debubble.planners.partitioning.balance import even_and_balanced
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, closest
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.simulator import simulate

SCHEDULES = ("zb-h1", "zb", "zb-v", "v-half", "v-min")
STRATEGIES = ("none", "selective", "full")
"""Recomputation of all layers."""


@planner("zero-bubble", paper="Zero Bubble, ICLR 2024")
def zero_bubble(problem: Problem) -> Solution:
    """The fastest zero-bubble schedule on even or balanced stages, nothing or every layer recomputing."""
    reasons: list[DebubbleError] = []
    found: list[tuple[Number, Solution]] = []
    for name, strategy in product(SCHEDULES, STRATEGIES):
        entry = schedules[name]
        if problem.chunks not in (None, entry.default_chunks):
            continue
        placement = entry.placement(problem.devices, entry.default_chunks)
        for costs, partition, recomputing in _stages(problem, placement, strategy):
            options = entry.accepted_options(recomputing=recomputing, objective=problem.objective, steps=0)
            try:
                schedule = entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=costs, **options)
                schedule = replace(schedule, fused_recompute=recomputing)
                time = problem.time_of(simulate(schedule, costs))
            except DebubbleError as error:
                reasons.append(error)
            else:
                found.append((time, Solution(schedule=schedule, costs=costs, partition=partition)))
    if not found and not reasons:
        raise InfeasibleError(f"No zero-bubble schedule has {problem.chunks} chunks: leave --chunks out.")
    if not found:
        raise closest(reasons)
    return min(found, key=lambda each: each[0])[1]


def _stages(
    problem: Problem, placement: Placement, strategy: str
) -> Iterator[tuple[StageCosts, Partition | None, frozenset[int]]]:
    """The stages' costs, their partition, and which of them recompute."""
    match problem.workload:
        case FixedStages(costs):
            if costs.stages == placement.stages and strategy in ("none", "full"):
                yield costs, None, frozenset(range(costs.stages) if strategy == "full" else ())
        case ModelUnits(units):
            if strategy == "none" or any(strategy in unit.strategies for unit in units.units):
                for lengths in even_and_balanced(units, placement.stages):
                    partition = Partition.cut(units, lengths, strategy=strategy)
                    yield units.stage_costs(partition, placement), partition, partition.recomputing
