"""Which layers of a model are of another kind than the rest, read from its Hugging Face config.

Costs and runtime both need it, for the `model` of a plan.  What a config leaves out has the default of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_UNWINDOWED = ("mixtral", "starcoder2", "phi3")
"""In these families there is no window unless the config has one."""
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""In these families every so many layers one has full attention, unless the config says otherwise."""


HALVED = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe")
)
"""Families whose layers are divided into an attention and an MLP half; of all others a layer is one unit."""


_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_key_value_heads": ("num_kv_heads",),
}
"""Other names of entries, in some families' configs."""


def entry(config: Config, name: str) -> Any:
    """An entry under its usual name or another; None if the config leaves it out."""
    found = (config[key] for key in (name, *_ALIASES.get(name, ())) if config.get(key) is not None)
    return next(found, None)


def _layers(config: Config) -> range:
    count = entry(config, "num_hidden_layers")
    if count is None:
        raise KeyError("num_hidden_layers")
    return range(count)


def halved(config: Config) -> bool:
    """Whether the model's units are half-layers."""
    return config.get("model_type") in HALVED


def sliding_layers(config: Config) -> tuple[bool, ...]:
    """Per layer, whether its attention reaches back only as far as a window."""
    family, layers = config.get("model_type"), _layers(config)
    if family in ("mistral", "mixtral", "starcoder2", "phi3"):
        return (True,) * len(layers)
    if family == "qwen3_moe":
        return (bool(config.get("use_sliding_window")),) * len(layers)
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return (False,) * len(layers)
    if config.get("layer_types"):
        return tuple(kind == "sliding_attention" for kind in config["layer_types"])
    if family in ("qwen2", "qwen3"):
        return tuple(i >= config.get("max_window_layers", 28) for i in layers)
    if family in _FULL_EVERY:
        every = config.get("sliding_window_pattern") or _FULL_EVERY[family]
        return tuple((i + 1) % every != 0 for i in layers)
    return (False,) * len(layers)


def windows(config: Config) -> tuple[int | None, ...]:
    """Per layer, how many tokens back its attention reaches, itself included; None: all."""
    window = config.get("sliding_window", None if config.get("model_type") in _UNWINDOWED else 4096)
    return tuple(window if sliding else None for sliding in sliding_layers(config))


def expert_layers(config: Config) -> tuple[bool, ...]:
    """Per layer, whether it has a mixture of experts instead of an MLP."""
    family, layers = config.get("model_type"), _layers(config)
    if family == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        return tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    return (family == "mixtral",) * len(layers)
