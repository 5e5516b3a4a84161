"""Plans whose stages have other units than those of the plan that runs, and what moving the units takes.

Stages, devices, micro-batches and the order of operations stay.  A stage is as fast, compared with what its units were
planned to take, as the run has measured, whatever units it has: that is right where devices differ, and a guess where
units take other times than planned.
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
"""Bytes by which a plan exceeds its memory limit, and the seconds of its step."""

MIN_GAIN = 1e-3
"""Share of a step by which one more move must make it faster."""


def units_of(plan: Plan) -> Units | None:
    """The units of a plan's model; None for abstract costs, and for units that are not the model's or have no price."""
    described = plan.model_on_cluster
    if described is None:
        return None
    try:
        units = half_layers(*described, plan.options, pipeline=plan.devices, profile=plan.profile)
    except InputError:  # such as a dtype in which nothing is priced
        return None
    return units if len(units.units) == sum(plan.lengths) else None


def better_partition(plan: Plan, price: Price) -> Plan | None:
    """The plan with units moved from stage to stage, as long as that makes its order fit or its step faster.

    Every move takes a unit from one stage to another: those between hand one on.  The best of all moves is made first.
    None if no move helps, or the plan's units are not known.
    """
    units = units_of(plan)
    if units is None:
        return None
    best, least = plan, price(plan)
    while True:
        others = [repartitioned(plan, move.lengths, units=units) for move in unit_moves(best.lengths)]
        prices = [(price(other), other) for other in others if other is not None]
        found, other = min(prices, key=lambda one: one[0], default=(least, best))
        if not _better(found, least):
            return None if best is plan else best
        best, least = other, found


def _better(price: tuple[float, float], before: tuple[float, float]) -> bool:
    excess, seconds = price
    return excess < before[0] or (excess == before[0] and seconds < (1 - MIN_GAIN) * before[1])


def move_seconds(before: Plan, after: Plan) -> float:
    """Seconds that moving units from one plan's stages to the other's takes: pairs of ranks take turns.

    Weights and optimizer states go over the cluster's links, which are as slow as measured messages were.
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
    paces = [float(time / own) for time, own in zip(after.costs.communication, computed, strict=True) if time and own]
    return speed.message(size, across_nodes=layout.across_nodes) * max(1.0, mean(paces or [1.0]))


def _devices(plan: Plan) -> list[int]:
    """The device of each unit."""
    return [d for n, d in zip(plan.lengths, plan.schedule.placement.device_of, strict=True) for _ in range(n)]


def repartitioned(plan: Plan, lengths: Sequence[int], *, units: Units | None = None) -> Plan | None:
    """The plan with so many units per stage.

    None if other stages would recompute then, its units are not known, or some micro-batches recompute deeper.  A unit
    that is new to a stage recomputes as the stage's others do.
    """
    units = units or units_of(plan)
    if units is None or plan.schedule.deeper:
        return None
    placement, hosted = plan.schedule.placement, plan.schedule.host_steps
    before = partition_named(plan.partition, units)
    after = Partition(
        [(index, dict(own).get(index) or _usual(units, own, index)) for index, _ in stage]
        for own, stage in zip(before, Partition.cut(units, lengths), strict=True)
    )
    if after.recomputing != before.recomputing:
        return None
    old, new = (units.stage_costs(partition, placement, on_host=hosted) for partition in (before, after))
    return replace(plan, partition=units.planned(after), costs=_at_pace(plan.costs, old, new))


def replanned(plan: Plan, *, effort: float) -> Plan | None:
    """The plan that `auto` makes with a plan's profile for its placement; devices are as fast as measured.

    None if a run of the plan cannot continue with it.
    """
    if plan.profile is None:
        return None
    placement = plan.schedule.placement
    try:
        units = units_of(plan)
        answer = plan_again(plan, chunks=placement.chunks, profile=plan.profile, effort=effort)
    except DebubbleError:  # the job cannot be planned, or nothing fits: the orders of the plan itself are searched
        return None
    if units is None or not answer.reorders(plan):
        return None
    old, new = (
        units.stage_costs(partition_named(each.partition, units), placement, on_host=plan.schedule.host_steps)
        for each in (plan, answer)
    )
    return replace(answer, costs=_at_pace(plan.costs, old, new))


def _usual(units: Units, stage: Sequence[tuple[int, str]], new: int) -> str:
    """The strategy of a unit that is new to a stage: that of one of its type, or else of any other."""
    unit = units.units[new]
    alike = [strategy for index, strategy in stage if units.units[index].type == unit.type]
    return next((s for s in (*alike, *(s for _, s in stage)) if s in unit.strategies), "none")


def _at_pace(measured: StageCosts, before: StageCosts, after: StageCosts) -> StageCosts:
    """The costs of other units, as far from what they were planned to be as the measured ones are.

    Args:
        measured: Of the stages that run.
        before: Of these, as the units have them.
        after: Of the others, as the units have them.
    """

    def changed(name: str) -> Sequence[Number] | None:
        own: Sequence[Number] | None = getattr(measured, name)
        old, new = getattr(before, name), getattr(after, name)
        if own is None or old is None or new is None:
            return own
        return [a * c / b if b else c for a, b, c in zip(own, old, new, strict=True)]

    devices = len(after.static)
    static = [measured.static_of(d) - before.static_of(d) + after.static_of(d) for d in range(devices)]
    return measured.replace(static=static, **{name: changed(name) for name in PER_STAGE if name != "communication"})
