"""Reads Hugging Face's `config.json` without transformers.

One function per family of configs; each says which entries it needs and what its model does without them (the
defaults are transformers' own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from debubble.ir import InputError
from debubble.models.entries import Entries, read_entries
from debubble.models.generic import other
from debubble.models.layer_types import expert_layers
from debubble.models.model import Experts, Model


def parse(source: str | Path | Mapping[str, Any]) -> Model:
    """The model of a config file, a folder with one, or a config's content."""
    config = Entries(source, "The config") if isinstance(source, Mapping) else read_entries(Path(source))
    if config.entries.get("model_type") is None:
        raise InputError(f"{config.name} has no `model_type`: it is no Hugging Face config.")
    config.check_types()
    return _FAMILIES.get(config.entries["model_type"], other)(config)


def _llama_like(config: Entries, **changes: Any) -> Model:
    """Llama and what differs from it in a few entries; `changes` override."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    bias = config.flag("attention_bias", False)
    layers = config.layers()
    shape: dict[str, Any] = {
        "family": config.entries["model_type"],
        "hidden": hidden,
        "layers": layers,
        "windows": config.windows(layers),
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads),
        "head_dim": changes.get("head_dim") or config.head_dim(hidden, heads),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "dropout": bool(config.entries.get("attention_dropout")),
        "config": dict(config.entries),
    }
    return Model(**{**shape, **changes})


def _mistral(config: Entries) -> Model:
    return _llama_like(config, qkv_bias=False, output_bias=False, mlp_bias=False)


def _qwen2(config: Entries) -> Model:
    return _llama_like(config, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: Entries) -> Model:
    return _llama_like(config, head_dim=config.number("head_dim", 128), qk_norm=True, mlp_bias=False)


def _gemma(config: Entries, **changes: Any) -> Model:
    tied, head_dim = config.flag("tie_word_embeddings", True), config.number("head_dim", 256)
    return _llama_like(config, tied=tied, head_dim=head_dim, mlp_bias=False, **changes)


def _gemma2(config: Entries) -> Model:
    config.number("sliding_window_pattern", 2)
    return _gemma(config, norms_results=True)


def _gemma3(config: Entries) -> Model:
    config.number("sliding_window_pattern", 6)
    return _gemma(config, norms_results=True, qk_norm=True)


def _mixtral(config: Entries) -> Model:
    experts = Experts(
        count=config.number("num_local_experts", 8),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("intermediate_size"),
    )
    return _llama_like(config, qkv_bias=False, output_bias=False, mlp_bias=False, experts=experts)


def _qwen3_moe(config: Entries) -> Model:
    config.layers()
    config.number("decoder_sparse_step", 1)
    experts = Experts(
        count=config.number("num_experts", config.entries.get("num_local_experts")),
        per_token=config.number("num_experts_per_tok", 8),
        ffn=config.number("moe_intermediate_size"),
        dense_layers=frozenset(layer for layer, moe in enumerate(expert_layers(config.entries)) if not moe),
    )
    return _llama_like(config, qk_norm=True, mlp_bias=False, experts=experts)


def _gpt2(config: Entries) -> Model:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    # transformers lets GPT-2 configs use the common names too.
    layers = config.layers()
    if hidden % heads:
        raise InputError(f"{config.name} has {heads} heads for a hidden size of {hidden}, which they cannot divide.")
    return Model(
        family="gpt2",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.number("n_inner", 4 * hidden),
        vocab=config.number("vocab_size"),
        gated=False,
        tied=config.flag("tie_word_embeddings", True),
        norm="layernorm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        positions=config.number("n_positions"),
        dropout=any(config.entries.get(key, 0.1) for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
        config=dict(config.entries),
    )


_FAMILIES: dict[str, Callable[[Entries], Model]] = {
    "llama": _llama_like,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
