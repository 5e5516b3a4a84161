"""The plan of a complete configuration: a schedule, its stages, and their recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from debubble.costs import Cluster
from debubble.costs.partition import Partition
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.model_problem import problem_of
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.by_layers import partition_by_layers
from debubble.planners.problem import Problem
from debubble.plans import BY_HAND, ModelOnCluster, Plan
from debubble.schedules import schedules
from debubble.schedules.registry import ScheduleEntry
from debubble.targets.orders import COMBINED

_RECOMPUTE_OPTIONS = frozenset({"recomputed_stages", "adjusted_stages", "recomputed_chunks"})
"""Options of schedules that select the stages that recompute."""


def fixed_plan(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str | Schedule,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    recompute: str | None = None,
    memory_limit: float | str | None = None,
    layers: Sequence[int] | None = None,
    host_chunks: int = 0,
    schedule_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan of a complete configuration, whether it fits or not.

    Args:
        model: The model.
        cluster: Its devices.
        schedule: A schedule's name, or a custom order of operations.
        micro_batches: Micro-batches per step, those of a custom order.
        pipeline: Pipeline devices; None: all devices, divided by the other degrees.
        chunks: Stages per device; None: the schedule's default.
        recompute: A strategy of the model's layers: none, selective, full.  It applies to every stage, or, if the
            schedule selects the stages that recompute (Obscura's family, `chronos-recomp`, 1F1B with
            `recomputed_stages`), only to these.  None: `full` on the stages that the schedule selects, `none` on all
            others.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        layers: Decoder layers of every stage; None: units are divided evenly.
        host_chunks: Number of last chunks of every device with a CPU optimizer.
        schedule_options: Options of the schedule.
        options: Those of RunOptions.

    Returns:
        The plan, planned by `hand`.

    Raises:
        InputError: If the arguments contradict each other.

    Example:
        >>> from debubble.planners.fixed_plan import fixed_plan
        >>> cluster = db.Cluster.parse("8xH100-80GB")
        >>> plan = fixed_plan(db.models["llama3-8b"], cluster, schedule="zb-h1", micro_batches=16)
        >>> plan.schedule.name, plan.planner
        ('zb-h1', 'hand')
    """
    run = RunOptions(**options)
    name = schedule if isinstance(schedule, str) else schedule.name
    if run.expert_overlap and schedule != COMBINED:
        raise InputError(f"--expert-overlap is priced for the schedule '{COMBINED}' alone, not for '{name}'.")
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    problem = problem_of(model, cluster, run, micro_batches=micro_batches, pipeline=pipeline)
    _check_recompute(problem, recompute)
    if isinstance(schedule, Schedule):
        made, partition = _custom_order(model, problem, schedule, recompute=recompute, layers=layers)
    else:
        made, partition = _configured(
            model, problem, schedules[schedule], chunks=chunks, recompute=recompute, layers=layers,
            schedule_options=schedule_options, slices=run.slices,
        )  # fmt: skip
    if host_chunks and not problem.units.hostable:
        raise InputError("--host-chunks needs a cluster with a link to the host, and no --host-optimizer.")
    hosted = made.placement.last_chunks(host_chunks)
    return Plan(
        planner=BY_HAND,
        schedule=made.with_host_steps(hosted),
        costs=problem.units.stage_costs(partition, made.placement, on_host=hosted),
        lower_bound=problem.step_bound(lower_bound(problem)),
        partition=problem.units.planned(partition),
        model_on_cluster=ModelOnCluster(model, cluster),
        options=run,
    )


def _check_recompute(problem: Problem, recompute: str | None) -> None:
    """Raise InputError for a strategy that no unit of the model has."""
    known = sorted({name for unit in problem.units.units for name in unit.strategies})
    if recompute is not None and recompute not in known:
        raise InputError(f"--recompute is '{recompute}'; it must be one of: {', '.join(known)}.")


def _custom_order(
    model: Model, problem: Problem, order: Schedule, *, recompute: str | None, layers: Sequence[int] | None
) -> tuple[Schedule, Partition]:
    """A custom order with one recomputation strategy for all stages, and its partition."""
    if order.devices != problem.devices:
        raise InputError(
            f"The order '{order.name}' has {order.devices} devices, and the pipeline has {problem.devices}: give"
            f" --pipeline {order.devices}, and a --cluster with as many devices as all degrees make."
        )
    if problem.slices > 1:
        raise InputError(f"The order '{order.name}' does not cut sequences into slices; leave --slices out.")
    if layers is not None:
        return _with_layers(model, problem, layers, lambda *_, **__: order, chunks=None, recompute=recompute)
    counts = even_counts(problem.units, order.stages)
    partition = Partition.cut_layers(problem.units, counts, strategy=recompute or "none")
    return replace(order, fused_recompute=partition.recomputing), partition


