"""Every schedule of the library x partition x recomputation, chosen by simulation.

Not from a paper: the plain search that a person would do by hand, and the yardstick for the published planners.  For
each schedule and number of chunks it takes the least recomputation that fits, ranks them, and then moves units
between neighbouring stages for the best few, re-choosing the recomputation after every move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.ir import CutOffError, DebubbleError, InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.local_search import Candidate, improve, priced, repriced
from debubble.planners.problem import Problem, Solution, closest, cut
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.search.effort import FITTED, SEARCHED
from debubble.simulator import Repricer

FINALISTS = 3
"""Schedules whose partition is searched."""

RANKING = 0.5
"""Share of the effort after which no further schedule is tried, once one fits; until then, all of it."""


@dataclass(frozen=True)
class Choice:
    """One configuration to rank: a schedule by name, and how it is fitted to the problem."""

    schedule: str
    chunks: int
    split: str
    """`even` or `balanced`; fixed stages have no other."""
    to_limit: bool
    """Whether a schedule that can takes the memory limit into its order; if not, recomputation makes it fit."""


@planner("portfolio", paper="debubble's own", searches=True)
def portfolio(problem: Problem) -> Solution:
    """Try every schedule with every number of chunks, partition and recompute to fit."""
    effort = problem.begun()
    candidates: list[Candidate] = []
    reasons: list[DebubbleError] = []
    for choice in _choices(problem):
        if effort.brake.bites:
            break
        if effort.spent > (RANKING if candidates else 1.0) * problem.effort and (candidates or reasons):
            break
        effort.spend(_price(problem, choice))
        try:
            candidates.append(_fitted(problem, choice))
        except DebubbleError as error:
            reasons.append(error)
    if not candidates:
        raise CutOffError("No schedule had been fitted at the deadline.") if effort.cut_off else closest(reasons)
    candidates.sort(key=lambda c: c.time)
    best = candidates[0]
    for rank, candidate in enumerate(candidates[:FINALISTS]):
        share = effort.part(effort.left / (min(FINALISTS, len(candidates)) - rank))
        found = improve(problem, candidate, effort=share)
        best = min(best, found, key=lambda c: c.time)
    return Solution(schedule=best.schedule, costs=best.costs, partition=best.partition, cut_off=effort.cut_off)


def _choices(problem: Problem) -> list[Choice]:
    """What goes together, in the order in which it is tried: few chunks, balanced splits and plain orders first."""
    return sorted(
        (
            Choice(name, chunks, split, to_limit)
            for name, entry in schedules.items()
            for chunks in problem.chunk_choices
            if "chunks" in entry.options or entry.default_chunks == chunks
            for split in (("balanced", "even") if problem.units is not None else ("even",))
            for to_limit in ((False, True) if "memory_limit" in entry.options else (False,))
        ),
        key=lambda c: (c.split == "even", c.to_limit, c.chunks != schedules[c.schedule].default_chunks, c.chunks),
    )


def _price(problem: Problem, choice: Choice) -> float:
    """What it costs to build a schedule and to fit it; those that search in their own building take longer."""
    searches = choice.to_limit and "steps" in schedules[choice.schedule].options
    return FITTED * problem.devices * choice.chunks * problem.micro_batches + (SEARCHED if searches else 0)


def _fitted(problem: Problem, choice: Choice) -> Candidate:
    """The choice with the least recomputation that fits; raises DebubbleError if it does not."""
    if problem.costs is not None:
        costs = problem.costs if choice.to_limit else problem.costs.with_limit(None)
        return repriced(Repricer(_build(problem, choice, costs)), problem)
    assert problem.units is not None
    stages = problem.devices * choice.chunks
    counts = (even_counts if choice.split == "even" else balanced_counts)(problem.units, stages)
    # Cost-aware schedules are built for the partition without recomputation, in looped placement.
    rough = problem.units.stage_costs(cut(problem.units, counts), Placement.looped(problem.devices, choice.chunks))
    schedule = _build(problem, choice, rough if choice.to_limit else rough.with_limit(None))
    return priced(problem, Repricer(schedule), counts)


def _build(problem: Problem, choice: Choice, costs: StageCosts) -> Schedule:
    entry = schedules[choice.schedule]
    wanted: dict[str, Any] = {"chunks": choice.chunks, "objective": problem.objective}
    options = {name: value for name, value in wanted.items() if name in entry.options}
    schedule = entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=costs, **options)
    if schedule.stages != problem.devices * choice.chunks:
        raise InfeasibleError(f"It does not have {choice.chunks} chunks per device.")
    return schedule
