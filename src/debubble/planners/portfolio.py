"""Every schedule of the library x partition x recomputation, chosen by simulation.

Not from a paper: the plain search that a person would do by hand, and the yardstick for the published planners.  For
each schedule and number of chunks it takes the least recomputation that fits, ranks them, and then moves units
between neighbouring stages for the best few, re-choosing the recomputation after every move.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from debubble.ir import DebubbleError, InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.local_search import Candidate, improve, priced, repriced
from debubble.planners.partition import balanced_counts, even_counts
from debubble.planners.problem import Problem, Solution, cut
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.simulator import Repricer

FINALISTS = 3
"""Schedules whose partition is searched."""


@planner("portfolio", paper="debubble's own", searches=True)
def portfolio(problem: Problem) -> Solution:
    """Try every schedule with every number of chunks, partition and recompute to fit."""
    deadline = time.perf_counter() + problem.effort
    candidates: list[Candidate] = []
    reasons: list[str] = []
    for name, chunks in _choices(problem):
        try:
            candidates.append(_first(problem, name, chunks))
        except DebubbleError as error:
            reasons.append(f"{name}: {error}")
    if not candidates:
        raise InfeasibleError(f"No schedule fits. {reasons[0] if reasons else ''}".strip())
    candidates.sort(key=lambda c: c.makespan)
    best = candidates[0]
    if problem.units is not None:
        for rank, candidate in enumerate(candidates[:FINALISTS]):
            share = (deadline - time.perf_counter()) / (min(FINALISTS, len(candidates)) - rank)
            found = improve(problem, candidate, until=time.perf_counter() + share)
            best = min(best, found, key=lambda c: c.makespan)
    return Solution(schedule=best.schedule, costs=best.costs, partition=best.partition)


def _choices(problem: Problem) -> Iterator[tuple[str, int]]:
    """Schedules and chunks that go together; a schedule without the option has a fixed number."""
    for name, entry in schedules.items():
        for chunks in problem.chunk_choices:
            if "chunks" in entry.options or entry.default_chunks == chunks:
                yield name, chunks


def _first(problem: Problem, name: str, chunks: int) -> Candidate:
    """The schedule on fixed costs, or on the better of the even and the balanced partition."""
    if problem.costs is not None:
        return repriced(Repricer(_build(problem, name, chunks, problem.costs)), problem)
    assert problem.units is not None
    stages = problem.devices * chunks
    starts = [even_counts(problem.units, stages), balanced_counts(problem.units, stages)]
    found: list[Candidate] = []
    reason: DebubbleError | None = None
    for counts in starts:
        try:
            found.append(_on_counts(problem, counts, name=name, chunks=chunks))
        except DebubbleError as error:
            reason = error
    if not found:
        assert reason is not None
        raise reason
    return min(found, key=lambda c: c.makespan)


def _build(problem: Problem, name: str, chunks: int, costs: StageCosts) -> Schedule:
    entry = schedules[name]
    options = {"chunks": chunks} if "chunks" in entry.options else {}
    schedule = entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=costs, **options)
    if schedule.stages != problem.devices * chunks:
        raise InfeasibleError(f"It does not have {chunks} chunks per device.")
    return schedule


def _on_counts(problem: Problem, counts: Sequence[int], *, name: str, chunks: int) -> Candidate:
    """Cost-aware schedules are built for the partition without recomputation, in looped placement, unlimited."""
    assert problem.units is not None
    rough = problem.units.stage_costs(cut(problem.units, counts), Placement.looped(problem.devices, chunks))
    schedule = _build(problem, name, chunks, rough.with_limit(None))
    return priced(problem, Repricer(schedule), counts)
