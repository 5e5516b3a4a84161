"""DAPPLE and DAPPLE+: 1F1B on the even partition, keeping or recomputing everything.

Source: Fan et al., DAPPLE, PPoPP 2021 (arXiv:2007.01045); DAPPLE+ is the baseline of Obscura (USENIX ATC 2025).
"""

from __future__ import annotations

from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules.one_f_one_b import one_f_one_b


@planner("dapple", paper="DAPPLE, PPoPP 2021")
def dapple(problem: Problem) -> Solution:
    """1F1B on the even partition, without recomputation."""
    return even_1f1b(problem, strategy="none")


@planner("dapple+", paper="Obscura's baseline, ATC 2025")
def dapple_plus(problem: Problem) -> Solution:
    """1F1B on the even partition, recomputing everything."""
    return even_1f1b(problem, strategy="full")


def even_1f1b(problem: Problem, *, strategy: str) -> Solution:
    """1F1B on the even partition with one recomputation strategy everywhere."""
    stages = Stages.even(problem)
    schedule = one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)
    return stages.solution(schedule, stages.named(strategy))
