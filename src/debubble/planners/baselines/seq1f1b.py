"""Seq1F1B: plans for sequences that are cut into slices.

Source: Ao Sun et al., Seq1F1B, NAACL 2025 (arXiv:2406.03488), whose orders are in `schedules/seq1f1b.py`.  The paper
plans neither partition nor recomputation: here every order gets the least recomputation that fits, as in `portfolio`,
and units are then moved between stages while that speeds up the step.  Slices have equally many tokens or equal work,
whichever is faster: attention makes later slices slower, and with equal work the first slices retain more bytes.  List
schedules are tried too, as slices may take different times, and small problems are ordered by the exact model.  If an
order does not fit, the last chunks get CPU optimizer steps, as few as possible.  Activations are not offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from debubble.ir import DebubbleError, InputError, Kind, Placement, Schedule
from debubble.planners.partitioning.balance import balanced_by_device, even_counts
from debubble.planners.partitioning.local_search import (
    PricedSchedule,
    improve,
    step_time,
    with_fewest_host_steps,
    with_least_recomputation,
)
from debubble.planners.problem import ModelUnits, Problem, Solution, closest
from debubble.planners.registry import SLICED, planner
from debubble.schedules import schedules
from debubble.search.constructive.slices import slice_list_schedule
from debubble.search.effort import Effort
from debubble.search.exact.cp_sat import solve
from debubble.search.problem import Incumbent, OrderProblem

FINALISTS = 2
"""Number of points whose partition is searched."""
MAX_LISTED_PAIRS, MAX_EXACT_PAIRS = 2048, 24
"""Maximum number of (stage, slice) pairs for list schedules, and for the exact model."""


class _Point(NamedTuple):
    """A priced order, and the problem with its slices."""

    problem: Problem
    priced: PricedSchedule

    @property
    def time(self) -> float:
        return step_time(self.problem, self.priced)


@planner(SLICED, paper="Seq1F1B, NAACL 2025", searches=True, slices=True)
def seq1f1b(problem: Problem) -> Iterator[Solution]:
    """1F1B, zero-bubble and interleaved 1F1B on slices of sequences, with the least recomputation that fits."""
    effort = problem.begun()
    points: list[_Point] = []
    reasons: list[DebubbleError] = []
    for cut, schedule in product(_cuts(problem), _orders(problem)):
        if effort.over and (points or reasons):
            break
        try:
            points.append(_Point(cut, _fitted(cut, schedule, effort)))
        except DebubbleError as error:
            reasons.append(error)
    if not points:
        raise closest(reasons)
    points.sort(key=lambda point: point.time)
    yield points[0].priced.solution
    finalists = points[:FINALISTS]
    for rank, (cut, priced) in enumerate(finalists):
        share = effort.split_off(effort.remaining / (len(finalists) - rank))
        points.append(_Point(cut, improve(cut, priced, effort=share)))
    best = min(points, key=lambda point: point.time)
    yield replace(_reordered(*best, effort).solution, cut_off=effort.cut_off)


def _cuts(problem: Problem) -> Iterator[Problem]:
    """The problem with slices of equally many tokens, and with slices of equal work."""
    yield problem
    if isinstance(problem.workload, ModelUnits) and problem.slices > 1:
        units = problem.workload.units
        cuts = units.cuts_of_equal_work()
        if len({0.0, *cuts}) > problem.slices:
            sliced = units.of_slices(cuts, sequences=problem.micro_batches // problem.slices)
            yield replace(problem, workload=ModelUnits(sliced))


def _orders(problem: Problem) -> Iterator[Schedule]:
    """The orders of slices, for all numbers of chunks."""
    count = problem.micro_batches // problem.slices
    for chunks in problem.chunk_choices:
        names = ("seq1f1b", "seq1f1b-zb") if chunks == 1 else ("seq1f1b-interleaved",)
        for name in names:
            options: dict[str, Any] = {} if chunks == 1 else {"chunks": chunks}
            with suppress(InputError):  # too many pairs of stage and micro-batch
                yield schedules[name](devices=problem.devices, micro_batches=count, slices=problem.slices, **options)


def _reordered(problem: Problem, point: PricedSchedule, effort: Effort) -> PricedSchedule:
    """The point with a faster order of its stages, if a list schedule or the exact model has one."""
    schedule, costs = point.schedule, point.costs
    if schedule.host_steps:
        return point
    orders = OrderProblem(
        placement=schedule.placement, micro_batches=schedule.micro_batches, costs=costs,
        objective=problem.objective, fused_recompute=schedule.fused_recompute,
    )  # fmt: skip
    starts = [schedule, *_list_schedules(problem, point)]
    is_small = schedule.stages * schedule.micro_batches <= MAX_EXACT_PAIRS
    if is_small:
        starts += [start.with_split_backwards() for start in starts]
    best: dict[bool, Incumbent] = {}
    for start in starts:
        with suppress(DebubbleError):
            incumbent = Incumbent(schedule=start, value=orders.value(start), bound=0, source="start")
            split = bool(start.split_backward)
            if split not in best or incumbent.value < best[split].value:
                best[split] = incumbent
    for split, known in [*best.items()] if is_small else ():
        # The exact model does not split fused backwards.
        for better in solve(replace(orders, split=split), known, effort=effort, seed=problem.seed):
            best[split] = better
    fastest = min(best.values(), key=lambda incumbent: incumbent.value)
    return replace(point, schedule=fastest.schedule, time=float(fastest.value))


def _list_schedules(problem: Problem, point: PricedSchedule) -> Iterator[Schedule]:
    """List schedules of a point's stages, with at least as many slices in flight as the point has."""
    schedule = point.schedule
    if schedule.stages * schedule.micro_batches > MAX_LISTED_PAIRS:
        return
    in_flight = [max(map(sum, schedule.in_flight(device, (Kind.B, Kind.I)))) for device in range(schedule.devices)]
    for more, forwards_first in product((0, 1, problem.slices, schedule.micro_batches), (False, True)):
        listed = slice_list_schedule(
            schedule.placement, schedule.micro_batches // problem.slices, point.costs,
            in_flight=[count + more for count in in_flight], forwards_first=forwards_first,
            fused_recompute=schedule.fused_recompute,
        )  # fmt: skip
        if listed is not None:
            yield listed


def _fitted(problem: Problem, schedule: Schedule, effort: Effort) -> PricedSchedule:
    """The order on the better of two splits, with the least recomputation and the fewest CPU optimizer steps that fit.

    Raises DebubbleError if it does not fit.
    """

    def fit(hosted: frozenset[int]) -> PricedSchedule:
        splits = _splits(problem, schedule.placement)
        return with_least_recomputation(problem, schedule.with_host_steps(hosted), splits, effort)

    return with_fewest_host_steps(problem, schedule.placement, fit)


def _splits(problem: Problem, placement: Placement) -> Iterator[Sequence[int]]:
    """The split balanced by the work of the average token, and the even split."""
    yield balanced_by_device(problem.units.average, placement)
    yield even_counts(problem.units, placement.stages)
