"""Zero-bubble schedules as a planner, on even and on balanced stages.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, and Pipeline Parallelism with Controllable Memory,
NeurIPS 2024.  The papers recompute nothing; here all layers may recompute, selectively or fully, if that is faster.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from debubble.ir import DebubbleError, InfeasibleError, Number
from debubble.planners.baselines.pipeoffload import placed_stages
from debubble.planners.problem import FixedStages, Problem, Solution, closest
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.simulator import simulate

SCHEDULES = ("zb-h1", "zb", "zb-v", "v-half", "v-min")
STRATEGIES, FIXED_STRATEGIES = ("none", "selective", "full"), ("none", "full")
"""Recomputation strategies of all layers, and of all fixed stages."""


@planner("zero-bubble", paper="Zero Bubble, ICLR 2024")
def zero_bubble(problem: Problem) -> Solution:
    """The fastest zero-bubble schedule on even or balanced stages, nothing or every layer recomputing."""
    reasons: list[DebubbleError] = []
    solutions: list[tuple[Number, Solution]] = []
    strategies = FIXED_STRATEGIES if isinstance(problem.workload, FixedStages) else STRATEGIES
    for name, strategy in product(SCHEDULES, strategies):
        entry = schedules[name]
        if problem.chunks not in (None, entry.default_chunks):
            continue
        placement = entry.placement(problem.devices, entry.default_chunks)
        for stages in placed_stages(problem, placement, strategy=strategy):
            costs = stages.costs
            all_stages = frozenset(range(costs.stages) if strategy == "full" else ())
            recomputing = all_stages if stages.partition is None else stages.partition.recomputing
            options = entry.accepted_options(recomputing=recomputing, objective=problem.objective, steps=0)
            try:
                schedule = entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=costs, **options)
                schedule = replace(schedule, fused_recompute=recomputing)
                time = problem.time_of(simulate(schedule, costs))
            except DebubbleError as error:
                reasons.append(error)
            else:
                solutions.append((time, stages.solution(schedule)))
    if not solutions and not reasons:
        raise InfeasibleError(f"No zero-bubble schedule has {problem.chunks} chunks: leave --chunks out.")
    if not solutions:
        raise closest(reasons)
    return min(solutions, key=lambda timed: timed[0])[1]
