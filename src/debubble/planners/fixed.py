"""One fixed configuration of a model on a cluster: even partition, one recomputation everywhere, a named schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from debubble.costs import Cluster, Model, model_units
from debubble.costs.units import recomputing
from debubble.ir import InputError, Placement, RunOptions, Schedule, StageCosts
from debubble.planners.making import pipeline_devices
from debubble.planners.partition import even_counts
from debubble.planners.problem import cut
from debubble.schedules import schedules


def fixed_configuration(
    model: Model,
    cluster: Cluster,
    *,
    schedule: str,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    recompute: str = "none",
    memory_limit: float | str | None = None,
    schedule_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Schedule, StageCosts]:
    """The schedule and stage costs of a configuration, to simulate.

    `recompute` is a strategy of the model's units: none, selective, full.  Further options are those of RunOptions.
    Raises InputError for what does not go together.
    """
    run = RunOptions(**options)
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    devices = pipeline_devices(cluster, run, pipeline)
    units = model_units(model, cluster, run, pipeline=devices)
    known = sorted({name for unit in units.units for name in unit.strategies})
    if recompute not in known:
        raise InputError(f"--recompute is '{recompute}'; it must be one of: {', '.join(known)}.")
    entry = schedules[schedule]
    chunks = chunks or entry.default_chunks
    partition = cut(units, even_counts(units, devices * chunks), strategy=recompute)
    rough = units.stage_costs(partition, Placement.looped(devices, chunks))
    chosen = entry(devices=devices, micro_batches=micro_batches, chunks=chunks, costs=rough, **(schedule_options or {}))
    costs = units.stage_costs(partition, chosen.placement)
    return replace(chosen, fused_recompute=chosen.fused_recompute | recomputing(partition)), costs
