"""Baselines of published planners: 1F1B on fixed splits, with one rule for recomputation.

Sources:

* DAPPLE: Fan et al., PPoPP 2021 (arXiv:2007.01045); DAPPLE+ is the baseline of Obscura (USENIX ATC 2025).
* OHP-CMB and Megatron-Kwai: Yuan et al., Accelerating the Training of Large Language Models Using Efficient Activation
  Rematerialization and Optimal Hybrid Parallelism, USENIX ATC 2024.  Obscura uses the first as a baseline, ChronosPipe
  the second: compute-memory balanced checkpointing, without its activation offloading.
* Megatron-Even: Narayanan et al., Megatron-LM, SC 2021, with Megatron's `block` recomputation: the first N units of
  every stage recompute fully, with the smallest N that fits all devices, as `--recompute-num-layers` expresses it.
* Merak: Lai et al., IEEE TPDS 2023, section 4, as SCOPE compares with it: stages with spare memory skip
  recomputation, and the remaining recomputation overlaps with bubbles if the schedule has any.
* PipeDream: Narayanan et al., SOSP 2019, the partitioning of section 3.1 for one worker per stage, as SCOPE compares
  with it (its weights stashed per micro-batch are not used: all planners here flush).  It balances compute only.
* BPipe: Kim et al., ICML 2023; early stages keep activations on late ones, and, as in Obscura's comparison, recompute
  MLPs only if that does not suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from debubble.costs import Units
from debubble.costs.partition import Partition
from debubble.ir import InfeasibleError, Schedule
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule, priced_stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, peer_bandwidth
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.schedules.bpipe import bpipe as bpipe_schedule
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.simulator import Repricer


@planner("dapple", paper="DAPPLE, PPoPP 2021", plain=True)
def dapple(problem: Problem) -> Solution:
    """1F1B on the even partition, without recomputation."""
    return _even_1f1b(problem, strategy="none")


@planner("dapple+", paper="Obscura's baseline, ATC 2025", plain=True)
def dapple_plus(problem: Problem) -> Solution:
    """1F1B on the even partition, recomputing everything."""
    return _even_1f1b(problem, strategy="full")


@planner("ohp-cmb", paper="Megatron-Kwai, ATC 2024")
def ohp_cmb(problem: Problem) -> Solution:
    """1F1B on the even partition, recomputing norms, activation functions and multiplies."""
    return _even_1f1b(problem, strategy="cmb")


def _even_1f1b(problem: Problem, *, strategy: str) -> Solution:
    stages = Stages.even(problem)
    schedule = one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)
    return stages.solution(schedule, stages.named(strategy))


@planner("megatron-kwai", paper="Megatron-Kwai, ATC 2024", plain=True)
def megatron_kwai(problem: Problem) -> Solution:
    """1F1B on the even partition, all units recomputing the same operators, chosen as cheap as the limit allows."""
    reason: InfeasibleError | None = None
    for strategy in _cheap_first(problem):
        solution = _even_1f1b(problem, strategy=strategy)
        try:
            solution.simulate()
        except InfeasibleError as error:
            reason = error
            continue
        return solution
    raise InfeasibleError(f"No operators suffice: {reason}")


def _cheap_first(problem: Problem) -> list[str]:
    """The strategies' names, by the recompute time of the full model."""
    if isinstance(problem.workload, FixedStages):
        return ["none", "full"]
    units = problem.workload.units.units
    names = {name for unit in units for name in unit.strategies}

    def time(name: str) -> tuple[float, str]:
        return float(sum(unit.strategies[name].recompute for unit in units if name in unit.strategies)), name

    return ["none", *sorted(names - {"none"}, key=time)]


@planner("megatron-even", paper="Megatron-LM, SC 2021", plain=True)
def megatron_even(problem: Problem) -> Solution:
    """Equal runs of layers, the same number of fully recomputed ones on every stage."""
    return _on_megatron(problem, split=even_counts, recompute=_uniform_recomputation)


