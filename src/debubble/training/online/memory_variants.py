"""Variants of the running plan with other recomputation or other offload fractions.

Stages, devices and micro-batches stay.  Sizes come from the model's units, times from the plan's measured costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from debubble.costs.partition import Partition, partition_named
from debubble.costs.units import Units
from debubble.ir import Number, StageCosts
from debubble.plans import Plan
from debubble.training.online.partition import units_of

FULL, NONE = "full", "none"


def recomputation_variants(plan: Plan) -> Iterator[Plan]:
    """Plans in which all stages, or a single one, recompute in full inside their backwards, or not at all.

    They keep the plan's order, which may now exceed the memory limit.  There are none if recomputation differs between
    micro-batches.
    """
    units = units_of(plan)
    if units is None or plan.schedule.deeper:
        return
    stages = range(plan.schedule.stages)
    for strategy in (FULL, NONE):
        for changed in ({*stages}, *({stage} for stage in stages)):
            other = _with_strategy(plan, units, changed, strategy)
            if _recomputation(other) != _recomputation(plan):
                yield other


def offload_variants(plan: Plan) -> Iterator[Plan]:
    """Plans whose offloads move full activations, or half of each."""
    if plan.costs.offload is None:
        return
    halves: Mapping[int, Number] = dict.fromkeys(range(plan.schedule.stages), 0.5)
    for fractions in ({}, halves):
        if fractions != plan.schedule.offload_fraction:
            yield replace(plan, schedule=replace(plan.schedule, offload_fraction=fractions))


def _recomputation(plan: Plan) -> tuple[object, ...]:
    return plan.partition, plan.schedule.fused_recompute, plan.schedule.explicit_recompute


def _with_strategy(plan: Plan, units: Units, changed: Collection[int], strategy: str) -> Plan:
    """The plan in which all units of the `changed` stages use one recomputation strategy."""
    before = partition_named(plan.partition, units)
    uniform = Partition.cut(units, map(len, plan.partition), strategy=strategy)
    after = Partition(uniform[s] if s in changed else stage for s, stage in enumerate(before))
    schedule = plan.schedule
    old, new = (
        units.stage_costs(partition, schedule.placement, on_host=schedule.host_steps) for partition in (before, after)
    )
    unchanged = schedule.fused_recompute.difference(changed)
    return replace(
        plan,
        partition=units.planned(after),
        costs=_reprice(plan.costs, old, new, changed),
        schedule=replace(
            schedule.without_explicit_recompute(changed),
            fused_recompute=unchanged | (after.recomputing.intersection(changed)),
            recompute_fraction={s: f for s, f in schedule.recompute_fraction.items() if s not in changed},
        ),
    )


def _reprice(measured: StageCosts, before: StageCosts, after: StageCosts, changed: Collection[int]) -> StageCosts:
    """The measured costs with the recomputation of `after` on the `changed` stages, at the measured forward speed.

    `before` and `after` are the costs of the units without and with the change.
    """

    def merged(old: Collection[Number], new: Collection[Number]) -> tuple[Number, ...]:
        return tuple(b if s in changed else a for s, (a, b) in enumerate(zip(old, new, strict=True)))

    pace = [a / b if b else 1 for a, b in zip(measured.forward, before.forward, strict=True)]
    dropped = tuple(measured.dropped_bytes(s) for s in range(measured.stages))
    workspace = measured.recompute_workspace or dropped
    new_workspace = after.recompute_workspace or ()
    return measured.replace(
        recompute=merged(measured.recompute, [a * b for a, b in zip(after.recompute, pace, strict=True)]),
        activation_recomputed=merged(measured.activation_recomputed, after.activation_recomputed),
        recompute_workspace=merged(workspace, new_workspace),
        recompute_workspace_input=merged(
            measured.recompute_workspace_input or workspace, after.recompute_workspace_input or new_workspace
        ),
    )
