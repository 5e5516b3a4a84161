"""Memory by part of a model on a cluster for every choice of degrees, without planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from debubble.argument_types import with_checked_types
from debubble.costs import Cluster
from debubble.ir.degrees import Degrees
from debubble.models import Model, as_model
from debubble.planners.degrees.memory import Footprint, footprints, footprints_with
from debubble.planners.degrees.space import Job
from debubble.planners.plan_model import DEGREES, for_target, run_options


@with_checked_types(but=("model", "cluster"))
def fits(
    model: Model | str | Path,
    cluster: Cluster | str | Path,
    *,
    global_batch: int | None = None,
    micro_batches: int | None = None,
    pipeline: int | None = None,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    target: str | None = None,
    **options: Any,
) -> list[Footprint]:
    """Memory by part, and whether it fits, for every choice of the degrees that are not specified.

    Args:
        model: A model, a built-in name, a `config.json` or a folder with one.
        cluster: A cluster, a text such as `8xA100-80GB`, or a YAML file.
        global_batch: Sequences per step; None: as many as fill every pipeline.
        micro_batches: Per pipeline and step; None: as the global batch and the degrees imply.
        pipeline: Devices of the pipeline.
        chunks: Stages per device; None: 1, and with ZeRO-3 the number with the least memory.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        target: Name of the framework whose choices and memory are used.
        options: Those of RunOptions, such as `sequence_length=8192`; degrees among them are fixed.

    Returns:
        The choices, each with whether it `fits` and the bytes of its fullest device by part: `kept` without
        recomputation, and `recomputed` with full recomputation.

    Raises:
        InputError: If no choice of degrees is legal, or a name is unknown.

    Example:
        >>> choices = db.fits("llama3-8b", "8xH100-80GB", tensor=4, pipeline=2)
        >>> [choice.fits for choice in choices]
        ['yes']
    """
    model, devices = as_model(model), Cluster.of(cluster)
    devices = devices if memory_limit is None else devices.with_limit(memory_limit)
    degrees = {**options, "pipeline": pipeline, "chunks": chunks}
    fixed = {name: degree for name, degree in degrees.items() if name in DEGREES and degree is not None}
    size = fixed.get("micro_batch_size", 1)
    specified = {name: value for name, value in options.items() if value is not None}
    job = Job(
        model=model, cluster=devices, fixed=fixed, target=target,
        global_batch=devices.count * size if global_batch is None else global_batch,
        options=for_target(run_options(specified), target),
    )  # fmt: skip
    if micro_batches is None:
        return footprints(job)
    if global_batch is None:
        return footprints_with(job, micro_batches)
    return footprints(replace(job, fixed={**fixed, "micro_batches": micro_batches}))


def common_choices(choices: Sequence[Footprint], cluster: Cluster, *, fixed: Sequence[str]) -> list[Footprint]:
    """The choices with tensor parallelism within a node, and without further ranks that are not asked for.

    Of choices that differ only in the expert degree, the one with the least memory is kept.

    Args:
        choices: The choices of `fits`.
        cluster: The devices.
        fixed: Names of the degrees that are asked for.
    """
    usual = [choice for choice in choices if _is_usual(choice.degrees, cluster, fixed=fixed)]
    return usual if "expert" in fixed else [*_with_least_memory(usual)]


def _is_usual(degrees: Degrees, cluster: Cluster, *, fixed: Sequence[str]) -> bool:
    """Whether a choice is asked for or usual, for any expert degree."""
    limits = {"context": 1, "slices": 1, "tensor": cluster.slowest.devices_per_node}
    usual = all(name in fixed or getattr(degrees, name) <= limit for name, limit in limits.items())
    return usual and (degrees.expert_tensor is None or "expert_tensor" in fixed)


def _with_least_memory(choices: Sequence[Footprint]) -> Iterator[Footprint]:
    """Of choices that differ only in the expert degree, the one with the least memory and then the lowest degree."""
    groups: dict[Degrees, list[Footprint]] = {}
    for choice in choices:
        groups.setdefault(replace(choice.degrees, expert=1, chunks=None), []).append(choice)
    for group in groups.values():
        yield min(group, key=lambda choice: (choice.kept.total, choice.degrees.expert))
