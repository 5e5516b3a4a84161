"""The problem that planners solve for a model on a cluster with fixed degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from debubble.costs import (
    DEBUBBLE,
    FSDP,
    TORCH,
    Cluster,
    Framework,
    StepTail,
    framework_of_options,
    model_units,
    with_profile,
)
from debubble.costs.analytical.option_checks import check_has_experts
from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.units import Units
from debubble.ir import DEFAULT_EFFORT, InputError, RunOptions
from debubble.models import Model
from debubble.planners.problem import ModelUnits, Problem
from debubble.plans import Plan
from debubble.search.problem import Objective
from debubble.targets.target import sparse_layers, targets

_UNNAMED: Mapping[str | None, Framework] = {None: DEBUBBLE, "debubble": DEBUBBLE, "torch": TORCH}
"""Target -> the framework whose costs are used if the options name none; FSDP for other targets."""


def problem_of(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    effort: float = DEFAULT_EFFORT,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> Problem:
    """The problem of one choice of degrees; the arguments are those of `plan`.

    Raises InputError for degrees that do not fit the model or the cluster, leave devices idle, or that the target
    rejects.
    """
    check_has_experts(model, options)
    devices = pipeline_devices(cluster, options, pipeline)
    if target is not None:
        targets[target].check(options, model, pipeline=devices)
    units = half_layers(
        model, cluster, options, pipeline=devices, profile=profile, target=target, micro_batches=micro_batches
    )
    levers = None if target is None else targets[target].levers_of(options, pipeline=devices)
    if levers is not None:
        units = levers.layers(units, sparse_layers(model))
    return Problem(
        devices=devices, micro_batches=micro_batches * options.slices, workload=ModelUnits(units), chunks=chunks,
        effort=effort, seed=seed, deadline=deadline, cache=cache, objective=objective_of(options),
        tail=StepTail(
            model=model, cluster=cluster, options=options, pipeline=devices, framework=framework_of(options, target)
        ),
        target=target,
    )  # fmt: skip


def framework_of(options: RunOptions, target: str | None) -> Framework:
    """The framework that the options name, or else the target's.

    With ZeRO-3 debubble's runtime gathers full stages, the others gather unit by unit.
    """
    return framework_of_options(options.framework, _UNNAMED.get(target, FSDP))


def framework_of_plan(plan: Plan) -> Framework:
    """The framework with which a plan's costs were made."""
    if plan.target == "torch":
        return framework_of(plan.options, plan.target)
    gathers_units = plan.options.zero >= 3 and not plan.costs.gathers
    return framework_of_options(plan.options.framework, FSDP if gathers_units else DEBUBBLE)


def units_of_plan(plan: Plan, model: Model, cluster: Cluster, *, zero: int | None = None) -> Units:
    """The analytical units of a plan's model on a cluster, optionally with another ZeRO level."""
    options = plan.options if zero is None else replace(plan.options, zero=zero)
    return model_units(
        model, cluster, options, pipeline=plan.devices, framework=framework_of_plan(plan),
        micro_batches=plan.micro_batches,
    )  # fmt: skip


def tail_seconds(plan: Plan, model: Model, cluster: Cluster) -> float:
    """Seconds of a plan's step after its pipeline, for its model on a cluster."""
    framework = framework_of_plan(plan)
    tail = StepTail(model=model, cluster=cluster, options=plan.options, pipeline=plan.devices, framework=framework)
    return tail.of_schedule(plan.schedule, plan.costs)


def half_layers(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    pipeline: int,
    profile: Mapping[str, Any] | None = None,
    target: str | None = None,
    micro_batches: int | None = None,
) -> Units:
    """The units of a model as plans list them, with the target's memory for this number of micro-batches."""
    units = model_units(
        model, cluster, options, pipeline=pipeline, framework=framework_of(options, target), micro_batches=micro_batches
    )
    levers = None if target is None else targets[target].levers_of(options, pipeline=pipeline)
    if units.on_devices and (profile is not None or levers is not None):
        raise InputError("Pipelines on devices of several types are planned without a profile and without --for.")
    if profile is not None:
        if options.slices > 1:
            raise InputError("A profile says nothing of slices of sequences: plan without the profile or the slices.")
        units = with_profile(units, profile, model=model, options=options)
    return units if levers is None else levers.half_layers(units, model, options)


def pipeline_devices(cluster: Cluster, options: RunOptions, pipeline: int | None = None) -> int:
    """The number of pipeline devices; raises InputError if the product of the degrees is not the cluster's size."""
    layout = Layout.from_options(cluster, options, pipeline)
    layout.check_all_used(options)
    return layout.pipeline


def objective_of(options: RunOptions) -> Objective:
    """The objective that planners minimize: the span with post-validation, as devices do not wait then."""
    return "span" if options.post_validation else "makespan"
