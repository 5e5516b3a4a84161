"""What the runtime must know of a plan's model beside its units, whichever way these are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.ir import InputError
from debubble.models.layer_types import entry, halved
from debubble.runtime.models.families import read_shape
from debubble.runtime.models.hf_model import on_meta, tables_of
from debubble.runtime.models.hf_names import HEAD_TABLE, TABLE


def layer_count(config: Mapping[str, Any]) -> int:
    """Of the whole model."""
    return read_shape(config).layers if halved(config) else _entry(config, "num_hidden_layers")


def hidden_size(config: Mapping[str, Any]) -> int:
    """Width of what stages hand on."""
    return read_shape(config).hidden if halved(config) else _entry(config, "hidden_size")


def tied_names(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the embedding's and the head's table, if they are one."""
    if not halved(config):
        return tables_of(on_meta(config))
    shape = read_shape(config)
    return (TABLE[shape.is_gpt2], HEAD_TABLE) if shape.tied else None


def _entry(config: Mapping[str, Any], name: str) -> int:
    value = entry(config, name)
    if not isinstance(value, int):
        raise InputError(f"The model's config has no entry '{name}'.")
    return value
