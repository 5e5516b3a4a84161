"""DeepSpeed: its JSON configuration, and the pipeline module that debubble writes, where it lies beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from debubble.files import read_file
from debubble.imports.job import Job, even_layers
from debubble.imports.registry import Given, Settings, importer
from debubble.imports.settings import Reader, read_settings
from debubble.imports.torch_hosts import recomputed
from debubble.ir import InputError, RunOptions

_MODULE = "planned_pipeline.py"
_MAY_COST = ("offload", "overlap", "activation_checkpointing", "compression", "partition")


def read_config(path: Path) -> Mapping[str, Any]:
    """The settings of a configuration, and the constants of debubble's pipeline module beside it."""
    module = path.with_name(_MODULE)
    constants = _constants(module) if module.exists() else {}
    planned = {name: sorted(value) for name, value in constants.items()}
    return {**read_settings(path), **{f"{_MODULE}: {name}": value for name, value in planned.items()}}


@importer("deepspeed", settings=read_config, file="ds_config.json")
def deepspeed(settings: Settings, path: Path, given: Given) -> Job:
    """Batch, ZeRO level and dtype of a DeepSpeed configuration; stages and recomputation of debubble's module."""
    read = Reader(settings, path)
    if given.model is None:
        raise InputError("A DeepSpeed configuration does not describe the model: give it with --model.")
    if given.sequence_length is None:
        raise InputError("A DeepSpeed configuration does not say how long sequences are: give --sequence-length.")
    bounds = read.get(f"{_MODULE}: BOUNDS")
    layers = given.model.layers
    if bounds:
        counts = [end - begin for begin, end in pairwise(bounds)]
        counts[0] -= 1
        counts[-1] -= 1
    else:
        if given.pipeline is None:
            raise InputError(f"{path} does not say how long the pipeline is: give --pipeline.")
        counts = list(even_layers(layers, given.pipeline))
    pipeline = len(counts)
    size = read.number("train_micro_batch_size_per_gpu", 1)
    number = given.micro_batches or read.number("gradient_accumulation_steps", 1)
    data = given.cluster.count // pipeline
    dtype = next((name for name in ("bf16", "fp16") if read.get(f"{name}.enabled", False)), "fp32")
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=given.sequence_length,
        data=data,
        zero=read.number("zero_optimization.stage", 0) if data > 1 else 0,
        optimizer=str(read.get("optimizer.type", "AdamW")).lower(),
        dtype=dtype,
    )
    return Job(
        target="deepspeed",
        model=given.model,
        options=options,
        pipeline=pipeline,
        micro_batches=number,
        layers=tuple(counts),
        order="1f1b",
        strategies=recomputed([index - 1 for index in read.get(f"{_MODULE}: RECOMPUTED_LAYERS", ())]),
        unread=tuple(_unread(read, planned=bool(bounds))),
    )


def _constants(path: Path) -> dict[str, Any]:
    tree = ast.parse(read_file(path, "pipeline module"))
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _unread(read: Reader, *, planned: bool) -> Iterator[str]:
    if not planned:
        yield (
            "Stages and recomputation are your script's: predicted are stages of equally many layers, and none that"
            " recompute."
        )
    left = read.matching(_MAY_COST, read=())
    if left:
        yield f"Not read: {', '.join(left)}."
