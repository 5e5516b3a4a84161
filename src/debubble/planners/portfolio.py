"""Every schedule of the library x partition x recomputation, chosen by simulation.

Not from a paper: the plain search that a person would do by hand, and the yardstick for the published planners.  For
each schedule and number of chunks it takes the least recomputation that fits, ranks them, and then moves units
between neighbouring stages for the best few, re-choosing the recomputation after every move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from debubble.costs.units import Partition
from debubble.ir import CutOffError, DebubbleError, InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule, improve, priced_stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, closest
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.search.effort import FITTED, SEARCHED
from debubble.simulator import Repricer

FINALISTS = 3
"""Schedules whose partition is searched."""

RANKING = 0.5
"""Share of the effort after which no further schedule is tried, once one fits; until then, all of it."""


@dataclass(frozen=True)
class Trial:
    """One configuration to rank: a schedule by name, and how it is fitted to the problem."""

    schedule: str
    chunks: int
    split: str
    """`even` or `balanced`; fixed stages have no other."""
    to_limit: bool
    """True if the schedule takes the memory limit into its order; if not, recomputation alone makes it fit."""


@planner("portfolio", paper="debubble's own", searches=True)
def portfolio(problem: Problem) -> Solution:
    """Try every schedule with every number of chunks, partition and recompute to fit."""
    effort = problem.begun()
    candidates: list[PricedSchedule] = []
    reasons: list[DebubbleError] = []
    for trial in _trials(problem):
        if effort.brake.bites:
            break
        if effort.spent > (RANKING if candidates else 1.0) * problem.effort and (candidates or reasons):
            break
        effort.spend(_price(problem, trial))
        try:
            candidates.append(_fitted(problem, trial))
        except DebubbleError as error:
            reasons.append(error)
    if not candidates:
        raise CutOffError("No schedule had been fitted at the deadline.") if effort.cut_off else closest(reasons)
    candidates.sort(key=lambda c: c.time)
    best = candidates[0]
    for rank, candidate in enumerate(candidates[:FINALISTS]):
        share = effort.part(effort.left / (min(FINALISTS, len(candidates)) - rank))
        improved = improve(problem, candidate, effort=share)
        best = min(best, improved, key=lambda c: c.time)
    return replace(best.solution, cut_off=effort.cut_off)


def _trials(problem: Problem) -> list[Trial]:
    """All trials that go together, in their order: few chunks, balanced splits and plain orders first."""
    return sorted(
        (
            Trial(name, chunks, split, to_limit)
            for name, entry in schedules.items()
            for chunks in problem.chunk_choices
            if "chunks" in entry.options or entry.default_chunks == chunks
            for split in (("even",) if isinstance(problem.workload, FixedStages) else ("balanced", "even"))
            for to_limit in ((False, True) if "memory_limit" in entry.options else (False,))
        ),
        key=lambda c: (c.split == "even", c.to_limit, c.chunks != schedules[c.schedule].default_chunks, c.chunks),
    )


def _price(problem: Problem, trial: Trial) -> float:
    """Effort of building a schedule and fitting it; schedules that search their own order take longer."""
    searches = trial.to_limit and "steps" in schedules[trial.schedule].options
    return FITTED * problem.devices * trial.chunks * problem.micro_batches + (SEARCHED if searches else 0)


def _fitted(problem: Problem, trial: Trial) -> PricedSchedule:
    """The trial with the least recomputation that fits; raises DebubbleError if it does not."""
    match problem.workload:
        case FixedStages(costs):
            return priced_stages(problem, Repricer(_build(problem, trial, costs)), costs)
        case ModelUnits(units):
            lengths = (even_counts if trial.split == "even" else balanced_counts)(units, problem.devices * trial.chunks)
            # Cost-aware schedules are built for the partition without recomputation, in looped placement.
            placement = Placement.looped(problem.devices, trial.chunks)
            rough = units.stage_costs(Partition.cut(units, lengths), placement)
            return PartitionSearch(problem, units, Repricer(_build(problem, trial, rough))).fitted(lengths)


def _build(problem: Problem, trial: Trial, costs: StageCosts) -> Schedule:
    """The trial's schedule, ordered for these costs."""
    costs = costs if trial.to_limit else costs.with_limit(None)
    entry = schedules[trial.schedule]
    options = entry.accepted(chunks=trial.chunks, objective=problem.objective)
    schedule = entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=costs, **options)
    if schedule.stages != problem.devices * trial.chunks:
        raise InfeasibleError(f"It does not have {trial.chunks} chunks per device.")
    return schedule
