"""A plan whose stages end at layers' edges: what other frameworks can partition by.

debubble's units are half-layers.  Where a stage ends within a layer, the layer moves as a whole to one of the two
stages, for all such layers to the earlier or for all to the later, whichever is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from debubble.costs import Cluster, Model, Units, model_units
from debubble.costs.units import recomputing
from debubble.ir import OutOfMemoryError, Plan, PlannedUnit
from debubble.simulator import simulate

_Stages = list[list[tuple[int, str]]]
"""Per stage, its units as (index in the model, strategy)."""


def to_whole_layers(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with its layers whole, and what that costs.

    The same plan if they are whole already, if none of the two ways fits in memory, or if its costs are not the
    model's computed ones, which are all that the new stages could be judged by.
    """
    split = _split(plan.partition)
    if not split or plan.model is None or plan.cluster is None:
        return plan, ()
    model, cluster = Model.from_hf(plan.model), Cluster.from_dict(plan.cluster)
    units = model_units(model, cluster, plan.options, pipeline=plan.devices)
    stages = _indexed(plan.partition)
    if not _same_costs(plan, units, stages):
        return plan, ()
    moved = [_repartitioned(plan, units, _moved(stages, split, to)) for to in (_earlier, _later)]
    fitting = [candidate for candidate in moved if _fits(candidate)]
    if not fitting:
        return plan, ()
    best = min(fitting, key=lambda candidate: candidate.simulate().makespan)
    slowed = float(best.simulate().makespan / plan.simulate().makespan)
    count = f"{len(split)} stages end" if len(split) > 1 else "One stage ends"
    return best, (
        f"{count} within a layer; with whole layers the step is predicted to take {slowed:.3f} times as long.",
    )


def _split(partition: Sequence[Sequence[PlannedUnit]]) -> list[int]:
    """The stages that end with the attention half of a layer."""
    return [s for s, units in enumerate(partition[:-1]) if units and units[-1].type == "attention"]


def _indexed(partition: Sequence[Sequence[PlannedUnit]]) -> _Stages:
    result: _Stages = []
    first = 0
    for stage in partition:
        result.append([(first + i, unit.strategy) for i, unit in enumerate(stage)])
        first += len(stage)
    return result


def _earlier(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    before.append(after.pop(0))


def _later(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    after.insert(0, before.pop())


def _moved(
    stages: _Stages, split: Sequence[int], to: Callable[[list[tuple[int, str]], list[tuple[int, str]]], None]
) -> _Stages:
    result = [list(stage) for stage in stages]
    for stage in split:
        to(result[stage], result[stage + 1])
    return result


def _same_costs(plan: Plan, units: Units, stages: _Stages) -> bool:
    costs = units.stage_costs(stages, plan.schedule.placement)
    return (costs.forward, costs.activation, costs.static) == (
        plan.costs.forward,
        plan.costs.activation,
        plan.costs.static,
    )


def _repartitioned(plan: Plan, units: Units, stages: _Stages) -> Plan:
    explicit = {stage for stage, _ in plan.schedule.explicit_recompute}
    return replace(
        plan,
        schedule=replace(plan.schedule, fused_recompute=recomputing(stages) - explicit),
        costs=units.stage_costs(stages, plan.schedule.placement).with_limit(plan.costs.memory_limit),
        partition=units.planned(stages),
    )


def _fits(plan: Plan) -> bool:
    try:
        simulate(plan.schedule, plan.costs)
    except OutOfMemoryError:
        return False
    return True
