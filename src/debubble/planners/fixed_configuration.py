"""One fixed configuration of a model on a cluster: even partition, one recomputation strategy, a named schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from debubble.costs import Cluster, model_units
from debubble.costs.units import Partition
from debubble.ir import InputError, Placement, RunOptions, Schedule, StageCosts
from debubble.models import Model
from debubble.planners.model_problem import objective_of, pipeline_devices
from debubble.planners.partitioning.balance import even_counts
from debubble.schedules import schedules
from debubble.schedules.registry import ScheduleEntry
from debubble.targets.orders import COMBINED

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
    given = {**entry.accepted(objective=objective_of(run)), **(schedule_options or {})}
    chunks = chunks or entry.default_chunks
    counts = even_counts(units, devices * chunks)
    can_choose = bool(_STAGES_THAT_RECOMPUTE & entry.options)
    everywhere = Partition.cut(units, counts, strategy=recompute or ("full" if can_choose else "none"))
    rough = units.stage_costs(everywhere, Placement.looped(devices, chunks))
    made = entry(devices=devices, micro_batches=micro_batches, chunks=chunks, costs=rough, **given)
    chosen = made.fused_recompute | {stage for stage, _ in made.explicit_recompute}
    if not chosen and not _chooses(entry, given):
        partition = everywhere if recompute else Partition.cut(units, counts)
        made = replace(made, fused_recompute=partition.recomputing)
    elif chosen and recompute == "none":
        raise InputError(
            f"'{schedule}' is to recompute {len(chosen)} of its {made.stages} stages, but --recompute none leaves"
            " nothing to recompute: give --recompute full or selective, or no stages to recompute."
        )
    else:
        kept = Partition.cut(units, counts)
        partition = Partition(everywhere[s] if s in chosen else kept[s] for s in range(made.stages))
    if host_chunks and not units.hostable:
        raise InputError("--host-chunks needs a cluster with a link to the host, and no --host-optimizer.")
    hosted = made.placement.last_chunks(host_chunks)
    return made.with_host_steps(hosted), units.stage_costs(partition, made.placement, on_host=hosted)


def _chooses(entry: ScheduleEntry, given: Mapping[str, Any]) -> bool:
    """Tell whether the schedule says which stages recompute: Obscura's family always does, others by an option."""
    return "adjusted_stages" in entry.options or bool(_STAGES_THAT_RECOMPUTE & given.keys())
