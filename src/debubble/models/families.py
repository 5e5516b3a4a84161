"""Readers of Hugging Face's `config.json` without transformers.

There is one function per family of configs, with the entries that it requires and transformers' defaults for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from debubble.ir import InputError
from debubble.models.architecture import Architecture, Experts, Layer
from debubble.models.entries import Entries
from debubble.models.generic import read_other
from debubble.models.hybrids import HYBRIDS
from debubble.models.layers import like_layers, rope_of, sparse_mlps, windows
from debubble.models.llama_like import llama_like
from debubble.models.mixers import Attention
from debubble.models.unit_entries import entry_beyond_units
from debubble.models.vision import read_vision, text_entries
from debubble.models.whole_families import WHOLE_FAMILIES


def read_architecture(config: Entries) -> Architecture:
    """The architecture of a config.  Raises InputError if it is not a config, incomplete or inconsistent."""
    if config.entries.get("model_type") is None:
        raise InputError(f"{config.name} has no `model_type`: it is no Hugging Face config.")
    config.check_types()
    text = text_entries(config)
    if text is None:
        return _language_model(config)
    text.check_types()
    model = _language_model(text)
    vision = read_vision(config, model.hidden)
    return replace(model, family=config.family, vision=vision, language="" if vision is None else text.family)


def _language_model(config: Entries) -> Architecture:
    """The language model of a config, in whole layers if debubble's units do not support one of its entries."""
    model = _FAMILIES.get(config.family, read_other)(config)
    entry = entry_beyond_units(config)
    return model if entry is None else replace(model, whole_layers=True, beyond_units=entry)


def _llama(config: Entries) -> Architecture:
    return llama_like(config, mlp_bias=config.flag("mlp_bias", False))


def _qwen3(config: Entries) -> Architecture:
    return llama_like(config, kv_heads=32, head_dim=config.number("head_dim", 128), qk_norm=True)


def _mixtral(config: Entries) -> Architecture:
    experts = Experts(
        count=config.number("num_local_experts", config.get("num_experts", 8)),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("intermediate_size"),
        renormalised=True,
    )
    return llama_like(
        config,
        kv_heads=8,
        per_layer=like_layers(config, mlps=[experts] * config.layers(), theta=1e6),
        norm_eps=config.real("rms_norm_eps", 1e-5),
        qkv_bias=False,
        output_bias=False,
    )


def _qwen3_moe(config: Entries) -> Architecture:
    experts = Experts(
        count=config.number("num_experts", config.get("num_local_experts", 128)),
        per_token=config.number("num_experts_per_tok", 8),
        ffn=config.number("moe_intermediate_size", 768),
        renormalised=bool(config.get("norm_topk_prob", False)),
    )
    mlps = sparse_mlps(config, experts)
    return llama_like(config, kv_heads=4, per_layer=like_layers(config, mlps=mlps), qk_norm=True)


def _gemma_like(config: Entries, *, kv_heads: int, **changes: Any) -> Architecture:
    common: dict[str, Any] = {
        "head_dim": config.number("head_dim", 256),
        "activation": config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "tied": config.flag("tie_word_embeddings", True),
        "padding": config.entries.get("pad_token_id", 0),
        "norm_offset": 1.0,
        "embedding_scale": config.number("hidden_size") ** 0.5,
    }
    return llama_like(config, kv_heads=kv_heads, **{**common, **changes})


def _gemma(config: Entries) -> Architecture:
    activation = config.activation("hidden_act", default="gelu_pytorch_tanh")
    # The first checkpoints have gelu in place of its tanh approximation.
    return _gemma_like(config, kv_heads=16, activation="gelu_pytorch_tanh" if activation == "gelu" else activation)


def _gemma2(config: Entries, *, logit_cap: float | None = 30.0, **fields: Any) -> Architecture:
    return _gemma_like(
        config,
        kv_heads=4,
        norms_results=True,
        attention_scale=config.real("query_pre_attn_scalar", 256) ** -0.5,
        # Null disables the cap, and a missing entry means the default; transformers' Gemma 3 caps only logits.
        attention_cap=None if config.family == "gemma3_text" else config.entries.get("attn_logit_softcapping", 50.0),
        logit_cap=config.entries.get("final_logit_softcapping", logit_cap),
        **fields,
    )


def _gemma3(config: Entries) -> Architecture:
    rotary = config.get("rope_parameters", {})
    scaling = {**config.get("rope_scaling", {}), **(rotary.get("full_attention") or {})}
    full = rope_of(config, {"rope_theta": config.get("rope_theta", 1e6), **scaling})
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **(rotary.get("sliding_attention") or {})}
    layers = tuple(
        Layer(attention=Attention(rope=full if window is None else rope_of(config, local), window=window))
        for window in windows(config)
    )
    return _gemma2(config, logit_cap=None, per_layer=layers, qk_norm=True)


def _gpt2(config: Entries) -> Architecture:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    return Architecture(
        family="gpt2",
        # transformers also accepts the common names in GPT-2 configs.
        per_layer=(Layer(),) * config.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.head_dim(hidden, heads),
        ffn=config.number("n_inner", 4 * hidden),
        vocab=config.number("vocab_size"),
        norm_eps=config.real("layer_norm_epsilon", 1e-5),
        activation=config.activation("activation_function", default="gelu_new"),
        initializer_range=config.real("initializer_range", 0.02),
        gated=False,
        tied=config.flag("tie_word_embeddings", True),
        norm="layernorm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        positions=config.number("n_positions"),
        embedding_dropout=config.real("embd_pdrop", 0.1),
        attention_dropout=config.real("attn_pdrop", 0.1),
        residual_dropout=config.real("resid_pdrop", 0.1),
    )


_FAMILIES: Mapping[str, Callable[[Entries], Architecture]] = {
    "llama": _llama,
    "mistral": partial(llama_like, kv_heads=8, qkv_bias=False, output_bias=False),
    "qwen2": partial(llama_like, kv_heads=32, qkv_bias=True, output_bias=False),
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    **WHOLE_FAMILIES,
    **HYBRIDS,
}
