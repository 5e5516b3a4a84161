"""Checks that a folder of weights matches a plan's model: config, names and dtypes of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from debubble.files import decode_json
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.unit_entries import WITHOUT_EFFECT
from debubble.runtime.models.build import empty_parameters
from debubble.runtime.models.hf.model import complete_config, ignored_names, tied_names
from debubble.runtime.models.hf.names import HEAD_TABLE, checkpoint_names

_CHOOSABLE_FIELDS = frozenset(
    (
        "attention_dropout", "beyond_units", "config", "embedding_dropout", "family", "initializer_range", "known",
        "mtp_layers", "padding", "residual_dropout", "router_balance", "tied", "vision",
    )
)  # fmt: skip
"""Fields of a model in which a run may differ from its initial checkpoint."""
_CHOOSABLE_ENTRIES = re.compile(
    r"dropout|pdrop|initializer|pad_token_id|output_router_logits|aux_loss|num_nextn|num_mtp|tie_word_embeddings"
)
"""Config entries in which runs of other families may differ."""
_LEFTOVERS = re.compile(
    r"rotary_emb\.(inv_freq|(cos|sin)_cached)$|rotary_pos_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|position_ids$"
)
"""Buffers that older versions of transformers saved, and that models compute."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Place(NamedTuple):
    """A tensor's file, and its name there."""

    file: Path
    name: str


class FolderTensors(NamedTuple):
    """The tensors of a folder, matched to a model."""

    places: Mapping[str, Place]
    """Places of the folder's tensors, by the model's checkpoint names."""
    parameters: Mapping[str, Tensor]
    """The model's parameters by name, on the meta device."""


def weights_of(folder: Path, files: Mapping[str, str], config: Mapping[str, Any]) -> FolderTensors:
    """Match the tensors of a folder's files to a model of that config.

    Names of a base model's checkpoint get the model's prefix; a tied table is also the head's.

    Raises:
        InputError: The folder's config is of another model or of quantised weights, or the model lacks a tensor.
    """
    folder_config = read_config(folder)
    if folder_config is not None:
        _check_config(folder, folder_config, config)
    parameters, family, table = empty_parameters(config), str(config.get("model_type")), _table(config)
    expected = {name for n, p in parameters.items() for name in checkpoint_names(n, p.shape, family, (), table=table)}
    ((root, _),) = Counter(name.partition(".")[0] for name in expected).most_common(1)
    is_base_model = not any(name.startswith(f"{root}.") for name in files)
    places = {
        f"{root}.{name}" if is_base_model and name not in expected else name: Place(folder / file, name)
        for name, file in files.items()
    }
    tables = None if folder_config is None else tied_names(folder_config)
    if tables is not None and HEAD_TABLE not in places and tables[0] in places:
        places[HEAD_TABLE] = places[tables[0]]
    _check_leftovers(folder, places, config, parameters)
    return FolderTensors(places, parameters)


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """The config in a folder, without its class; None if there is none.  Raises InputError if it is damaged."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        entries = decode_json(file.read_bytes(), dict[str, Any])
    except msgspec.DecodeError as error:
        raise InputError(f"{file} is no config of a model: {error}.") from error
    return {name: value for name, value in entries.items() if name != "architectures"}


def check_dtype(place: Place, tensor: Tensor, parameter: Tensor) -> None:
    """Raise InputError if a tensor in a file is quantised, and the model's parameter is not."""
    if parameter.is_floating_point() and tensor.dtype not in _FLOATS:
        raise InputError(
            f"'{place.name}' in {place.file} is {str(tensor.dtype).removeprefix('torch.')}, whose scales debubble does"
            " not read: give a checkpoint of floats of 16 bits or more."
        )


def check_tables(folder: Path, table: Tensor, head: Tensor) -> None:
    """Raise InputError if the two tables of a tied model differ."""
    if table.shape != head.shape or not torch.equal(table, head):
        raise InputError(
            f"The checkpoint in {folder} has two tables that differ, and the plan's model ties them: set"
            " tie_word_embeddings to false in its config and make the plan again."
        )


def _table(config: Mapping[str, Any]) -> str:
    tables = tied_names(config)
    return tables[0] if tables else HEAD_TABLE


def _check_config(folder: Path, folder_config: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise InputError if the folder's config is of another model or of quantised weights."""
    quantization = folder_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise InputError(
            f"The checkpoint in {folder} is quantised ({method}), which debubble does not read: give one of floats of"
            " 16 bits or more."
        )
    entry = _differing_entry(config, folder_config)
    if entry is not None:
        raise InputError(
            f"The checkpoint in {folder} is of another model than the plan's: its config has {entry}"
            f" {folder_config.get(entry)!r}, the plan's {config.get(entry)!r}: make the plan from the folder's config."
        )


def _differing_entry(config: Mapping[str, Any], folder_config: Mapping[str, Any]) -> str | None:
    """The first entry by which two configs make different models; None if the models are equal."""
    planned = ModelConfig.from_hf(config)
    try:
        other = ModelConfig.from_hf(folder_config)
    except InputError:
        return "model_type"
    if planned.whole_layers or other.whole_layers:
        if config.get("model_type") != folder_config.get("model_type"):
            return "model_type"
        ours, theirs = complete_config(config), complete_config(folder_config)
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return next((n for n in names if n not in WITHOUT_EFFECT and not _CHOOSABLE_ENTRIES.search(n)), None)
    if _equal_models(planned, other):
        return None
    unlike = sorted(name for name in {**config, **folder_config} if config.get(name) != folder_config.get(name))
    return next((name for name in unlike if _matters(name, config, folder_config, planned)), "model_type")


def _equal_models(one: ModelConfig, other: ModelConfig) -> bool:
    """Tell whether two models differ only in fields that a run may choose."""
    choices = {f.name: getattr(one, f.name) for f in fields(one) if f.name in _CHOOSABLE_FIELDS}
    return replace(other, **choices) == one


def _matters(name: str, config: Mapping[str, Any], other: Mapping[str, Any], model: ModelConfig) -> bool:
    """Tell whether replacing one entry by that of another config makes another model."""
    changed = {**config, name: other[name]} if name in other else {k: v for k, v in config.items() if k != name}
    try:
        return not _equal_models(model, ModelConfig.from_hf(changed))
    except InputError:
        return True


def _check_leftovers(
    folder: Path, places: Iterable[str], config: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> None:
    """Raise InputError if the folder has a tensor that the model lacks."""
    names, family, table = {*places}, str(config.get("model_type")), _table(config)
    used = {s for n, p in parameters.items() for s in checkpoint_names(n, p.shape, family, names, table=table)}
    ignored = [_LEFTOVERS, *map(re.compile, ignored_names(config))]
    leftover = next((n for n in sorted(names - used) if not any(pattern.search(n) for pattern in ignored)), None)
    if leftover is not None:
        raise InputError(
            f"The checkpoint in {folder} has '{leftover}', which the plan's model lacks: make the plan from the"
            " folder's config."
        )
