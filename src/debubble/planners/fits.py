"""Memory by part of a model on a cluster, for every choice of degrees, without planning."""

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
    """What takes the memory, and whether it fits, for every choice of the degrees that are not given.

    Args:
        model: The model, or as the command line names it: a built-in name, a `config.json` or a folder with one.
        cluster: Its devices, or as the command line names them: `8xA100-80GB` or a YAML file.
        global_batch: Sequences per step; None: as many as fill every pipeline.
        micro_batches: Per pipeline and step; None: what the batch makes.
        pipeline: Devices of the pipeline.
        chunks: Stages per device; None: 1, and with ZeRO-3 what takes least.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        target: Name of the framework whose choices and memory are counted.
        options: Those of RunOptions, such as `sequence_length=8192`; degrees among them are kept.

    Returns:
        The choices, each with whether it `fits` and the bytes of its fullest device by part: `kept`, and `recomputed`
        where everything is.

    Raises:
        InputError: If no choice of degrees is legal, or a name is unknown.

    Example:
        >>> found = db.fits("llama3-8b", "8xH100-80GB", tensor=4, pipeline=2)
        >>> [each.fits for each in found]
        ['yes']
    """
    model, devices = as_model(model), Cluster.of(cluster)
    devices = devices if memory_limit is None else devices.with_limit(memory_limit)
    given = {**options, "pipeline": pipeline, "chunks": chunks}
    fixed = {name: degree for name, degree in given.items() if name in DEGREES and degree is not None}
    size = fixed.get("micro_batch_size", 1)
    given_options = {name: value for name, value in options.items() if value is not None}
    job = Job(
        model=model, cluster=devices, fixed=fixed, target=target,
        global_batch=devices.count * size if global_batch is None else global_batch,
        options=for_target(run_options(given_options), target),
    )  # fmt: skip
    if micro_batches is None:
        return footprints(job)
    if global_batch is None:
        return footprints_with(job, micro_batches)
    return footprints(replace(job, fixed={**fixed, "micro_batches": micro_batches}))


def common_choices(choices: Sequence[Footprint], cluster: Cluster, *, fixed: Sequence[str]) -> list[Footprint]:
    """The choices that are asked for or usual: tensor parallelism within a node, and little else.

    Of each choice of the other degrees the expert degree that needs least memory counts as usual.

    Args:
        choices: The choices of `fits`.
        cluster: The devices.
        fixed: Names of the degrees that are asked for.
    """
    usual = [each for each in choices if _is_usual(each.degrees, cluster, fixed=fixed)]
    return usual if "expert" in fixed else [*_with_least_memory(usual)]


def _is_usual(degrees: Degrees, cluster: Cluster, *, fixed: Sequence[str]) -> bool:
    """Tell whether a choice is asked for or usual, whatever its expert degree."""
    most = {"context": 1, "slices": 1, "tensor": cluster.slowest.devices_per_node}
    usual = all(name in fixed or getattr(degrees, name) <= limit for name, limit in most.items())
    return usual and (degrees.expert_tensor is None or "expert_tensor" in fixed)


def _with_least_memory(choices: Sequence[Footprint]) -> Iterator[Footprint]:
    """Of each choice of the other degrees the expert degree that needs least, the smallest of several."""
    groups: dict[Degrees, list[Footprint]] = {}
    for each in choices:
        groups.setdefault(replace(each.degrees, expert=1, chunks=None), []).append(each)
    for group in groups.values():
        yield min(group, key=lambda each: (each.kept.total, each.degrees.expert))
