"""Local search over partitions for a fixed order of operations, scored by simulation.

Every point uses the least recomputation that fits; a move shifts one or two units from one stage to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, permutations
from typing import NamedTuple

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.partitioning.recomputation import cheapest_stages, cheapest_strategies, cheapest_uniform
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, closest
from debubble.search.effort import PARTITION_SCORE_PRICE, RECOMPUTE_CHOICE_PRICE, RESIMULATION_PRICE, Effort
from debubble.simulator import Repricer
from debubble.targets.levers import TargetLevers, Uniform

MAX_REFINED_RATIO = 1.2
"""Strategies of a neighboring partition are refined if its time is below this multiple of the best time."""


@dataclass(frozen=True)
class PricedSchedule:
    """A schedule with the costs of its stages and the pipeline's time, according to the problem's objective.

    The costs are those of `partition`, which is None for fixed stages.
    """

    time: float
    schedule: Schedule
    costs: StageCosts
    partition: Partition | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Units per stage; none for fixed stages."""
        return () if self.partition is None else self.partition.lengths

    @property
    def solution(self) -> Solution:
        """The priced schedule as a planner's solution."""
        return Solution(schedule=self.schedule, costs=self.costs, partition=self.partition)


def step_time(problem: Problem, point: PricedSchedule) -> float:
    """The time of the full step: the pipeline, and the optimizer steps that follow it on devices."""
    return point.time + (0.0 if problem.tail is None else float(problem.tail.of_schedule(point.schedule, point.costs)))


def priced_stages(problem: Problem, repricer: Repricer, costs: StageCosts) -> PricedSchedule:
    """The repricer's schedule on fixed stages, with the fewest stages recomputed that fit.

    Raises InfeasibleError if recomputing all of them does not fit.
    """
    fused = cheapest_stages(repricer, costs) | repricer.schedule.fused_recompute
    time = float(problem.time_of(repricer.price(costs, fused_recompute=fused)))
    return PricedSchedule(time, replace(repricer.schedule, fused_recompute=fused), costs, None)


def with_least_recomputation(
    problem: Problem, schedule: Schedule, splits: Iterable[Sequence[int]], effort: Effort
) -> PricedSchedule:
    """A schedule with the least recomputation, on fixed stages or on the best of these splits (units per stage).

    Raises DebubbleError if none fits.
    """
    repricer = Repricer(schedule)
    points: list[PricedSchedule] = []
    reasons: list[DebubbleError] = []
    try:
        match problem.workload:
            case FixedStages(costs):
                return priced_stages(problem, repricer, costs)
            case ModelUnits(units):
                search = PartitionSearch(problem, units, repricer)
        for lengths in splits:
            try:
                points.append(search.fitted(lengths))
            except DebubbleError as error:
                reasons.append(error)
    finally:
        effort.spend(RESIMULATION_PRICE * schedule.stages * schedule.micro_batches * repricer.simulations)
    if not points:
        raise closest(reasons)
    return min(points, key=lambda point: point.time)


def with_fewest_host_steps(
    problem: Problem, placement: Placement, fit: Callable[[frozenset[int]], PricedSchedule]
) -> PricedSchedule:
    """The first fitting result of `fit`, without CPU optimizer, then with it for more and more stages.

    Raises the InfeasibleError of the attempt without CPU optimizer if nothing fits.
    """
    try:
        return fit(frozenset())
    except InfeasibleError:
        for hosted in problem.host_step_choices(placement):
            with suppress(InfeasibleError):
                return fit(hosted)
        raise


def improve(problem: Problem, start: PricedSchedule, *, effort: Effort) -> PricedSchedule:
    """Move units between stages, then change their strategies, while that speeds up the step and effort remains.

    Returns the start if nothing helps, if its stages are fixed or if it offloads.
    """
    if start.partition is None or start.schedule.offloaded or not isinstance(problem.workload, ModelUnits):
        return start
    return PartitionSearch(problem, problem.workload.units, Repricer(start.schedule)).improve(start, effort)


