"""Merak, as SCOPE compares with it: even 1F1B that recomputes only where memory demands it.

Source: Lai et al., Merak, IEEE TPDS 2023, section 4: stages that have memory to spare skip recomputation, and what
remains falls into bubbles where the schedule has them.
"""

from __future__ import annotations

from debubble.planners.megatron_even import solution
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.local_search import priced, repriced
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.planners.scope.planner import megatron_schedule
from debubble.simulator import Repricer


@planner("merak", paper="Merak, TPDS 2023")
def merak(problem: Problem) -> Solution:
    """Keep the even split; every stage fully recomputes the fewest layers that make it fit."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    if problem.units is None:
        return solution(repriced(repricer, problem))
    counts = even_counts(problem.units, problem.devices * chunks)
    return solution(priced(problem, repricer, counts, ("full",)))
