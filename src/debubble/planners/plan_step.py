"""The step of a plan: its whole time, and bytes that go with it and that no plan counts."""

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
    """The time of a whole step: the pipeline's, and what follows it, in the unit of the plan's costs.

    Raises OutOfMemoryError if its step is not simulated already, and the plan does not fit.
    """
    return float(pipeline_time(timeline or plan.simulate(), plan.options)) + tail_of(plan)


def pipeline_time(timeline: Timeline, options: RunOptions) -> Number:
    """The pipeline's time: with post-validation the longest span, as devices wait for each other no more."""
    return timeline.makespan if objective_of(options) == "makespan" else timeline.span


def tail_of(plan: Plan) -> float:
    """Seconds that a model's step takes after its pipeline, for gradients and optimizer; 0 for abstract costs."""
    described = plan.model_on_cluster
    return 0.0 if described is None else tail_seconds(plan, *described)


def undo_bytes(plan: Plan) -> list[Number]:
    """Bytes per device of the copies that take updates back, which only a post-validated plan of a model counts.

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
    """Bytes per device of a moving average of the weights that the optimizer steps; no plan counts them."""
    master = stepped_bytes(plan.options)
    share = Fraction(master, master + moment_bytes(plan.options))
    return [copies * share for copies in undo_bytes(plan)]
