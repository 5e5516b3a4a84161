"""Hugging Face checkpoints: read and written rank by rank, so that no rank ever holds the whole model.

A folder has `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.ir.files import write_whole
from debubble.runtime.families import read_shape
from debubble.runtime.hf_names import HEAD_TABLE, joined, sources, stored
from debubble.runtime.models import TABLE

if TYPE_CHECKING:
    from debubble.runtime.pipeline import Pipeline

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def load_pretrained(pipeline: Pipeline, folder: str | Path) -> None:
    """Give this rank's parameters the values of a Hugging Face checkpoint, reading these alone.

    Raises InputError if the folder has no safetensors checkpoint, or it lacks a parameter or has it in another shape.
    """
    folder = Path(folder)
    files = _files(folder)
    shape = read_shape(pipeline.plan.model or {})
    with torch.no_grad():
        for name, parameter in pipeline.named_parameters():
            names = sources(name, pipeline.shape_of(name), shape.family, files, table=TABLE[shape.is_gpt2])
            for source in names:
                if source not in files:
                    raise InputError(f"The checkpoint in {folder} has no parameter '{source}'.")
            tensor = joined(name, [partial(_read, folder / files[source], source) for source in names])
            if tensor.shape != pipeline.shape_of(name):
                raise InputError(
                    f"'{name}' has shape {list(tensor.shape)} in the checkpoint, {list(pipeline.shape_of(name))} in the"
                    " plan's model."
                )
            parameter.copy_(pipeline.ranks.over_replicas.own(tensor))


def save_pretrained(pipeline: Pipeline, folder: str | Path) -> None:
    """Write a checkpoint that `from_pretrained` opens: a shard per pipeline device.  All ranks call it.

    Parameters are written as the optimizer has them (fp32).
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    ranks, plan = pipeline.ranks, pipeline.plan
    folder.mkdir(parents=True, exist_ok=True)
    state = pipeline.state_dict()
    own = {name: state[name].cpu() for name, _ in pipeline.named_parameters()}
    if ranks.shares_table:
        own.pop(HEAD_TABLE, None)
    family = read_shape(plan.model or {}).family
    tensors = {n: t.contiguous() for name, whole in own.items() for n, t in stored(name, whole, family).items()}
    shard = f"model-{pipeline.device + 1:05}-of-{plan.devices:05}.safetensors"
    if ranks.replica == 0:
        unfinished = folder / f".{shard}"
        save_file(tensors, str(unfinished), metadata={"format": "pt"})
        unfinished.replace(folder / shard)
    # Whoever knows of all shards knows that they are written.
    told = ranks.transport.gather((shard, [(name, t.nbytes) for name, t in tensors.items()]))[: plan.devices]
    if ranks.transport.rank == 0:
        index = {
            "metadata": {"total_size": sum(size for _, held in told for _, size in held)},
            "weight_map": {name: file for file, held in told for name, _ in held},
        }
        write_whole(folder / "config.json", json.dumps(dict(plan.model or {}), indent=2).encode())
        write_whole(folder / INDEX, json.dumps(index, indent=2).encode())
    ranks.transport.gather(None)


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def _files(folder: Path) -> Mapping[str, str]:
    """Parameter -> the file that has it."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    if not (folder / WHOLE).is_file():
        raise InputError(f"{folder} has no checkpoint: neither {INDEX} nor {WHOLE}.")
    with safe_open(str(folder / WHOLE), framework="pt") as file:
        return dict.fromkeys(file.keys(), WHOLE)
