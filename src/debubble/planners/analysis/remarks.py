"""The remarks on a plan: planners that failed, what its model, cluster and target leave out, and devices that idle."""

from __future__ import annotations

from debubble.costs import Cluster
from debubble.costs.analytical.operators import RECOMPUTABLE
from debubble.costs.partition import partition_named
from debubble.ir import DebubbleError, RunOptions
from debubble.models import Model
from debubble.models.runtime_limits import beyond_runtime
from debubble.models.vision import as_trained
from debubble.planners.model_problem import units_of_plan
from debubble.plans import Plan
from debubble.registry import unknown_name
from debubble.simulator import Cause, Timeline, bubbles, by_cause
from debubble.targets import targets

REMARK_BUBBLE_SHARE = 0.5
"""Share of the devices' time above which a bubble is remarked on."""

PROPORTIONAL = (
    "Micro-batches differ in length; attention within a window, and what a profile measured, is priced in proportion to"
    " their tokens, and of several replicas the one with the longest is counted."
)


def plan_remarks(plan: Plan, timeline: Timeline) -> tuple[str, ...]:
    """The remarks on a plan, whose predicted timeline this is."""
    failed = tuple(
        f"The planner '{each.planner}' failed, which is an error in its program: {each.rejected}"
        for each in plan.candidates
        if each.status == "failed" or (each.step_time is not None and each.rejected is not None)
    )
    described = plan.model_on_cluster
    if described is None:
        return (*failed, *timeline_remarks(timeline))
    model, cluster = described
    said = model_remarks(
        timeline, plan.options, model=model, cluster=cluster, profiled=plan.profile is not None, target=plan.target
    )
    if has_other_costs(plan):
        said = (OTHER_COSTS, *said)
    if plan.target is not None:
        said += targets[plan.target].untested_parts(plan.options, model, pipeline=plan.devices)
    return (*failed, PROPORTIONAL, *said) if plan.has_lengths else (*failed, *said)


OTHER_COSTS = (
    "The plan's costs are not what its partition, options and cluster cost now: it was edited, or made by another"
    " version; plan again."
)
"""Said of a plan whose file contradicts itself."""
COMPARED = ("forward", "backward_input", "backward_weight", "recompute", "activation", "activation_recomputed")
"""The costs of stages that are computed again; next to them the bytes of each device."""
COST_TOLERANCE = 0.01
"""Share by which a stage's time or memory may differ from what is computed for it."""


def has_other_costs(plan: Plan) -> bool:
    """Tell whether the stages of a model's plan would cost something else, were they computed again.

    Raises InputError for a strategy of operators that no unit of the model has.
    """
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or plan.has_lengths:
        return False
    model, cluster = described
    placement, known = plan.schedule.placement, plan.costs
    units = units_of_plan(plan, model, cluster)
    strategies = dict.fromkeys(name for unit in units.units for name in unit.strategies)
    operators = {*RECOMPUTABLE, *(operator for name in strategies for operator in name.split("+"))}
    named = {name for stage in plan.partition for unit in stage for name in unit.strategies}
    for name in sorted(named):
        if not {*name.split("+")} <= operators:
            raise unknown_name(name, strategies, kind="recomputation strategy")
    if not named <= strategies.keys():
        return True
    try:
        partition = partition_named(plan.partition, units)
    except DebubbleError:
        return True
    costs = units.stage_costs(partition, placement, on_host=plan.schedule.host_steps)
    pairs = [
        (float(old), float(new))
        for name in COMPARED
        for old, new in zip(getattr(known, name), getattr(costs, name), strict=True)
    ]
    pairs += [(float(known.static_of(device)), float(costs.static_of(device))) for device in range(plan.devices)]
    return any(abs(old - new) > COST_TOLERANCE * max(old, new) for old, new in pairs)


def model_remarks(
    timeline: Timeline,
    options: RunOptions,
    *,
    model: Model,
    cluster: Cluster,
    profiled: bool = False,
    target: str | None = None,
) -> tuple[str, ...]:
    """The remarks on a model's step on a cluster.

    Args:
        timeline: The step.
        options: How it is run.
        model: The model.
        cluster: The devices.
        profiled: True if its units were measured, not computed.
        target: The framework that it was planned for.
    """
    remarks = [
        None if profiled else as_trained(model, options).remark,
        *cluster.remarks,
        beyond_runtime(options, model) if target in (None, "debubble") else None,
    ]
    return (*(remark for remark in remarks if remark is not None), *timeline_remarks(timeline))


def timeline_remarks(timeline: Timeline) -> tuple[str, ...]:
    """A remark if devices are idle for most of the step, with what would help."""
    share = timeline.bubble_fraction
    if share <= REMARK_BUBBLE_SHARE:
        return ()
    idle = by_cause([bubble for device in bubbles(timeline) for bubble in device])
    filling = idle[Cause.WARM_UP] + idle[Cause.COOL_DOWN]
    schedule = timeline.program.schedule
    said = f"The devices are idle for {100 * share:.1f}% of the pipeline's time"
    if 2 * filling >= sum(idle.values()):
        return (
            f"{said}, mostly while it fills and drains: {schedule.micro_batches} micro-batches are few for"
            f" {schedule.devices} pipeline devices; use more micro-batches, or fewer pipeline devices with data"
            " parallelism.",
        )
    cause = max(idle, key=idle.__getitem__)
    return (f"{said}, most of it by {cause.value}: see the shares of each device.",)
