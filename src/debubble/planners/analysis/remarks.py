"""Remarks on a plan: failed planners, limitations of its model, cluster and target, and mostly idle devices."""

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
"""Bubble fraction above which there is a remark."""

PROPORTIONAL_COSTS = (
    "Micro-batches differ in length; attention within a window, and what a profile measured, is priced in proportion to"
    " their tokens, and of several replicas the one with the longest is counted."
)


def plan_remarks(plan: Plan, timeline: Timeline) -> tuple[str, ...]:
    """The remarks on a plan and its predicted timeline."""
    failed = tuple(
        f"The planner '{candidate.planner}' failed, which is an error in its program: {candidate.rejected}"
        for candidate in plan.candidates
        if candidate.status == "failed" or (candidate.step_time is not None and candidate.rejected is not None)
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
    return (*failed, PROPORTIONAL_COSTS, *said) if plan.has_lengths else (*failed, *said)


OTHER_COSTS = (
    "The plan's costs are not what its partition, options and cluster cost now: it was edited, or made by another"
    " version; plan again."
)
"""The remark on a plan whose stored costs do not match its partition, options and cluster."""
COMPARED_COSTS = ("forward", "backward_input", "backward_weight", "recompute", "activation", "activation_recomputed")
"""The costs of stages that are compared with recomputed ones, as are the static bytes of devices."""
COST_TOLERANCE = 0.01
"""Largest relative difference between stored and recomputed costs."""


def has_other_costs(plan: Plan) -> bool:
    """Tell whether the stored costs of a model's plan differ from recomputed ones.

    Raises InputError for an unknown recomputation strategy.
    """
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or plan.has_lengths:
        return False
    model, cluster = described
    placement, planned = plan.schedule.placement, plan.costs
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
        for name in COMPARED_COSTS
        for old, new in zip(getattr(planned, name), getattr(costs, name), strict=True)
    ]
    pairs += [(float(planned.static_of(device)), float(costs.static_of(device))) for device in range(plan.devices)]
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
        timeline: The predicted step.
        options: The options of the run.
        model: The model.
        cluster: The devices.
        profiled: True if units were measured.
        target: The framework of the plan.
    """
    remarks = [
        None if profiled else as_trained(model, options).remark,
        *cluster.remarks,
        beyond_runtime(options, model) if target in (None, "debubble") else None,
    ]
    return (*(remark for remark in remarks if remark is not None), *timeline_remarks(timeline))


def timeline_remarks(timeline: Timeline) -> tuple[str, ...]:
    """A remark with a remedy if devices are idle for most of the step."""
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
