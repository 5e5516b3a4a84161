"""Models that differ from Llama in a few entries, in half-layers or in whole layers of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.models.architecture import Architecture, Layer
from debubble.models.entries import Entries
from debubble.models.layers import like_layers


def llama_like(config: Entries, *, kv_heads: int | None = None, **changes: Any) -> Architecture:
    """A Llama with another default of `kv_heads`, and the fields in `changes`."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    specified = "num_key_value_heads" in config.entries
    bias = config.flag("attention_bias", False)
    fields: dict[str, Any] = {
        "family": config.family,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads if specified else kv_heads or heads),
        "head_dim": changes.get("head_dim") or config.head_dim(hidden, heads),
        "ffn": changes.get("ffn") or config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "activation": config.activation("hidden_act", default="silu"),
        "initializer_range": config.real("initializer_range", 0.02),
        "padding": config.get("pad_token_id"),
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_dropout": config.real("attention_dropout", 0.0),
        # transformers adds the auxiliary loss if router logits are requested.
        "router_balance": config.real("router_aux_loss_coef", 0.001) if config.get("output_router_logits") else 0.0,
    }
    if "per_layer" not in changes:
        fields["per_layer"] = like_layers(config)
    return Architecture(**{**fields, **changes})


def of_layers(config: Entries, layers: Sequence[Layer], **changes: Any) -> Architecture:
    """A model of these layers that runs with transformers' modules."""
    return llama_like(config, per_layer=tuple(layers), whole_layers=True, **changes)
