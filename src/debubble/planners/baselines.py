"""1F1B planners that published planners compare themselves with: fixed splits, recomputation by one rule.

Sources:

* DAPPLE: Fan et al., PPoPP 2021 (arXiv:2007.01045); DAPPLE+ is the baseline of Obscura (USENIX ATC 2025).
* OHP-CMB and Megatron-Kwai: Yuan et al., Accelerating the Training of Large Language Models Using Efficient Activation
  Rematerialization and Optimal Hybrid Parallelism, USENIX ATC 2024.  Obscura uses the first as a baseline, ChronosPipe
  the second: compute-memory balanced checkpointing, without its activation offloading.
* Megatron-Even: Narayanan et al., Megatron-LM, SC 2021, with Megatron's `block` recomputation: the first N units of
  every stage recompute fully, N the least that fits all devices, as `--recompute-num-layers` can express it.
* Merak: Lai et al., IEEE TPDS 2023, section 4, as SCOPE compares with it: stages that have memory to spare skip
  recomputation, and what remains falls into bubbles where the schedule has them.
* PipeDream: Narayanan et al., SOSP 2019, the partitioning of section 3.1 for one worker per stage, as SCOPE compares
  with it (its weights stashed per micro-batch are not used: all planners here flush).  It balances compute only.
"""

from __future__ import annotations

from debubble.costs.units import Partition, recomputing
from debubble.ir import InfeasibleError
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.partitioning.local_search import Candidate, priced, repriced, scored
from debubble.planners.problem import Problem, Solution, cut
from debubble.planners.registry import planner
from debubble.planners.scope.planner import megatron_schedule
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.simulator import Repricer, simulate


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


@planner("ohp-cmb", paper="Megatron-Kwai, ATC 2024")
def ohp_cmb(problem: Problem) -> Solution:
    """1F1B on the even partition, recomputing norms, activation functions and multiplies."""
    return even_1f1b(problem, strategy="cmb")


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


@planner("merak", paper="Merak, TPDS 2023")
def merak(problem: Problem) -> Solution:
    """Keep the even split; every stage fully recomputes the fewest layers that make it fit."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    if problem.units is None:
        return solution(repriced(repricer, problem))
    counts = even_counts(problem.units, problem.devices * chunks)
    return solution(priced(problem, repricer, counts, ("full",)))


@planner("pipedream", paper="PipeDream, SOSP 2019")
def pipedream(problem: Problem) -> Solution:
    """Balance the stages' compute exactly, then recompute uniformly as far as memory demands."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    if problem.units is None:
        return solution(repriced(repricer, problem))
    counts = balanced_counts(problem.units, problem.devices * chunks)
    return solution(uniformly_recomputed(problem, repricer, counts))
