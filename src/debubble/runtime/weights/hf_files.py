"""Hugging Face checkpoints: every rank reads and writes its own parameters, so none holds the full model.

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
from debubble.runtime.models.hf.names import HEAD_TABLE, checkpoint_names, checkpoint_tensors, join_tensors
from debubble.runtime.models.lora import CONFIG, PREFIX, WEIGHTS, is_adapter
from debubble.runtime.models.nf4 import is_scales
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.topology import Ranks
from debubble.runtime.weights.adapter_config import check_adapters, check_model, with_family
from debubble.runtime.weights.weights_folder import Place, check_dtype, check_tables, weights_of

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


def load_pretrained(device_part: DevicePart, model: ModelConfig | None, folder: str | Path) -> None:
    """Load this rank's parameters from a Hugging Face checkpoint, or its adapters from peft's.

    Reads only these, one at a time.  Raises InputError if the folder has no safetensors checkpoint, or parameters are
    missing, unknown or of another shape, or its config or adapters are for another model.
    """
    model, folder = _require_model(model), Path(folder)
    files = checkpoint_files(folder)
    if (folder / CONFIG).is_file():
        _load_adapters(device_part, model, folder, files)
    else:
        _load_weights(device_part, model.config, folder, files)


def _load_adapters(device_part: DevicePart, model: ModelConfig, folder: Path, files: Mapping[str, str]) -> None:
    if device_part.adapters is None:
        raise InputError(f"{folder} has adapters, but the plan trains whole parameters: make the plan with `--lora`.")
    check_model(folder, files, model)
    check_adapters(folder, files, device_part.adapters)
    for name in _names(device_part, adapters=True):
        if PREFIX + name not in files:
            raise InputError(f"The checkpoint in {folder} has no parameter '{PREFIX + name}'.")
        _load(device_part, name, _read(Place(folder / files[PREFIX + name], PREFIX + name)))


def _load_weights(device_part: DevicePart, config: Mapping[str, Any], folder: Path, files: Mapping[str, str]) -> None:
    places, parameters = weights_of(folder, files, config)
    family, tables = str(config.get("model_type")), tied_names(config)
    for name in _names(device_part, adapters=False):
        table = tables[0] if tables else HEAD_TABLE
        names = checkpoint_names(name, device_part.shape_of(name), family, places, table=table)
        for source in names:
            if source not in places:
                raise InputError(f"The checkpoint in {folder} has no parameter '{source}'.")
        reads: list[Callable[[], Tensor]] = [partial(_read_plain, places[one], parameters[name]) for one in names]
        _load(device_part, name, join_tensors(name, reads))
        if tables is not None and name in tables and HEAD_TABLE in places and tables[0] in places:
            check_tables(folder, _read(places[tables[0]]), _read(places[HEAD_TABLE]))


def _names(device_part: DevicePart, *, adapters: bool) -> list[str]:
    """Names of the parameters to load: adapters, or all others."""
    wanted = (name for name, _ in device_part.named_parameters() if not is_scales(name))
    return [name for name in wanted if is_adapter(name) == adapters]


def _load(device_part: DevicePart, name: str, tensor: Tensor) -> None:
    shape = device_part.shape_of(name)
    if tensor.shape != shape:
        raise InputError(
            f"'{name}' has shape {list(tensor.shape)} in the checkpoint, {list(shape)} in the plan's model."
        )
    device_part.load(name, tensor)


def save_pretrained(device_part: DevicePart, plan: Plan, ranks: Ranks, folder: str | Path) -> None:
    """Write a checkpoint for `from_pretrained`, with a file per pipeline device.  All ranks call it.

    Parameters are written in the dtype of the masters (fp32).
    """
    config, folder = _require_model(plan.model).config, Path(folder)
    if device_part.adapters is not None:
        _save_adapters(device_part, with_family(device_part.adapters.config, config), ranks, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = device_part.state_dict()
    local_state = {name: state[name].cpu() for name, _ in device_part.named_parameters()}
    if ranks.shares_table:
        local_state.pop(HEAD_TABLE, None)
    family = str(config.get("model_type"))
    tensors = {
        n: t.contiguous()
        for name, full in local_state.items()
        for n, t in checkpoint_tensors(name, full, family).items()
    }
    shard = f"model-{ranks.device + 1:05}-of-{plan.devices:05}.safetensors"
    if ranks.replica == ranks.slice == ranks.tensor_rank == 0:
        _write(tensors, folder / shard)
    # The gather is also a barrier: all files are written.
    written = ranks.first_per_device(ranks.transport.gather((shard, [(name, t.nbytes) for name, t in tensors.items()])))
    if ranks.transport.rank == 0:
        index = {
            "metadata": {"total_size": sum(size for _, sizes in written for _, size in sizes)},
            "weight_map": {name: file for file, sizes in written for name, _ in sizes},
        }
        write_whole(folder / "config.json", json.dumps(dict(config), indent=2).encode())
        write_whole(folder / INDEX, json.dumps(index, indent=2).encode())
    ranks.transport.gather(None)


def _require_model(model: ModelConfig | None) -> ModelConfig:
    if model is None:
        raise InputError("Modules of your own are no Hugging Face model: save and load `pipeline.state_dict()`.")
    return model


def _save_adapters(device_part: DevicePart, config: Mapping[str, Any], ranks: Ranks, folder: Path) -> None:
    """Write the adapters for peft's `from_pretrained`, in one file by rank 0, as they are small."""
    state = {PREFIX + name: t.cpu() for name, t in device_part.state_dict().items() if is_adapter(name)}
    states = ranks.first_per_device(ranks.transport.gather(state))
    if ranks.transport.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _write({name: t.contiguous() for state in states for name, t in state.items()}, folder / WEIGHTS)
        write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())
    ranks.transport.gather(None)


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file atomically."""
    from safetensors.torch import save_file

    unfinished = file.with_name(f".{file.name}")
    unfinished.touch(0o666)
    # Newer versions of safetensors ignore the umask and write files that only the user can read.
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
    """The entry of an index with the file of each parameter."""

    weight_map: dict[str, str]


def checkpoint_files(folder: Path) -> Mapping[str, str]:
    """Parameter -> its file in the folder.  Raises InputError if there is no checkpoint, or it is damaged."""
    from safetensors import SafetensorError, safe_open

    index, single_file = folder / INDEX, folder / (WEIGHTS if (folder / CONFIG).is_file() else SINGLE_FILE)
    if index.is_file():
        try:
            files = decode_json(index.read_bytes(), _Index).weight_map
        except msgspec.DecodeError as error:
            raise InputError(f"{index} is no index of a checkpoint: {error}.") from error
        outside = next((file for file in files.values() if Path(file).name != file), None)
        if outside is not None:
            raise InputError(f"{index} names '{outside}', which is no file of its folder.")
        return files
    if not single_file.is_file():
        raise InputError(f"{folder} has no checkpoint: neither {INDEX} nor {single_file.name}.")
    try:
        with safe_open(str(single_file), framework="pt") as file:
            return dict.fromkeys(file.keys(), single_file.name)
    except SafetensorError as error:
        raise InputError(f"{single_file} is no whole safetensors file: {error}.") from error
