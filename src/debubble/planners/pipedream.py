"""PipeDream, as SCOPE compares with it: 1F1B on the partition whose slowest stage is fastest.

Source: Narayanan et al., PipeDream, SOSP 2019, the partitioning of section 3.1 for one worker per stage (its weights
stashed per micro-batch are not used: all planners here flush).  It balances compute only; recomputation is uniform.
"""

from __future__ import annotations

from debubble.planners.megatron_even import solution, uniformly_recomputed
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.partitioning.local_search import repriced
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.planners.scope.planner import megatron_schedule
from debubble.simulator import Repricer


@planner("pipedream", paper="PipeDream, SOSP 2019")
def pipedream(problem: Problem) -> Solution:
    """Balance the stages' compute exactly, then recompute uniformly as far as memory demands."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    if problem.units is None:
        return solution(repriced(repricer, problem))
    counts = balanced_counts(problem.units, problem.devices * chunks)
    return solution(uniformly_recomputed(problem, repricer, counts))