def _configured(
    model: Model,
    problem: Problem,
    entry: ScheduleEntry,
    *,
    chunks: int | None,
    recompute: str | None,
    layers: Sequence[int] | None,
    schedule_options: Mapping[str, Any] | None,
    slices: int,
) -> tuple[Schedule, Partition]:
    """The schedule with its recomputing stages, and the partition."""
    units, devices, micro_batches = problem.units, problem.devices, problem.micro_batches // slices
    options = {**entry.accepted_options(objective=problem.objective), **(schedule_options or {})}
    if slices > 1:
        if "slices" not in entry.options:
            raise InputError(f"The schedule '{entry.name}' does not cut sequences into slices; seq1f1b does.")
        options["slices"] = slices
    if layers is not None:
        if choosing := _RECOMPUTE_OPTIONS & options.keys():
            raise InputError(
                f"--option {min(choosing)} says which stages recompute, and --layers takes --recompute alone."
            )
        if len(layers) == devices < devices * entry.default_chunks:
            raise InputError(
                f"--layers has {devices} stages, but '{entry.name}' has {devices * entry.default_chunks} on {devices}"
                " devices."
            )
        ordered = partial(_ordered, entry, micro_batches=micro_batches, **options)
        return _with_layers(model, problem, layers, ordered, chunks=chunks, recompute=recompute)
    chunks = chunks or entry.default_chunks
    counts = even_counts(units, devices * chunks)
    can_choose = bool(_RECOMPUTE_OPTIONS & entry.options)
    everywhere = Partition.cut_layers(units, counts, strategy=recompute or ("full" if can_choose else "none"))
    made = _ordered(
        entry, problem, everywhere, chunks=chunks, micro_batches=micro_batches, recomputes=not can_choose, **options
    )
    chosen = made.fused_recompute | {stage for stage, _ in made.explicit_recompute}
    nowhere = Partition.cut(units, counts)
    if chosen and recompute == "none":
        raise InputError(
            f"'{entry.name}' is to recompute {len(chosen)} of its {made.stages} stages, but --recompute none leaves"
            " nothing to recompute: give --recompute full or selective, or no stages to recompute."
        )
    if chosen or _chooses(entry, options):
        partition = Partition(everywhere[s] if s in chosen else nowhere[s] for s in range(made.stages))
    else:
        partition = everywhere if recompute else nowhere
        made = replace(made, fused_recompute=partition.recomputing)
    return made, partition


def _ordered(
    entry: ScheduleEntry,
    problem: Problem,
    partition: Partition,
    *,
    chunks: int,
    recomputes: bool = True,
    **options: Any,
) -> Schedule:
    """The schedule for the costs of a partition; `recomputes`: whether the schedule gets their recomputing stages."""
    costs = problem.units.stage_costs(partition, entry.placement(problem.devices, chunks))
    if recomputes:
        options = entry.accepted_options(recomputing=partition.recomputing) | options
    if entry.searches:
        # Its order search suits coarse times; on a model's times it takes a minute without a gain.
        options = {"steps": 0} | options
    return entry(devices=problem.devices, chunks=chunks, costs=costs, **options)


def _with_layers(
    model: Model,
    problem: Problem,
    layers: Sequence[int],
    schedule: Callable[..., Schedule],
    *,
    chunks: int | None,
    recompute: str | None,
) -> tuple[Schedule, Partition]:
    """The schedule on stages with these numbers of layers, and the partition."""
    devices = problem.devices
    if len(layers) % devices or sum(layers) != model.layers:
        raise InputError(
            f"--layers has {sum(layers)} layers on {len(layers)} stages; the model has {model.layers}, and its stages"
            f" are a multiple of the {devices} pipeline devices."
        )
    layer_chunks = len(layers) // devices
    if chunks not in (None, layer_chunks):
        raise InputError(
            f"--chunks {chunks} makes {chunks * devices} stages, but --layers has {len(layers)}: leave --chunks out."
        )
    chosen = recompute or "none"
    partition = partition_by_layers(problem.units, layers, dict.fromkeys(range(model.layers), (chosen, chosen)))
    made = schedule(problem, partition, chunks=layer_chunks)
    if made.stages != len(layers):
        raise InputError(
            f"--layers has {len(layers)} stages, but '{made.name}' has {made.stages} on {devices} devices."
        )
    return replace(made, fused_recompute=partition.recomputing), partition


def _chooses(entry: ScheduleEntry, options: Mapping[str, Any]) -> bool:
    """Whether the schedule selects the stages that recompute: Obscura's family always does, others by an option."""
    return "adjusted_stages" in entry.options or bool(_RECOMPUTE_OPTIONS & options.keys())
