"""Hugging Face checkpoints: read and written rank by rank, so that no rank ever holds the whole model.

A folder has `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from debubble.files import decode_json, write_whole
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.plans import Plan
from debubble.runtime.models.hf.model import tied_names
from debubble.runtime.models.hf.names import HEAD_TABLE, joined, sources, stored
from debubble.runtime.models.lora import CONFIG, PREFIX, WEIGHTS, is_adapter
from debubble.runtime.models.nf4 import is_scales
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.topology import Ranks
from debubble.runtime.weights.adapter_config import check_adapters, check_model, with_family
from debubble.runtime.weights.weights_folder import Place, check_dtype, check_tables, weights_of

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def load_pretrained(part: DevicePart, model: ModelConfig | None, folder: str | Path) -> None:
    """Give this rank's parameters the values of a Hugging Face checkpoint, or its adapters those of peft's.

    It reads these alone, one at a time.  Raises InputError if the folder has no safetensors checkpoint, or it lacks a
    parameter, has it in another shape or has others, or its config or its adapters are for another model.
    """
    model, folder = _require_model(model), Path(folder)
    files = checkpoint_files(folder)
    if (folder / CONFIG).is_file():
        _load_adapters(part, model, folder, files)
    else:
        _load_weights(part, model.config, folder, files)


def _load_adapters(part: DevicePart, model: ModelConfig, folder: Path, files: Mapping[str, str]) -> None:
    if part.adapters is None:
        raise InputError(f"{folder} has adapters, but the plan trains whole parameters: make the plan with `--lora`.")
    check_model(folder, files, model)
    check_adapters(folder, files, part.adapters)
    for name in _names(part, adapters=True):
        if PREFIX + name not in files:
            raise InputError(f"The checkpoint in {folder} has no parameter '{PREFIX + name}'.")
        _load(part, name, _read(Place(folder / files[PREFIX + name], PREFIX + name)))


def _load_weights(part: DevicePart, config: Mapping[str, Any], folder: Path, files: Mapping[str, str]) -> None:
    places, parameters = weights_of(folder, files, config)
    family, tables = str(config.get("model_type")), tied_names(config)
    for name in _names(part, adapters=False):
        names = sources(name, part.shape_of(name), family, places, table=tables[0] if tables else HEAD_TABLE)
        for source in names:
            if source not in places:
                raise InputError(f"The checkpoint in {folder} has no parameter '{source}'.")
        reads: list[Callable[[], Tensor]] = [partial(_read_plain, places[one], parameters[name]) for one in names]
        _load(part, name, joined(name, reads))
        if tables is not None and name in tables and HEAD_TABLE in places and tables[0] in places:
            check_tables(folder, _read(places[tables[0]]), _read(places[HEAD_TABLE]))


def _names(part: DevicePart, *, adapters: bool) -> list[str]:
    """The parameters that are loaded: adapters, or all others."""
    wanted = (name for name, _ in part.named_parameters() if not is_scales(name))
    return [name for name in wanted if is_adapter(name) == adapters]


def _load(part: DevicePart, name: str, tensor: Tensor) -> None:
    shape = part.shape_of(name)
    if tensor.shape != shape:
        raise InputError(
            f"'{name}' has shape {list(tensor.shape)} in the checkpoint, {list(shape)} in the plan's model."
        )
    part.load(name, tensor)


def save_pretrained(part: DevicePart, plan: Plan, ranks: Ranks, folder: str | Path) -> None:
    """Write a checkpoint that `from_pretrained` opens: a shard per pipeline device.  All ranks call it.

    Parameters are written as the optimizer has them (fp32).
    """
    config, folder = _require_model(plan.model).config, Path(folder)
    if part.adapters is not None:
        _save_adapters(part, with_family(part.adapters.config, config), ranks, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = part.state_dict()
    own = {name: state[name].cpu() for name, _ in part.named_parameters()}
    if ranks.shares_table:
        own.pop(HEAD_TABLE, None)
    family = str(config.get("model_type"))
    tensors = {n: t.contiguous() for name, whole in own.items() for n, t in stored(name, whole, family).items()}
    shard = f"model-{ranks.device + 1:05}-of-{plan.devices:05}.safetensors"
    if ranks.replica == ranks.slice == ranks.part == 0:
        _write(tensors, folder / shard)
    # Whoever knows of all shards knows that they are written.
    told = ranks.first_per_device(ranks.transport.gather((shard, [(name, t.nbytes) for name, t in tensors.items()])))
    if ranks.transport.rank == 0:
        index = {
            "metadata": {"total_size": sum(size for _, held in told for _, size in held)},
            "weight_map": {name: file for file, held in told for name, _ in held},
        }
        write_whole(folder / "config.json", json.dumps(dict(config), indent=2).encode())
        write_whole(folder / INDEX, json.dumps(index, indent=2).encode())
    ranks.transport.gather(None)


def _require_model(model: ModelConfig | None) -> ModelConfig:
    if model is None:
        raise InputError("Modules of your own are no Hugging Face model: save and load `pipeline.state_dict()`.")
    return model


def _save_adapters(part: DevicePart, config: Mapping[str, Any], ranks: Ranks, folder: Path) -> None:
    """Save the adapters for peft's `from_pretrained`, in one file, which rank 0 writes because they are small."""
    state = {PREFIX + name: t.cpu() for name, t in part.state_dict().items() if is_adapter(name)}
    parts = ranks.first_per_device(ranks.transport.gather(state))
    if ranks.transport.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _write({name: t.contiguous() for state in parts for name, t in state.items()}, folder / WEIGHTS)
        write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())
    ranks.transport.gather(None)


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file whole or not at all."""
    from safetensors.torch import save_file

    unfinished = file.with_name(f".{file.name}")
    unfinished.touch(0o666)
    # Newer versions of safetensors write files that are the user's alone, whatever the umask says.
    mode = unfinished.stat().st_mode
    save_file(tensors, str(unfinished), metadata={"format": "pt"})
    unfinished.chmod(mode)
    unfinished.replace(file)


def _read(place: Place) -> Tensor:
    from safetensors import safe_open

    with safe_open(str(place.file), framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(place.name)
    return tensor


def _read_plain(place: Place, parameter: Tensor) -> Tensor:
    tensor = _read(place)
    check_dtype(place, tensor, parameter)
    return tensor


class _Index(msgspec.Struct):
    """The part of an index that says which file has a parameter."""

    weight_map: dict[str, str]


def checkpoint_files(folder: Path) -> Mapping[str, str]:
    """Parameter -> the file of the folder that has it; raises InputError if there is no checkpoint, or no whole one."""
    from safetensors import SafetensorError, safe_open

    index, whole = folder / INDEX, folder / (WEIGHTS if (folder / CONFIG).is_file() else WHOLE)
    if index.is_file():
        try:
            files = decode_json(index.read_bytes(), _Index).weight_map
        except msgspec.DecodeError as error:
            raise InputError(f"{index} is no index of a checkpoint: {error}.") from error
        outside = next((file for file in files.values() if Path(file).name != file), None)
        if outside is not None:
            raise InputError(f"{index} names '{outside}', which is no file of its folder.")
        return files
    if not whole.is_file():
        raise InputError(f"{folder} has no checkpoint: neither {INDEX} nor {whole.name}.")
    try:
        with safe_open(str(whole), framework="pt") as file:
            return dict.fromkeys(file.keys(), whole.name)
    except SafetensorError as error:
        raise InputError(f"{whole} is no whole safetensors file: {error}.") from error
