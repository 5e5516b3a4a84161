"""SCOPE: one integer program over stages, chunks, layer types and recomputation.

Source: Wang et al., SCOPE, DPEXA 2025 (a poster).  Symbols: P = devices, C = chunks, mu = micro-batches, D_M = memory
limit, x = stage (our device), c = chunk, t = layer type, r = recomputation strategy, S* = the partition.
Our reading of what the poster leaves undefined is in `integer_program.py`.  "dual" and "tri" are read as the strategies
{none, full} and {none, selective, full}; the default is every strategy on the Pareto front of (time, bytes).

Beyond the poster, the program's assignments are simulated, and a local search continues from the best ones, because
formula and simulation can disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from debubble.ir import CutOffError, DebubbleError, InfeasibleError, SolverError
from debubble.papers.scope.instance import layer_types, partition_of_layers
from debubble.papers.scope.integer_program import ProgramAnswer, solve
from debubble.planners.baselines.even_splits import megatron_schedule
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule, improve, priced_stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import planner, planners
from debubble.search.effort import Effort
from debubble.simulator import Repricer

DUAL = ("full",)
TRI = ("selective", "full")
BASELINES = ("megatron-even", "pipedream", "merak", "adapipe")
"""Baseline planners, whose plans are candidates too, so that SCOPE is never worse."""
PROGRAM_SHARE = 0.5
"""Fraction of the effort for the integer programs; the rest goes to the local search."""
MAX_FINALISTS = 3
"""Number of candidates that the local search starts from."""


@planner("scope", paper="SCOPE, DPEXA 2025", searches=True, plain=True)
def scope(problem: Problem) -> Solution:
    """Assign layers with their strategies to stages and chunks by an integer program and a simulated local search."""
    effort = problem.begun()
    choices = problem.chunk_choices
    program_effort = effort.split_off(PROGRAM_SHARE * problem.effort)
    candidates: list[PricedSchedule] = []
    reasons: list[str] = []
    gaps: list[str] = []
    for remaining, chunks in zip(range(len(choices), 0, -1), choices, strict=True):
        try:
            answer = _solve_program(problem, chunks, program_effort.split_off(program_effort.remaining / remaining))
            candidates += _simulated_candidates(problem, chunks, answer)
        except (InfeasibleError, SolverError) as error:
            reasons.append(str(error))
        else:
            if answer is not None:
                gaps.append(f"{100 * answer.gap:.2f}% with {chunks} chunk{'s' if chunks > 1 else ''}")
    candidates += _baselines(problem)
    if not candidates:
        raise CutOffError(reasons[0]) if effort.cut_off else InfeasibleError(reasons[0])
    candidates.sort(key=lambda candidate: candidate.time)
    best = candidates[0]
    finalists = candidates[:MAX_FINALISTS]
    for remaining, candidate in zip(range(len(finalists), 0, -1), finalists, strict=True):
        improved = improve(problem, candidate, effort=effort.split_off(effort.remaining / remaining))
        best = min(best, improved, key=lambda c: c.time)
    return replace(best.solution, remark=_remark(gaps, reasons), cut_off=effort.cut_off)


def _remark(gaps: Sequence[str], reasons: Sequence[str]) -> str | None:
    """The plan's remark on the integer program: its gaps or its error; None for fixed stages."""
    if gaps:
        return f"its integer program is solved to within {', '.join(gaps)}"
    return f"its integer program has no answer.  {reasons[0]}" if reasons else None


def _baselines(problem: Problem) -> list[PricedSchedule]:
    """The baselines' plans, simulated; a baseline without a plan is left out."""
    candidates = []
    for name in BASELINES:
        with suppress(DebubbleError):
            result = planners[name](problem)
            answer = result.solution
            time = float(problem.time_of(result.timeline))
            candidates.append(PricedSchedule(time, answer.schedule, answer.costs, answer.partition))
    return candidates


def _solve_program(problem: Problem, chunks: int, effort: Effort) -> ProgramAnswer | None:
    """Solve the integer program for a number of chunks; None for fixed stages."""
    if isinstance(problem.workload, FixedStages):
        return None
    units = problem.workload.units
    schedule = megatron_schedule(problem, chunks)
    types = layer_types(units)
    if sum(layer_type.count for layer_type in types) < schedule.stages:
        raise InfeasibleError(f"The model has too few layers for {schedule.stages} stages; use fewer chunks.")
    return solve(types, schedule, limits=problem.limits, static=float(units.static), effort=effort, seed=problem.seed)


def _simulated_candidates(problem: Problem, chunks: int, answer: ProgramAnswer | None) -> list[PricedSchedule]:
    """The program's plan, and plans with minimal recomputation on its, an even and a balanced partition, simulated."""
    repricer = Repricer(megatron_schedule(problem, chunks))
    match problem.workload:
        case FixedStages(costs):
            return [priced_stages(problem, repricer, costs)]
        case ModelUnits(units):
            search = PartitionSearch(problem, units, repricer)
    assert answer is not None, "units are assigned"
    partition = partition_of_layers(layer_types(units), answer.layers)
    candidates = [search.priced(partition)]
    stages = repricer.schedule.stages
    for lengths in (partition.lengths, even_counts(units, stages), balanced_counts(units, stages)):
        with suppress(InfeasibleError):
            candidates.append(search.fitted(lengths))
    return candidates
