"""The entries of a Hugging Face config, with errors that name the one that is missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from debubble.ir import InputError
from debubble.models.layer_types import entry, windows

MOST_LAYERS = 10_000
"""Far more than any model has; a plan names each of them."""
MOST = 10**9
"""More than any size or number in a config; products of several are still finite."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MOST)]


class _Types(msgspec.Struct):
    """Types of the entries that are read in several places."""

    model_type: str
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    mlp_only_layers: list[_Number] | None = None
    max_window_layers: _Number = 0
    sliding_window: _Number | None = None
    decoder_sparse_step: _Size | None = None
    first_k_dense_replace: _Number | None = None
    num_local_experts: _Number | None = None
    num_experts: _Number | None = None
    n_routed_experts: _Number | None = None
    n_shared_experts: _Number | None = None
    shared_expert_intermediate_size: _Number | None = None


class Entries:
    """A config's entries, with errors that name the one that is missing or wrong."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self.entries = entries
        self.name = name

    def check_types(self) -> None:
        """Raise InputError if an entry that is read in several places is of another type than it must be."""
        try:
            msgspec.convert(self.entries, _Types)
        except msgspec.ValidationError as error:
            raise InputError(f"{self.name} is wrong: {error}.") from error

    def number(self, key: str, default: int | None = None) -> int:
        value = entry(self.entries, key)
        if value is None:
            value = default
        if value is None:
            raise InputError(f"{self.name} has no `{key}`, which a {self.entries['model_type']} model needs.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{key}` must be a positive whole number, but {self.name[0].lower()}{self.name[1:]} has"
                             f" {value!r}.")  # fmt: skip
        if value > MOST:
            raise InputError(f"`{key}` is more than {MOST:.0e} in {self.name[0].lower()}{self.name[1:]}.")
        return value

    def layers(self) -> int:
        """How many layers the model has."""
        count = self.number("num_hidden_layers")
        if count > MOST_LAYERS:
            raise InputError(f"{self.name} has {count} layers; debubble plans models of up to {MOST_LAYERS}.")
        return count

    def flag(self, key: str, default: bool) -> bool:
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"`{key}` must be true or false, not {value!r}.")
        return value

    def head_dim(self, hidden: int, heads: int) -> int:
        if self.entries.get("head_dim") is not None:
            return self.number("head_dim")
        if hidden % heads:
            raise InputError(f"{self.name} has {heads} heads for a hidden size of {hidden}, which they cannot divide.")
        return hidden // heads

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Per layer, how far attention reaches back; empty where no layer has a window."""
        found = windows(self.entries)
        if len(found) != layers:
            raise InputError(
                f"{self.name} has `layer_types` for {len(found)} layers, but `num_hidden_layers` {layers}."
            )
        return found if any(window is not None for window in found) else ()


def read_entries(path: Path) -> Entries:
    """Those of a config file, or of a folder with one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The model config {file} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise InputError(f"{file} is not a model config: it is nested too deeply.") from error
    except ValueError as error:
        raise InputError(f"{file} is not a JSON file: {error}.") from error
    if not isinstance(entries, dict):
        raise InputError(f"{file} is not a model config: it holds no JSON object.")
    if "debubble_plan" in entries:
        raise InputError(f"{file} is a plan, not a model config; a plan already has its schedule and devices.")
    return Entries(entries, f"The config {file}")
