"""Megatron-Even: 1F1B (or interleaved 1F1B) with the layers in equal runs and the same recomputation everywhere.

Source: Narayanan et al., Megatron-LM, SC 2021.  Recomputation is Megatron's `block` method: the first N units of every
stage recompute fully, N the least that fits all devices, as `--recompute-num-layers` can express it.
"""

from __future__ import annotations

from debubble.costs.units import Partition, recomputing
from debubble.ir import InfeasibleError
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.local_search import Candidate, repriced, scored
from debubble.planners.problem import Problem, Solution, cut
from debubble.planners.registry import planner
from debubble.planners.scope.planner import megatron_schedule
from debubble.simulator import Repricer


@planner("megatron-even", paper="Megatron-LM, SC 2021")
def megatron_even(problem: Problem) -> Solution:
    """Equal runs of layers, the same number of fully recomputed ones on every stage."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    if problem.units is None:
        return solution(repriced(repricer, problem))
    return solution(uniformly_recomputed(problem, repricer, even_counts(problem.units, problem.devices * chunks)))


def uniformly_recomputed(problem: Problem, repricer: Repricer, counts: list[int]) -> Candidate:
    """The partition with the least N for which the first N units of every stage recompute fully.

    Raises InfeasibleError if even all of them do not suffice.
    """
    assert problem.units is not None
    limits = problem.limits
    plain = cut(problem.units, counts)
    full = cut(problem.units, counts, strategy="full")
    for number in range(max(counts) + 1):
        partition: Partition = [f[:number] + p[number:] for f, p in zip(full, plain, strict=True)]
        costs = problem.units.stage_costs(partition, repricer.schedule.placement)
        fused = recomputing(partition)
        peaks = repricer.peak_memory(costs, fused_recompute=fused)
        if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
            return scored(problem, repricer, partition)
    short = max(range(problem.devices), key=lambda d: peaks[d] - limits[d])
    raise InfeasibleError(f"Device {short} does not fit even if every layer recomputes; the split is not by memory.")


def solution(candidate: Candidate) -> Solution:
    """The candidate as a planner's answer."""
    return Solution(schedule=candidate.schedule, costs=candidate.costs, partition=candidate.partition)
