"""The full step time of a plan, and the bytes of weight copies that plans do not count."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from debubble.argument_types import with_checked_types
from debubble.costs import Partition, model_units
from debubble.costs.step import moment_bytes, stepped_bytes
from debubble.ir import InputError, Number, RunOptions
from debubble.planners.model_problem import objective_of, tail_seconds
from debubble.plans import Plan
from debubble.simulator import Timeline


@with_checked_types()
def seconds_per_step(plan: Plan, timeline: Timeline | None = None) -> float:
    """The time of a full step, the pipeline and the work after it, in the unit of the plan's costs.

    Raises OutOfMemoryError if the plan has to be simulated and does not fit.
    """
    return float(pipeline_time(timeline or plan.simulate(), plan.options)) + tail_of(plan)


def pipeline_time(timeline: Timeline, options: RunOptions) -> Number:
    """The pipeline's time: the makespan, or with post-validation, where devices do not wait, the longest span."""
    return timeline.makespan if objective_of(options) == "makespan" else timeline.span


def tail_of(plan: Plan) -> float:
    """Seconds of a model's step after its pipeline, for gradients and optimizer; 0 for abstract costs."""
    described = plan.model_on_cluster
    return 0.0 if described is None else tail_seconds(plan, *described)


def undo_bytes(plan: Plan) -> list[Number]:
    """Bytes per device of the copies that undo an update, which only a post-validated plan of a model counts.

    Raises InputError for a plan of abstract costs.
    """
    described = plan.model_on_cluster
    if described is None:
        raise InputError("A plan of abstract costs does not say what copies of its parameters take.")
    static = []
    for counted in (False, True):
        units = model_units(*described, replace(plan.options, post_validation=counted), pipeline=plan.devices)
        partition = Partition.cut(units, plan.lengths)
        static.append(units.stage_costs(partition, plan.schedule.placement, on_host=plan.schedule.host_steps).static)
    return [more - less for less, more in zip(*static, strict=True)]


def average_bytes(plan: Plan) -> list[Number]:
    """Bytes per device of a moving average of the weights; plans do not count them."""
    master = stepped_bytes(plan.options)
    share = Fraction(master, master + moment_bytes(plan.options))
    return [copies * share for copies in undo_bytes(plan)]
