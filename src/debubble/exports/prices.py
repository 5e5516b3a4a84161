"""Changes to a plan that targets require, and the step that the plan's model units predict for them.

Other frameworks partition by whole layers, but debubble's units are half-layers.  Where a stage ends within a layer,
the layer moves as a whole to one of the two stages, for all such layers to the earlier or for all to the later,
whichever is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from debubble.costs import Partition, Units, model_units, with_profile
from debubble.costs.frameworks import FSDP, MEGATRON, Framework, framework_of_options
from debubble.costs.partition import partition_named
from debubble.ir import OutOfMemoryError, PlannedUnit, RunOptions
from debubble.planners.model_problem import framework_of_plan
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import simulate
from debubble.targets import Target
from debubble.targets.offload import ModuleOffload
from debubble.targets.orders import undivided
from debubble.targets.target import sparse_layers


def units_of(plan: Plan) -> Units | None:
    """The model units that make the plan's costs; None if the plan was made from other costs."""
    units = _units(plan, plan.options)
    if units is None:
        return None
    partition, schedule = partition_named(plan.partition, units), plan.schedule
    costs = units.stage_costs(partition, schedule.placement, on_host=schedule.host_steps)
    same = all(
        getattr(costs, name) == getattr(plan.costs, name)
        for name in ("forward", "recompute", "activation", "activation_recomputed", "static")
    )
    return units if same else None


def with_options(plan: Plan, options: RunOptions) -> Plan | None:
    """The plan run with other options, all optimizer states on the devices; None if its costs cannot say."""
    if units_of(plan) is None:
        return None
    units = _units(plan, options)
    assert units is not None
    return with_partition(replace(plan, options=options), units, partition_named(plan.partition, units))


def with_partition(plan: Plan, units: Units, partition: Partition) -> Plan:
    """The plan with another partition, whose stages recompute in their backward what their units' strategies say."""
    explicit = {stage for stage, _ in plan.schedule.explicit_recompute}
    return replace(
        plan,
        schedule=replace(plan.schedule, fused_recompute=partition.recomputing - explicit),
        costs=units.stage_costs(partition, plan.schedule.placement).with_limit(plan.costs.memory_limit),
        partition=units.planned(partition),
    )


def as_one_stage(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """A plan that accumulates gradients on one device as one of a single stage, and what that costs.

    Frameworks gather what ZeRO-3 divides unit by unit.  The same plan if it is another, or if that would not fit.
    """
    schedule = undivided(plan.schedule)
    if schedule is plan.schedule or units_of(plan) is None:
        return plan, ()
    o = plan.options
    units = _units(plan, o, framework_of_options(o.framework, FSDP if o.zero >= 3 else MEGATRON))
    assert units is not None
    one_stage = [sum(plan.partition, ())]
    one = with_partition(replace(plan, schedule=schedule), units, partition_named(one_stage, units))
    if not fits(one):
        return plan, ()
    if not changes_step(one, plan):
        return one, ()
    count = plan.schedule.stages
    return one, (f"Parameters are gathered unit by unit, not in the plan's {count} stages: {slowdown(one, plan)}.",)


def fits(plan: Plan) -> bool:
    """Tell whether the plan stays within its memory limit."""
    try:
        simulate(plan.schedule, plan.costs)
    except OutOfMemoryError:
        return False
    return True


MIN_CHANGE = 0.002
"""Smallest relative change of the step that is reported."""


def changes_step(changed: Plan, plan: Plan) -> bool:
    """Tell whether a change makes the step longer or shorter by more than MIN_CHANGE."""
    return abs(seconds_per_step(changed) / seconds_per_step(plan) - 1) > MIN_CHANGE


_TIMES = "times as long"


def slowdown(changed: Plan, plan: Plan) -> str:
    """The slowdown by a change, as the end of a sentence."""
    return f"the step is predicted to take {seconds_per_step(changed) / seconds_per_step(plan):.3f} {_TIMES}"


def tells_slowdown(sentence: str) -> bool:
    """Tell whether a sentence ends with a `slowdown`."""
    return _TIMES in sentence


def _units(plan: Plan, options: RunOptions, framework: Framework | None = None) -> Units | None:
    """The plan's model units under these options, with another framework's kernels where one is given."""
    described = plan.model_on_cluster
    if described is None:
        return None
    framework = framework or framework_of_plan(replace(plan, options=options))
    units = model_units(
        *described,
        options,
        pipeline=plan.devices,
        framework=framework,
        micro_batches=plan.micro_batches,
    )
    if plan.profile is not None:
        units = with_profile(units, plan.profile, model=described.model, options=options)
    return units if len(units.units) == sum(map(len, plan.partition)) else None


def to_whole_layers(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with its layers whole, and what that costs.

    The same plan if they are whole already, if none of the two ways fits in memory, or if its costs are not those of
    model units, which are all that the new stages could be judged by.
    """
    split = split_stages(plan.partition)
    units = units_of(plan) if split else None
    if units is None:
        return plan, ()
    partition = partition_named(plan.partition, units)
    partitions = [_with_whole_layers(partition, split, earlier=earlier) for earlier in (True, False)]
    fitting = [moved for layers in partitions if fits(moved := with_partition(plan, units, layers))]
    if not fitting:
        return plan, ()
    best = min(fitting, key=seconds_per_step)
    count = f"{len(split)} stages end" if len(split) > 1 else "One stage ends"
    return best, (f"{count} within a layer; with whole layers {slowdown(best, plan)}.",)


def split_stages(partition: Sequence[Sequence[PlannedUnit]]) -> list[int]:
    """The stages that end with the attention half of a layer."""
    return [s for s, units in enumerate(partition[:-1]) if units and units[-1].type == "attention"]


def _with_whole_layers(partition: Partition, split: Sequence[int], *, earlier: bool) -> Partition:
    """The partition with the layers at the ends of these stages whole, in the earlier stage or in the later one."""
    stages = [list(stage) for stage in partition]
    for stage in split:
        before, after = stages[stage], stages[stage + 1]
        if earlier:
            before.append(after.pop(0))
        else:
            after.insert(0, before.pop())
    return Partition(stages)


def module_offload(plan: Plan, target: Target) -> ModuleOffload | None:
    """The target's setting that moves what a plan moves; None: it moves nothing, or the target cannot move that."""
    units, levers = units_of(plan), target.levers_of(plan.options, pipeline=plan.devices)
    model = plan.model
    if units is None or levers is None or model is None or not plan.schedule.offloaded:
        return None
    if not levers.expresses(plan.partition, sparse_layers(model)):
        return None
    halves = levers.half_layers(units, model, plan.options)
    return levers.offload_of(plan.schedule, halves, partition_named(plan.partition, units))