@dataclass(frozen=True)
class PartitionSearch:
    """Local search over partitions of a model's units for the repricer's order of operations.

    `strategies` are the names of strategies that units may use in addition to `none`; None: all.
    """

    problem: Problem
    units: Units
    repricer: Repricer
    strategies: Sequence[str] | None = None

    def fitted(self, lengths: Sequence[int]) -> PricedSchedule:
        """The partition of these lengths with the least recomputation, priced.  Raises InfeasibleError if none fits."""
        return self.priced(self._cheapest(lengths))

    def priced(self, partition: Partition) -> PricedSchedule:
        """The priced partition; memory limits are not checked."""
        schedule, costs = self.repricer.schedule, self._costs(partition)
        price = self.repricer.price(costs, fused_recompute=partition.recomputing)
        time = float(self.problem.time_of(price))
        return PricedSchedule(time, replace(schedule, fused_recompute=partition.recomputing), costs, partition)

    def excesses(self, partition: Partition) -> list[float]:
        """Per device, bytes by which a partition's peak exceeds the limit; at most 0 where it fits."""
        peaks = self.repricer.peak_memory(self._costs(partition), fused_recompute=partition.recomputing)
        return [float(peak) - limit for peak, limit in zip(peaks, self.problem.limits, strict=True)]

    def _cheapest(self, lengths: Sequence[int]) -> Partition:
        """The partition with the least recomputation that fits; raises InfeasibleError if none does."""
        if self._uniform is not None:
            return cheapest_uniform(self.repricer, self.units, lengths, self._uniform)
        return cheapest_strategies(self.repricer, self.units, lengths, self.strategies)

    @property
    def _uniform(self) -> TargetLevers | None:
        """The target's levers, if they require the same recomputation of all layers."""
        levers = self.problem.levers
        return levers if levers is not None and isinstance(levers.recomputation, Uniform) else None

    def _costs(self, partition: Partition) -> StageCosts:
        schedule = self.repricer.schedule
        return self.units.stage_costs(partition, schedule.placement, on_host=schedule.host_steps)

    def improve(self, start: PricedSchedule, effort: Effort) -> PricedSchedule:
        """The fastest point that moves of units and changes of strategies reach from `start`."""
        best = self._move_units(start, effort)
        if self._uniform is not None:
            return best
        fine = self.refine(best, effort)
        for lengths in _neighbours(best.lengths, _load(best)):
            if effort.over:
                break
            neighbour = self._neighbour(lengths, effort)
            if neighbour is not None and neighbour.time < fine.time * MAX_REFINED_RATIO:
                fine = min(fine, self.refine(neighbour, effort), key=lambda point: point.time)
        return fine

    def refine(self, start: PricedSchedule, effort: Effort) -> PricedSchedule:
        """Change the strategies of one unit, or of two on the same device, while that speeds up the step.

        This improves on the greedy choice by time per byte, which is inexact because units are indivisible.
        """
        best, improved = start, True
        while improved:
            improved = False
            for changed in self._other_strategies(best):
                if effort.over:
                    return best
                with self._spending(effort, PARTITION_SCORE_PRICE):
                    point = self.priced(changed)
                    better = point.time < best.time and max(self.excesses(changed)) <= 0
                if better:
                    best, improved = point, True
                    break
        return best

    def _move_units(self, start: PricedSchedule, effort: Effort) -> PricedSchedule:
        best, improved = start, True
        tried = {start.lengths}
        while improved:
            improved = False
            for lengths in _neighbours(best.lengths, _load(best)):
                if lengths in tried:
                    continue
                if effort.over:
                    return best
                tried.add(lengths)
                neighbour = self._neighbour(lengths, effort)
                if neighbour is not None and neighbour.time < best.time:
                    best, improved = neighbour, True
                    break
        return best

    def _neighbour(self, lengths: Sequence[int], effort: Effort) -> PricedSchedule | None:
        """The cheapest partition of these lengths with its price; None if it does not fit."""
        with self._spending(effort, RECOMPUTE_CHOICE_PRICE):
            try:
                return self.fitted(lengths)
            except InfeasibleError:
                return None

    @contextmanager
    def _spending(self, effort: Effort, price: tuple[float, float]) -> Iterator[None]:
        """Spend effort on the enclosed work: `price`, and the simulations that the repricer runs."""
        schedule, before = self.repricer.schedule, self.repricer.simulations
        pairs = schedule.stages * schedule.micro_batches
        try:
            yield
        finally:
            simulations = self.repricer.simulations - before
            effort.spend(price[0] + price[1] * pairs + simulations * RESIMULATION_PRICE * pairs)

    def _other_strategies(self, point: PricedSchedule) -> Iterator[Partition]:
        """Partitions that differ in the strategy of one unit, or of two units on the same device."""
        assert point.partition is not None
        partition = point.partition
        for stages in self.repricer.schedule.placement.stages_of:
            changes = [
                (stage, position, name)
                for stage in stages
                for position, (index, strategy) in self._representatives(partition[stage])
                for name in self.units.units[index].strategies
                if name != strategy
            ]
            for chosen in chain(((change,) for change in changes), combinations(changes, 2)):
                changed = [list(stage) for stage in partition]
                for stage, position, name in chosen:
                    changed[stage][position] = (changed[stage][position][0], name)
                yield Partition(changed)

    def _representatives(self, stage: Sequence[tuple[int, str]]) -> list[tuple[int, tuple[int, str]]]:
        """One unit per type and strategy, with its position in the stage, as equal units are interchangeable."""
        units = self.units.units
        by_kind = {(units[unit[0]].type, unit[1]): (position, unit) for position, unit in enumerate(stage)}
        return list(by_kind.values())


def loads(costs: StageCosts, placement: Placement, fused_recompute: Collection[int] = ()) -> list[float]:
    """Per device, its busy time per micro-batch, in the costs' unit, if these stages recompute."""
    return [
        sum(float(costs.work(s)) + (float(costs.recompute[s]) if s in fused_recompute else 0.0) for s in stages)
        for stages in placement.stages_of
    ]


def _load(candidate: PricedSchedule) -> list[float]:
    """Per stage, its device's busy time per micro-batch, recomputation included."""
    schedule = candidate.schedule
    by_device = loads(candidate.costs, schedule.placement, schedule.fused_recompute)
    return [by_device[d] for d in schedule.placement.device_of]


def _neighbours(lengths: Sequence[int], load: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Lengths after moves of one unit, then of two; moves from the busiest to the idlest devices first."""
    for units in (1, 2):
        moves = sorted(unit_moves(lengths, units), key=lambda move: load[move.taker] - load[move.giver])
        yield from (move.lengths for move in moves)


class UnitMove(NamedTuple):
    """A move of units from one stage to another, and the units per stage after it."""

    giver: int
    taker: int
    lengths: tuple[int, ...]


def unit_moves(lengths: Sequence[int], units: int = 1) -> Iterator[UnitMove]:
    """Every move of this many units between two stages that leaves at least one unit in each stage."""
    for giver, taker in permutations(range(len(lengths)), 2):
        if lengths[giver] > units:
            moved = tuple(n + units * ((s == taker) - (s == giver)) for s, n in enumerate(lengths))
            yield UnitMove(giver, taker, moved)
