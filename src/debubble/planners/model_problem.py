"""The problem that planners solve for a model on a cluster, and one fixed configuration of such a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from debubble.costs import FSDP, MEGATRON, Cluster, Framework, StepTail, framework_of_options, model_units, with_profile
from debubble.costs.parallel_layout import Layout
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InputError, Placement, RunOptions, Schedule, StageCosts
from debubble.models import Model
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.by_layers import partition_by_layers
from debubble.planners.problem import ModelUnits, Problem
from debubble.plans import Plan
from debubble.schedules import schedules
from debubble.schedules.registry import ScheduleEntry
from debubble.search.problem import Objective
from debubble.targets.orders import COMBINED
from debubble.targets.target import sparse_layers, targets


def problem_of(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    effort: float = 10.0,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> Problem:
    """The problem of one choice of degrees; the arguments are those of `plan`.

    Raises InputError for degrees that fit neither the model nor the cluster, leave devices idle, or are refused by the
    target.
    """
    devices = pipeline_devices(cluster, options, pipeline)
    if target is not None:
        targets[target].check(options, model, pipeline=devices)
    units = half_layers(model, cluster, options, pipeline=devices, profile=profile, target=target)
    levers = None if target is None else targets[target].levers_of(options)
    if levers is not None:
        units = levers.layers(units, sparse_layers(model))
    return Problem(
        devices=devices, micro_batches=micro_batches * options.slices, workload=ModelUnits(units), chunks=chunks,
        effort=effort,
        seed=seed, deadline=deadline, cache=cache, objective=objective_of(options),
        tail=StepTail(
            model=model, cluster=cluster, options=options, pipeline=devices, framework=framework_of(options, target)
        ),
        target=target,
    )  # fmt: skip


def framework_of(options: RunOptions, target: str | None) -> Framework:
    """The framework that the options name, or else the target's.

    debubble's own runtime gathers whole stages with ZeRO-3, the others unit by unit.
    """
    return framework_of_options(options.framework, MEGATRON if target in (None, "debubble") else FSDP)


def framework_of_plan(plan: Plan) -> Framework:
    """The framework with which a plan's costs were made."""
    gathers_units = plan.options.zero >= 3 and not plan.costs.gathers
    return framework_of_options(plan.options.framework, FSDP if gathers_units else MEGATRON)


def tail_seconds(plan: Plan, model: Model, cluster: Cluster) -> float:
    """Seconds that a plan's step takes after its pipeline, of its model on a cluster."""
    framework = framework_of_plan(plan)
    tail = StepTail(model=model, cluster=cluster, options=plan.options, pipeline=plan.devices, framework=framework)
    return tail.of(plan.schedule, plan.costs)


