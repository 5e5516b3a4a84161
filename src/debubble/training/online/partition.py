"""Variants of the running plan with other partitions, and the time of moving units.

Stages, devices, micro-batches and the order of operations stay.  The measured over planned time of a stage is assumed
to hold for any units in it: that is exact if devices differ in speed, and a guess if units deviate from their planned
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.devices.speed import Speed
from debubble.costs.partition import Partition, partition_named
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InputError, Number, StageCosts
from debubble.ir.stage_costs import PER_STAGE
from debubble.planners.model_problem import half_layers
from debubble.planners.partitioning.local_search import unit_moves
from debubble.planners.plan_model import plan_again
from debubble.plans import Plan

Price = Callable[[Plan], tuple[float, float]]
"""Function that returns the bytes by which a plan exceeds its memory limit, and its step time."""

MIN_GAIN = 1e-3
"""Minimum relative gain in step time of a further move."""


def units_of(plan: Plan) -> Units | None:
    """The units of a plan's model; None for abstract costs, or if the units are unknown or cannot be priced."""
    described = plan.model_on_cluster
    if described is None:
        return None
    try:
        units = half_layers(*described, plan.options, pipeline=plan.devices, profile=plan.profile)
    except InputError:  # such as a dtype in which nothing is priced
        return None
    return units if len(units.units) == sum(plan.lengths) else None


def better_partition(plan: Plan, price: Price) -> Plan | None:
    """The plan improved by greedy moves of units, as long as they reduce the memory excess or the step time.

    A move takes a unit from one stage to another; stages in between pass one on.  The best move is made first.  None if
    no move helps, or the plan's units are not known.
    """
    units = units_of(plan)
    if units is None:
        return None
    best, best_price = plan, price(plan)
    while True:
        candidates = [repartitioned(plan, move.lengths, units=units) for move in unit_moves(best.lengths)]
        prices = [(price(candidate), candidate) for candidate in candidates if candidate is not None]
        lowest, candidate = min(prices, key=lambda one: one[0], default=(best_price, best))
        if not _better(lowest, best_price):
            return None if best is plan else best
        best, best_price = candidate, lowest


def _better(price: tuple[float, float], before: tuple[float, float]) -> bool:
    excess, seconds = price
    return excess < before[0] or (excess == before[0] and seconds < (1 - MIN_GAIN) * before[1])


def move_seconds(before: Plan, after: Plan) -> float:
    """Seconds of moving units between the stages of two plans, one pair of ranks at a time.

    Weights and optimizer states are sent over the cluster's links, slowed down like the measured messages.
    """
    units, cluster, options = units_of(after), after.cluster, after.options
    if units is None or cluster is None or before.lengths == after.lengths:
        return 0.0
    layout, speed = (
        Layout.from_options(cluster, options, after.devices),
        Speed.from_hardware(cluster.slowest, options.dtype),
    )
    size = sum(
        float(unit.static if unit.states is None else unit.states.weights + unit.states.optimizer)
        for unit, a, b in zip(units.units, _devices(before), _devices(after), strict=True)
        if a != b
    )
    computed = units.communication_between(after.schedule.placement)
    paces = [float(a / b) for a, b in zip(after.costs.communication, computed, strict=True) if a and b]
    return speed.message(size, across_nodes=layout.across_nodes) * max(1.0, mean(paces or [1.0]))


def _devices(plan: Plan) -> list[int]:
    """The device of each unit."""
    return [d for n, d in zip(plan.lengths, plan.schedule.placement.device_of, strict=True) for _ in range(n)]


def repartitioned(plan: Plan, lengths: Sequence[int], *, units: Units | None = None) -> Plan | None:
    """The plan with `lengths` units per stage; a unit that is new to a stage recomputes like the stage's other units.

    None if that changes which stages recompute, if the units are unknown, or recomputation differs between
    micro-batches.
    """
    units = units or units_of(plan)
    if units is None or plan.schedule.deeper:
        return None
    placement, hosted = plan.schedule.placement, plan.schedule.host_steps
    before = partition_named(plan.partition, units)
    after = Partition(
        [(index, dict(old_stage).get(index) or _strategy_for(units, old_stage, index)) for index, _ in stage]
        for old_stage, stage in zip(before, Partition.cut(units, lengths), strict=True)
    )
    if after.recomputing != before.recomputing:
        return None
    old, new = (units.stage_costs(partition, placement, on_host=hosted) for partition in (before, after))
    return replace(plan, partition=units.planned(after), costs=_at_pace(plan.costs, old, new))


def replanned(plan: Plan, *, effort: float) -> Plan | None:
    """The plan of `auto` for the plan's profile and placement, with the measured speed of devices.

    None if a run of the plan cannot switch to it.
    """
    if plan.profile is None:
        return None
    placement = plan.schedule.placement
    try:
        units = units_of(plan)
        answer = plan_again(plan, chunks=placement.chunks, profile=plan.profile, effort=effort)
    except DebubbleError:  # the job cannot be planned, or nothing fits
        return None
    if units is None or not answer.reorders(plan):
        return None
    old, new = (
        units.stage_costs(partition_named(p.partition, units), placement, on_host=plan.schedule.host_steps)
        for p in (plan, answer)
    )
    return replace(answer, costs=_at_pace(plan.costs, old, new))


def _strategy_for(units: Units, stage: Sequence[tuple[int, str]], new: int) -> str:
    """The strategy of a unit that is new to a stage: that of a unit of its type, or else of any unit."""
    unit = units.units[new]
    same_type = [strategy for index, strategy in stage if units.units[index].type == unit.type]
    return next((s for s in (*same_type, *(s for _, s in stage)) if s in unit.strategies), "none")


def _at_pace(measured: StageCosts, before: StageCosts, after: StageCosts) -> StageCosts:
    """The costs of other units, scaled by measured over planned costs of the running stages.

    Args:
        measured: Measured costs of the running stages.
        before: Planned costs of the running stages.
        after: Planned costs of the new stages.
    """

    def changed(name: str) -> Sequence[Number] | None:
        current: Sequence[Number] | None = getattr(measured, name)
        old, new = getattr(before, name), getattr(after, name)
        if current is None or old is None or new is None:
            return current
        return [a * c / b if b else c for a, b, c in zip(current, old, new, strict=True)]

    devices = len(after.static)
    static = [measured.static_of(d) - before.static_of(d) + after.static_of(d) for d in range(devices)]
    return measured.replace(static=static, **{name: changed(name) for name in PER_STAGE if name != "communication"})
