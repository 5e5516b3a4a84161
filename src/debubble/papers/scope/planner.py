"""SCOPE: one integer program over stages, chunks, layer types and recomputation.

Source: Wang et al., SCOPE, DPEXA 2025 (a poster).  Symbols: P = devices, C = chunks, mu = micro-batches, D_M = memory
limit, x = device, c = chunk, t = a run of equal layers, r = recomputation strategy.  What the poster leaves open is
stated in `program/monolithic.py`.  "dual" and "tri" are read as two strategies {none, full} and three {none, selective,
full}; by default every strategy on the Pareto front of (time, bytes) takes part.

Two weaknesses of formula-based planners are corrected: answers are re-scored by simulation of the lowered Program, and
a local search goes on from them wherever simulation and formula disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from debubble.ir import CutOffError, DebubbleError, InfeasibleError, SolverError
from debubble.papers.scope.program.layer_types import layer_runs, partition_of_layers
from debubble.papers.scope.program.monolithic import ProgramAnswer, solve
from debubble.planners.baselines import megatron_schedule
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule, improve, priced_stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import planner, planners
from debubble.search.effort import Effort
from debubble.simulator import Repricer

DUAL = ("full",)
TRI = ("selective", "full")

FINALISTS = 3
"""Answers from which the local search goes on."""


@planner("scope", paper="SCOPE, DPEXA 2025", searches=True)
def scope(problem: Problem) -> Solution:
    """Assign layers with their strategies to stages and chunks by an integer program, re-scored by simulation."""
    return plan(problem)


def plan(problem: Problem, *, strategies: Sequence[str] | None = None, polish: bool = True) -> Solution:
    """SCOPE with a restricted set of strategies beside `none`, and with or without the local search."""
    effort = problem.begun()
    choices = problem.chunk_choices
    program_effort = effort.part(problem.effort * (0.5 if polish else 1.0))
    candidates: list[PricedSchedule] = []
    reasons: list[str] = []
    gaps: list[str] = []
    for left, chunks in zip(range(len(choices), 0, -1), choices, strict=True):
        try:
            answers = _answers(problem, chunks, strategies, effort=program_effort.part(program_effort.left / left))
            candidates += _simulated(problem, chunks, strategies, answers, polish=polish)
            gaps += _gaps(chunks, answers)
        except (InfeasibleError, SolverError) as error:
            reasons.append(str(error))
    if polish:
        candidates += _baselines(problem, strategies)
    if not candidates:
        raise CutOffError(reasons[0]) if effort.cut_off else InfeasibleError(reasons[0])
    candidates.sort(key=lambda c: c.time)
    best = candidates[0]
    if polish:
        finalists = candidates[:FINALISTS]
        for left, candidate in zip(range(len(finalists), 0, -1), finalists, strict=True):
            again = improve(problem, candidate, effort=effort.part(effort.left / left), strategies=strategies)
            best = min(best, again, key=lambda c: c.time)
    return replace(best.solution, remark=_remark(gaps, reasons), cut_off=effort.cut_off)


def _remark(gaps: Sequence[str], reasons: Sequence[str]) -> str | None:
    """How far the integer program was solved, or why it has no answer; None where there are no units to assign."""
    if gaps:
        return f"its integer program is solved to within {', '.join(gaps)}"
    return f"its integer program has no answer.  {reasons[0]}" if reasons else None


BASELINES = ("megatron-even", "pipedream", "merak", "adapipe")
"""Planners restricted to one axis each; SCOPE starts from their answers too, so that it is never worse."""


def _baselines(problem: Problem, strategies: Sequence[str] | None) -> list[PricedSchedule]:
    """The baselines' answers; AdaPipe's only if every strategy is allowed, as the others use none but `full`."""
    candidates = []
    for name in BASELINES if strategies is None else BASELINES[:-1]:
        try:
            result = planners[name](problem)
        except DebubbleError:
            continue
        answer = result.solution
        pipeline_time = float(problem.time_of(result.timeline))
        candidates.append(PricedSchedule(pipeline_time, answer.schedule, answer.costs, answer.partition))
    return candidates


def _answers(problem: Problem, chunks: int, strategies: Sequence[str] | None, *, effort: Effort) -> list[ProgramAnswer]:
    """The integer program's answers, pooled and per chunk; none if there are no units to place."""
    if isinstance(problem.workload, FixedStages):
        return []
    units = problem.workload.units
    schedule = megatron_schedule(problem, chunks)
    runs = layer_runs(units, strategies)
    if sum(run.count for run in runs) < schedule.stages:
        raise InfeasibleError(f"The model has too few layers for {schedule.stages} stages; use fewer chunks.")
    return list(
        solve(
            runs, schedule, limits=problem.limits, static=float(units.static), effort=effort,
            seed=problem.seed,
        )
    )  # fmt: skip


def _gaps(chunks: int, answers: Sequence[ProgramAnswer]) -> list[str]:
    """The gap of each reading's answer to its program's optimum, as a phrase."""
    readings = ("", " and max T per chunk")
    return [
        f"{100 * answer.gap:.2f}% with {chunks} chunk{'s' if chunks > 1 else ''}{reading}"
        for reading, answer in zip(readings, answers, strict=False)
    ]


def _simulated(
    problem: Problem, chunks: int, strategies: Sequence[str] | None, answers: Sequence[ProgramAnswer], *, polish: bool
) -> list[PricedSchedule]:
    """The program's answers, simulated; with `polish` also the least recomputation on good partitions."""
    repricer = Repricer(megatron_schedule(problem, chunks))
    match problem.workload:
        case FixedStages(costs):
            return [priced_stages(problem, repricer, costs)]
        case ModelUnits(units):
            search = PartitionSearch(problem, units, repricer, strategies)
    runs = layer_runs(units, strategies)
    partitions = [partition_of_layers(runs, answer.layers) for answer in answers]
    candidates = [search.priced(partition) for partition in partitions]
    if polish:
        stages = repricer.schedule.stages
        splits = (even_counts(units, stages), balanced_counts(units, stages))
        for lengths in (*(partition.lengths for partition in partitions), *splits):
            with suppress(InfeasibleError):
                candidates.append(search.fitted(lengths))
    return candidates
