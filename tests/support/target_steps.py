"""Step time of a plan in a target that runs it unchanged."""

from __future__ import annotations

from dataclasses import replace

from debubble.costs.partition import partition_named
from debubble.ir import OutOfMemoryError
from debubble.planners.model_problem import half_layers
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan


def step_in(plan: Plan, target: str) -> float | None:
    """Seconds of a plan's step in a target that runs it unchanged; None if it does not fit in the target's memory."""
    assert plan.model_on_cluster is not None
    units = half_layers(
        *plan.model_on_cluster, plan.options, pipeline=plan.devices, profile=plan.profile, target=target,
        micro_batches=plan.micro_batches,
    )  # fmt: skip
    linked = units.offloading_modules() if plan.schedule.offloaded and units.offload_bandwidth is None else units
    costs = linked.stage_costs(
        partition_named(plan.partition, units), plan.schedule.placement, on_host=plan.schedule.host_steps
    )
    try:
        timeline = replace(plan, costs=costs).simulate()
    except OutOfMemoryError:
        return None
    return seconds_per_step(plan, timeline)
