"""Seq1F1B: plans for sequences that are cut into slices.

Source: Ao Sun et al., Seq1F1B, NAACL 2025 (arXiv:2406.03488), whose orders are in `schedules/seq1f1b.py`.  The paper
plans neither partition nor recomputation: here each order takes the least recomputation that fits, as `portfolio` does,
and units are then moved between stages as long as that makes the step faster.  Nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from debubble.costs.units import Units
from debubble.ir import DebubbleError, InputError, Placement, Schedule
from debubble.planners.partitioning.balance import balanced_by_device, even_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule, improve, priced_stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, closest
from debubble.planners.registry import SLICED, planner
from debubble.schedules import schedules
from debubble.search.effort import RESIMULATED, Effort
from debubble.simulator import Repricer

FINALISTS = 2
"""Points whose partition is searched."""


@planner(SLICED, paper="Seq1F1B, NAACL 2025", searches=True, slices=True)
def seq1f1b(problem: Problem) -> Iterator[Solution]:
    """1F1B, zero-bubble and interleaved 1F1B on slices of sequences, with the least recomputation that fits."""
    if problem.slices == 1:
        raise InputError("The planner 'seq1f1b' plans slices of sequences: say how many with --slices.")
    effort = problem.begun()
    points: list[PricedSchedule] = []
    reasons: list[DebubbleError] = []
    for schedule in _orders(problem):
        if effort.over and (points or reasons):
            break
        try:
            points.append(_fitted(problem, schedule, effort))
        except DebubbleError as error:
            reasons.append(error)
    if not points:
        raise closest(reasons)
    points.sort(key=lambda point: _step_time(problem, point))
    yield points[0].solution
    finalists = points[:FINALISTS]
    improved = [
        improve(problem, point, effort=effort.part(effort.left / (len(finalists) - rank)))
        for rank, point in enumerate(finalists)
    ]
    best = min((*points, *improved), key=lambda point: _step_time(problem, point))
    yield replace(best.solution, cut_off=effort.cut_off)


def _orders(problem: Problem) -> Iterator[Schedule]:
    """The orders on slices, for all numbers of chunks."""
    whole = problem.micro_batches // problem.slices
    for chunks in problem.chunk_choices:
        names = ("seq1f1b", "seq1f1b-zb") if chunks == 1 else ("seq1f1b-interleaved",)
        for name in names:
            given: dict[str, Any] = {} if chunks == 1 else {"chunks": chunks}
            with suppress(InputError):  # too many pairs of stage and micro-batch with these chunks
                yield schedules[name](devices=problem.devices, micro_batches=whole, slices=problem.slices, **given)


def _fitted(problem: Problem, schedule: Schedule, effort: Effort) -> PricedSchedule:
    """The order on the better of two splits, with the least recomputation that fits; raises DebubbleError if none."""
    repricer = Repricer(schedule)
    try:
        match problem.workload:
            case FixedStages(costs):
                return priced_stages(problem, repricer, costs)
            case ModelUnits(units):
                return _best_split(problem, units, repricer)
    finally:
        pairs = schedule.stages * schedule.micro_batches
        effort.spend(RESIMULATED * pairs * repricer.simulations)


def _best_split(problem: Problem, units: Units, repricer: Repricer) -> PricedSchedule:
    points: list[PricedSchedule] = []
    reasons: list[DebubbleError] = []
    for lengths in _splits(units, repricer.schedule.placement):
        try:
            points.append(PartitionSearch(problem, units, repricer).fitted(lengths))
        except DebubbleError as error:
            reasons.append(error)
    if not points:
        raise closest(reasons)
    return min(points, key=lambda point: point.time)


def _splits(units: Units, placement: Placement) -> list[Sequence[int]]:
    """The split by the work of an average slice, and the even one."""
    pattern = units.attention_scale or (1,)
    longer = sum(pattern) / len(pattern) - 1
    average = units.map_units(
        lambda unit: replace(
            unit,
            forward=unit.forward + longer * unit.attention_forward,
            backward_input=unit.backward_input + longer * unit.attention_backward,
        )
    )
    return [balanced_by_device(average, placement), even_counts(units, placement.stages)]


def _step_time(problem: Problem, point: PricedSchedule) -> float:
    tail = 0 if problem.tail is None else problem.tail.of(point.schedule, point.costs)
    return point.time + float(tail)