def half_layers(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    pipeline: int,
    profile: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> Units:
    """The units in which plans list a model's stages, with the memory of the target."""
    units = model_units(model, cluster, options, pipeline=pipeline, framework=framework_of(options, target))
    levers = None if target is None else targets[target].levers_of(options)
    if units.on_devices and (profile is not None or levers is not None):
        raise InputError("Pipelines on devices of several types are planned without a profile and without --for.")
    if profile is not None:
        if options.slices > 1:
            raise InputError("A profile says nothing of slices of sequences: plan without the profile or the slices.")
        units = with_profile(units, profile, model=model, options=options)
    return units if levers is None else levers.half_layers(units, model, options)


def pipeline_devices(cluster: Cluster, options: RunOptions, pipeline: int | None = None) -> int:
    """The pipeline's length; raises InputError if the parallel degrees do not make up the cluster."""
    layout = Layout.of(cluster, options, pipeline)
    layout.check_all_used(options)
    return layout.pipeline


def objective_of(options: RunOptions) -> Objective:
    """The objective that planners minimise: the span if devices do not wait for each other's updates."""
    return "span" if options.post_validation else "makespan"


_STAGES_THAT_RECOMPUTE = frozenset({"recomputed_stages", "adjusted_stages", "recomputed_chunks"})
"""Options of schedules that say which stages recompute."""


def fixed_configuration(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    memory_limit: float | str | None = None,
    layers: Sequence[int] | None = None,
    host_chunks: int = 0,
    schedule_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Schedule, StageCosts]:
    """The schedule and stage costs of a configuration, to simulate.

    Args:
        model: The model.
        cluster: Its devices.
        schedule: A schedule's name.
        micro_batches: Micro-batches per step.
        pipeline: Pipeline devices; None: all that the other degrees leave.
        chunks: Stages per device; None: the schedule's default.
        recompute: A strategy of the model's units: none, selective, full.  It holds for every stage, or, if the
            schedule itself says which stages recompute (Obscura's family, `chronos-recomp`, 1F1B with
            `recomputed_stages`), for those alone, while the others keep everything.  None: `full` on the stages that
            the schedule names, `none` on all others.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        layers: Decoder layers of every stage; None: units are divided evenly.  They recompute alike, and what is before
            and after them nothing.
        host_chunks: Chunks of every device, the last ones, whose optimizer states and step are the host's.
        schedule_options: Options of the schedule.
        options: Those of RunOptions.

    Returns:
        The schedule, whose recomputing stages are those that were chosen, and the costs of its stages.

    Raises:
        InputError: for what does not go together.
    """
    run = RunOptions(**options)
    if run.expert_overlap and schedule != COMBINED:
        raise InputError(f"--expert-overlap is priced for the schedule '{COMBINED}' alone, not for '{schedule}'.")
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    devices = pipeline_devices(cluster, run, pipeline)
    units = model_units(model, cluster, run, pipeline=devices)
    known = sorted({name for unit in units.units for name in unit.strategies})
    if recompute is not None and recompute not in known:
        raise InputError(f"--recompute is '{recompute}'; it must be one of: {', '.join(known)}.")
    entry = schedules[schedule]
    given = {**entry.accepted_options(objective=objective_of(run)), **(schedule_options or {})}
    if run.slices > 1:
        if "slices" not in entry.options:
            raise InputError(f"The schedule '{schedule}' does not cut sequences into slices; seq1f1b does.")
        given["slices"] = run.slices
    chunks = chunks or entry.default_chunks
    if layers is not None:
        return _of_layers(model, units, layers, entry, devices, micro_batches, recompute)
    counts = even_counts(units, devices * chunks)
    can_choose = bool(_STAGES_THAT_RECOMPUTE & entry.options)
    everywhere = Partition.cut(units, counts, strategy=recompute or ("full" if can_choose else "none"))
    rough = units.stage_costs(everywhere, Placement.looped(devices, chunks))
    made = entry(devices=devices, micro_batches=micro_batches, chunks=chunks, costs=rough, **given)
    chosen = made.fused_recompute | {stage for stage, _ in made.explicit_recompute}
    nowhere = Partition.cut(units, counts)
    if chosen and recompute == "none":
        raise InputError(
            f"'{schedule}' is to recompute {len(chosen)} of its {made.stages} stages, but --recompute none leaves"
            " nothing to recompute: give --recompute full or selective, or no stages to recompute."
        )
    if chosen or _chooses(entry, given):
        partition = Partition(everywhere[s] if s in chosen else nowhere[s] for s in range(made.stages))
    else:
        partition = everywhere if recompute else nowhere
        made = replace(made, fused_recompute=partition.recomputing)
    if host_chunks and not units.hostable:
        raise InputError("--host-chunks needs a cluster with a link to the host, and no --host-optimizer.")
    hosted = made.placement.last_chunks(host_chunks)
    return made.with_host_steps(hosted), units.stage_costs(partition, made.placement, on_host=hosted)


def _of_layers(
    model: Model,
    units: Units,
    layers: Sequence[int],
    entry: ScheduleEntry,
    devices: int,
    micro_batches: int,
    recompute: str | None,
) -> tuple[Schedule, StageCosts]:
    """The schedule and stage costs of stages that are given by their layers."""
    if len(layers) % devices or sum(layers) != model.layers:
        raise InputError(
            f"--layers has {sum(layers)} layers on {len(layers)} stages; the model has {model.layers}, and its stages"
            f" are a multiple of the {devices} pipeline devices."
        )
    chosen = recompute or "none"
    partition = partition_by_layers(units, layers, dict.fromkeys(range(model.layers), (chosen, chosen)))
    chunks = len(layers) // devices
    made = entry(devices=devices, micro_batches=micro_batches, chunks=chunks if chunks > 1 else None)
    made = replace(made, fused_recompute=partition.recomputing)
    return made, units.stage_costs(partition, made.placement)


def _chooses(entry: ScheduleEntry, given: Mapping[str, Any]) -> bool:
    """Tell whether the schedule says which stages recompute: Obscura's family always does, others by an option."""
    return "adjusted_stages" in entry.options or bool(_STAGES_THAT_RECOMPUTE & given.keys())
