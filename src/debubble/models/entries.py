"""The entries of a Hugging Face config, with errors that name the missing or wrong entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from debubble.files import convert
from debubble.ir import InputError
from debubble.parse_errors import reason_of

MAX_LAYERS = 10_000
"""Maximum layers of a model, all of which a plan lists."""
MAX_NUMBER = 10**9
"""Maximum of a config's numbers, whose products must stay finite."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
_Real = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class _Types(msgspec.Struct):
    """Types of entries that are read in several places."""

    model_type: str
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    block_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    mlp_only_layers: list[_Number] | None = None
    attn_layer_indices: list[_Number] | None = None
    attn_layer_offset: _Number | None = None
    expert_layer_offset: _Number | None = None
    full_attn_idxs: list[_Number] | None = None
    moe_layer_end_index: int | None = None
    moe_layer_start_index: _Number | None = None
    moe_num_shared_experts: _Number | None = None
    moe_topk: _Size | Annotated[list[_Size], msgspec.Meta(min_length=1)] | None = None
    num_dense_layers: _Number | None = None
    max_window_layers: _Number = 0
    sliding_window: _Number | None = None
    decoder_sparse_step: _Size | None = None
    first_k_dense_replace: _Number | None = None
    num_local_experts: _Number | None = None
    num_experts: _Number | None = None
    n_routed_experts: _Number | None = None
    n_shared_experts: _Number | None = None
    shared_expert_intermediate_size: _Number | None = None
    pad_token_id: int | None = None
    attention_dropout: _Real | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_key_value_heads": ("num_kv_heads",),
}
"""Entry -> other names of it in some families' configs."""


ACTIVATIONS = frozenset(
    (
        "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
        "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
        "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
    )
)  # fmt: skip
"""The activation functions of transformers, by name."""


class Entries:
    """A config's entries.  Defaults apply to entries that are missing or null."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self.entries = entries
        self.name = name
        """The config's name in errors."""

    def check_types(self) -> None:
        """Raise InputError if an entry that is read in several places has a wrong type."""
        try:
            convert(self.entries, _Types)
        except msgspec.ValidationError as error:
            raise InputError(f"{self.name} is wrong: {error}.") from error

    @property
    def family(self) -> str:
        """The config's `model_type`."""
        return str(self.entries["model_type"])

    def get(self, key: str, default: Any = None) -> Any:
        """An entry's value, under its usual name or an alias."""
        values = (self.entries[name] for name in (key, *_ALIASES.get(key, ())) if self.entries.get(name) is not None)
        return next(values, default)

    def _needed(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise InputError(f"{self.name} has no `{key}`, which a {self.family} model needs.")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._needed(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{key}` must be a positive whole number, but {self._inside} has {value!r}.")
        if value > MAX_NUMBER:
            raise InputError(f"`{key}` is more than {MAX_NUMBER:.0e} in {self._inside}.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._needed(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -MAX_NUMBER * MAX_NUMBER <= value <= MAX_NUMBER * MAX_NUMBER
        ):
            raise InputError(f"`{key}` must be a number, but {self._inside} has {value!r}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"`{key}` must be true or false, not {value!r}.")
        return value

    def activation(self, *keys: str, default: str) -> str:
        """The name of an activation function, from the first of these keys that is set."""
        name = next((name for key in keys if (name := self.get(key)) is not None), default)
        if name not in ACTIVATIONS:
            raise InputError(
                f"{self.name} has the activation function {name!r}, which transformers does not know; there are:"
                f" {', '.join(sorted(ACTIVATIONS))}."
            )
        return str(name)

    @property
    def _inside(self) -> str:
        return self.name[0].lower() + self.name[1:]

    def layers(self) -> int:
        """Number of layers."""
        count = self.number("num_hidden_layers")
        if count > MAX_LAYERS:
            raise InputError(f"{self.name} has {count} layers; debubble plans models of up to {MAX_LAYERS}.")
        return count

    def head_dim(self, hidden: int, heads: int) -> int:
        """Width of a head."""
        if self.entries.get("head_dim") is not None:
            return self.number("head_dim")
        if hidden % heads:
            raise InputError(f"{self.name} has {heads} heads for a hidden size of {hidden}, which they cannot divide.")
        return hidden // heads


def read_entries(path: Path) -> Entries:
    """Read a config file, or the one in a folder.  Raises InputError if it is not a config."""
    file = path / "config.json" if path.is_dir() else path
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The model config {file.absolute()} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise InputError(f"{file} is not a model config: {reason_of(error)}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not a text file: a model config is JSON.") from error
    except ValueError as error:
        raise InputError(f"{file} is not a JSON file: {reason_of(error)}.") from error
    if not isinstance(entries, dict):
        raise InputError(f"{file} is not a model config: it holds no JSON object.")
    if "debubble_plan" in entries:
        raise InputError(f"{file} is a plan, not a model config; a plan already has its schedule and devices.")
    return Entries(entries, f"The config {file}")
