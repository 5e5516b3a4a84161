"""Remarks for the reader of a plan's figures: how they were made, what will not run, what is amiss."""

from __future__ import annotations

from debubble.costs import Cluster
from debubble.ir import Plan, RunOptions
from debubble.models import Model
from debubble.models.runtime_limits import beyond_runtime
from debubble.simulator import Cause, Timeline, bubbles, by_cause

MUCH_BUBBLE = 0.5
"""Share of the devices' time above which a bubble is remarked on."""

PROPORTIONAL = (
    "Micro-batches differ in length and are priced in proportion to their tokens, which overrates the attention of"
    " short ones; of several replicas the one with the longest is counted."
)


def plan_remarks(plan: Plan, timeline: Timeline) -> tuple[str, ...]:
    """The remarks on a plan, whose predicted timeline this is."""
    if plan.model is None or plan.cluster is None:
        return timeline_remarks(timeline)
    model, cluster = Model.from_hf(plan.model), Cluster.from_dict(plan.cluster)
    said = model_remarks(timeline, plan.options, model=model, cluster=cluster, profiled=plan.profile is not None)
    return said if plan.costs.micro_batch_scale is None else (PROPORTIONAL, *said)


def model_remarks(
    timeline: Timeline, options: RunOptions, *, model: Model, cluster: Cluster, profiled: bool = False
) -> tuple[str, ...]:
    """The remarks on a model's step on a cluster; `profiled`: its units were measured, not computed."""
    remarks = [None if profiled else model.remark, cluster.remark, beyond_runtime(options, model.config)]
    return (*(remark for remark in remarks if remark is not None), *timeline_remarks(timeline))


def timeline_remarks(timeline: Timeline) -> tuple[str, ...]:
    """A remark if devices are idle for most of the step, with what would help."""
    share = timeline.bubble_fraction
    if share <= MUCH_BUBBLE:
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
