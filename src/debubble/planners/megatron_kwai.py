"""Megatron-Kwai: 1F1B whose units all recompute the same operators, as few as fit.

Source: Yuan et al., Accelerating the Training of Large Language Models Using Efficient Activation Rematerialization and
Optimal Hybrid Parallelism, USENIX ATC 2024, as ChronosPipe compares with it: compute-memory balanced checkpointing
(norm, activation function, ... recomputed everywhere), without its activation offloading.
"""

from __future__ import annotations

from debubble.ir import InfeasibleError
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.simulator import simulate


@planner("megatron-kwai", paper="Megatron-Kwai, ATC 2024")
def megatron_kwai(problem: Problem) -> Solution:
    """1F1B on the even partition, all units recomputing the same operators, chosen as cheap as the limit allows."""
    stages = Stages.even(problem)
    schedule = one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)
    reason: InfeasibleError | None = None
    for strategy in _cheap_first(problem):
        solution = stages.solution(schedule, stages.named(strategy))
        try:
            simulate(solution.schedule, solution.costs)
        except InfeasibleError as error:
            reason = error
            continue
        return solution
    raise InfeasibleError(f"No operators suffice: {reason}")


def _cheap_first(problem: Problem) -> list[str]:
    """The strategies' names, by the recompute time of the whole model."""
    if problem.units is None:
        return ["none", "full"]
    units = problem.units.units
    names = {name for unit in units for name in unit.strategies}

    def time(name: str) -> tuple[float, str]:
        return float(sum(unit.strategies[name].recompute for unit in units if name in unit.strategies)), name

    return ["none", *sorted(names - {"none"}, key=time)]