@planner("merak", paper="Merak, TPDS 2023", plain=True)
def merak(problem: Problem) -> Solution:
    """Keep the even split; every stage fully recomputes the fewest layers that make it fit."""
    return _on_megatron(problem, split=even_counts, recompute=PartitionSearch.fitted)


@planner("pipedream", paper="PipeDream, SOSP 2019", plain=True)
def pipedream(problem: Problem) -> Solution:
    """Balance the stages' compute exactly, then recompute uniformly as far as memory demands."""
    return _on_megatron(problem, split=balanced_counts, recompute=_uniform_recomputation)


def megatron_schedule(problem: Problem, chunks: int) -> Schedule:
    """1F1B, or interleaved 1F1B: the schedules that SCOPE and its baselines plan for."""
    if chunks == 1:
        return schedules["1f1b"](devices=problem.devices, micro_batches=problem.micro_batches)
    return schedules["interleaved"](devices=problem.devices, micro_batches=problem.micro_batches, chunks=chunks)


def _on_megatron(
    problem: Problem,
    *,
    split: Callable[[Units, int], list[int]],
    recompute: Callable[[PartitionSearch, list[int]], PricedSchedule],
) -> Solution:
    """Megatron's schedule on one split of the units, or on fixed stages with the fewest stages recomputed."""
    chunks = problem.chunks or 1
    repricer = Repricer(megatron_schedule(problem, chunks))
    match problem.workload:
        case FixedStages(costs):
            return priced_stages(problem, repricer, costs).solution
        case ModelUnits(units):
            search = PartitionSearch(problem, units, repricer, strategies=("full",))
            return recompute(search, split(units, problem.devices * chunks)).solution


def _uniform_recomputation(search: PartitionSearch, lengths: list[int]) -> PricedSchedule:
    """The partition with full recomputation of the first N units of every stage, with the smallest N that fits.

    Raises InfeasibleError if recomputing all units does not fit.
    """
    plain, full = (Partition.cut(search.units, lengths, strategy=name) for name in ("none", "full"))
    for number in range(max(lengths) + 1):
        partition = Partition(f[:number] + p[number:] for f, p in zip(full, plain, strict=True))
        excesses = search.excesses(partition)
        if max(excesses) <= 0:
            return search.priced(partition)
    fullest = max(range(len(excesses)), key=excesses.__getitem__)
    raise InfeasibleError(f"Device {fullest} does not fit even if every layer recomputes; the split is not by memory.")


@planner("bpipe", paper="BPipe, ICML 2023", peers=True)
def bpipe(problem: Problem) -> Solution:
    """1F1B on the even partition, early stages keeping activations on late ones; MLP recomputation only if needed."""
    keeping, recomputing = bpipe_variants(problem)
    try:
        keeping.simulate()
    except InfeasibleError:
        return recomputing
    return keeping


def bpipe_variants(problem: Problem) -> tuple[Solution, Solution]:
    """BPipe without and with MLP recomputation; fixed stages recompute entirely or not at all.

    Activations move over the link between devices.  Its bandwidth follows from the time of a message, whose size is the
    input that a fully recomputed unit keeps; fixed stages use their offload times.
    """
    stages = Stages.even(problem)
    schedule = bpipe_schedule(devices=problem.devices, micro_batches=problem.micro_batches)
    mlp = "full" if isinstance(problem.workload, FixedStages) else "mlp"
    keeping, recomputing = (
        _between_devices(problem, stages.solution(schedule, stages.named(strategy))) for strategy in ("none", mlp)
    )
    return keeping, recomputing


def _between_devices(problem: Problem, solution: Solution) -> Solution:
    """The solution with the transfer times of the link between devices."""
    costs = solution.costs
    match problem.workload:
        case FixedStages():
            if costs.offload is None:
                raise InfeasibleError("BPipe moves activations between devices; the costs have no 'offload' time.")
            return solution
        case ModelUnits(units):
            per_byte = 1 / peer_bandwidth(units) if units.communication else 0
            return replace(solution, costs=costs.replace(offload=[per_byte * a for a in costs.activation], reload=None))
