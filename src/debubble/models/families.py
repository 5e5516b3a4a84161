"""Reads Hugging Face's `config.json` without transformers.

One function per family of configs; each says which entries it needs and what its model does without them (the
defaults are transformers' own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from debubble.ir import InputError
from debubble.models.architecture import Architecture, Experts, Layer, Mlp
from debubble.models.entries import Entries
from debubble.models.generic import read_other
from debubble.models.layers import (
    first_dense,
    layer_kinds,
    like_layers,
    mtp_layers,
    rope_of,
    sparse_mlps,
    unpriced_error,
    windows,
)
from debubble.models.mixers import Attention, LatentAttention, LinearAttention, StateSpace
from debubble.models.unit_entries import entry_beyond_units
from debubble.models.vision import read_vision, text_entries


def read_architecture(config: Entries) -> Architecture:
    """The architecture that a config describes.  Raises InputError if it is none, incomplete or inconsistent."""
    if config.entries.get("model_type") is None:
        raise InputError(f"{config.name} has no `model_type`: it is no Hugging Face config.")
    config.check_types()
    text = text_entries(config)
    if text is None:
        return _language_model(config)
    text.check_types()
    model = _language_model(text)
    return replace(model, family=config.family, vision=read_vision(config, model.hidden))


def _language_model(config: Entries) -> Architecture:
    """The model of a config without towers: in whole layers if debubble's own units lack one of its entries."""
    model = _FAMILIES.get(config.family, read_other)(config)
    entry = entry_beyond_units(config)
    return model if entry is None else replace(model, whole_layers=True, beyond_units=entry)


def _llama_like(config: Entries, *, kv_heads: int | None = None, **changes: Any) -> Architecture:
    """Llama and what differs from it in a few entries: the default of `kv_heads`, and fields in `changes`."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    given = "num_key_value_heads" in config.entries
    bias = config.flag("attention_bias", False)
    fields: dict[str, Any] = {
        "family": config.family,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", heads if given else kv_heads or heads),
        "head_dim": changes.get("head_dim") or config.head_dim(hidden, heads),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "tied": config.flag("tie_word_embeddings", False),
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "activation": config.activation("hidden_act", default="silu"),
        "initializer_range": config.real("initializer_range", 0.02),
        "padding": config.get("pad_token_id"),
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_dropout": config.real("attention_dropout", 0.0),
        # transformers adds the auxiliary loss where logits of routers are asked for.
        "router_balance": config.real("router_aux_loss_coef", 0.001) if config.get("output_router_logits") else 0.0,
    }
    if "per_layer" not in changes:
        fields["per_layer"] = like_layers(config)
    return Architecture(**{**fields, **changes})


def _llama(config: Entries) -> Architecture:
    return _llama_like(config, mlp_bias=config.flag("mlp_bias", False))


def _qwen3(config: Entries) -> Architecture:
    return _llama_like(config, kv_heads=32, head_dim=config.number("head_dim", 128), qk_norm=True)


def _mixtral(config: Entries) -> Architecture:
    experts = Experts(
        count=config.number("num_local_experts", config.get("num_experts", 8)),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("intermediate_size"),
        renormalised=True,
    )
    return _llama_like(
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
    return _llama_like(config, kv_heads=4, per_layer=like_layers(config, mlps=mlps), qk_norm=True)


def _gemma_like(config: Entries, *, kv_heads: int, **changes: Any) -> Architecture:
    common: dict[str, Any] = {
        "head_dim": config.number("head_dim", 256),
        "activation": config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "tied": config.flag("tie_word_embeddings", True),
        "padding": config.entries.get("pad_token_id", 0),
        "norm_offset": 1.0,
        "embedding_scale": config.number("hidden_size") ** 0.5,
    }
    return _llama_like(config, kv_heads=kv_heads, **{**common, **changes})


def _gemma(config: Entries) -> Architecture:
    activation = config.activation("hidden_act", default="gelu_pytorch_tanh")
    # The first checkpoints say gelu, and mean its approximation.
    return _gemma_like(config, kv_heads=16, activation="gelu_pytorch_tanh" if activation == "gelu" else activation)


def _gemma2(config: Entries, *, logit_cap: float | None = 30.0, **fields: Any) -> Architecture:
    return _gemma_like(
        config,
        kv_heads=4,
        norms_results=True,
        attention_scale=config.real("query_pre_attn_scalar", 256) ** -0.5,
        # Null means none here, and a missing entry the default; transformers' Gemma 3 caps logits alone.
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
        # transformers lets GPT-2 configs use the common names too.
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


def _of_layers(config: Entries, layers: Sequence[Layer], **changes: Any) -> Architecture:
    """A model that runs with transformers' own modules, of these layers."""
    return _llama_like(config, per_layer=tuple(layers), whole_layers=True, **changes)


def _deepseek(config: Entries) -> Architecture:
    """DeepSeek-V2 and V3, and Kimi-K2: latent attention, first layers dense, shared experts."""
    content, rotary = config.number("qk_nope_head_dim", 128), config.number("qk_rope_head_dim", 64)
    heads = config.number("num_attention_heads")
    # Null means none; DeepSeek-V2 Lite has no latent vector of queries.
    compressed = config.entries.get("q_lora_rank", 1536) is not None
    attention = LatentAttention(
        heads=heads,
        query_rank=config.number("q_lora_rank", 1536) if compressed else None,
        rank=config.number("kv_lora_rank", 512),
        content=content,
        rotary=rotary,
        value=config.number("v_head_dim", 128),
        bias=config.flag("attention_bias", False),
    )
    if config.family == "deepseek_v2":
        mlps = first_dense(config, count=64, ffn=1407, shared=2, per_token=None, dense=0)
    else:
        mlps = first_dense(config, count=256, ffn=2048, shared=1, per_token=8, dense=3)
    layers = [Layer(attention=attention, mlp=mlp) for mlp in mlps]
    return _of_layers(config, layers, kv_heads=heads, head_dim=content + rotary, mtp_layers=mtp_layers(config))


def _glm4_moe(config: Entries) -> Architecture:
    mlps = first_dense(config, count=128, ffn=1408, shared=1, per_token=8, dense=1)
    return _of_layers(
        config,
        [Layer(mlp=mlp) for mlp in mlps],
        kv_heads=8,
        qk_norm=config.flag("use_qk_norm", False),
        output_bias=False,
        mtp_layers=mtp_layers(config),
    )


def _gpt_oss(config: Entries) -> Architecture:
    experts = Experts(
        count=config.number("num_local_experts", 128),
        per_token=config.number("num_experts_per_tok", config.get("experts_per_token", 4)),
        ffn=config.number("intermediate_size"),
        bias=True,
    )
    layers = [Layer(attention=Attention(window=w, sinks=True), mlp=experts) for w in windows(config, default=128)]
    bias = config.flag("attention_bias", True)
    return _of_layers(
        config, layers, kv_heads=8, head_dim=config.number("head_dim", 64), qkv_bias=bias, output_bias=bias
    )


def _llama4(config: Entries) -> Architecture:
    """Llama 4's language model: dense layers and mixtures take turns; most layers attend within chunks."""
    count, inner = config.layers(), config.number("intermediate_size", 8192)
    step = config.number("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers", range(step - 1, count, step))
    rotary = config.get("no_rope_layers") or [
        (i + 1) % config.number("no_rope_layer_interval", 4) for i in range(count)
    ]
    chunk = config.entries.get("attention_chunk_size", 8192)
    experts = Experts(
        count=config.number("num_local_experts", 16),
        per_token=config.number("num_experts_per_tok", 1),
        ffn=inner,
        shared=inner,
    )
    layers = [
        Layer(attention=Attention(chunk=chunk if rotary[i] else None), mlp=experts if i in sparse else Mlp())
        for i in range(count)
    ]
    return _of_layers(
        config,
        layers,
        kv_heads=8,
        head_dim=config.number("head_dim", 128),
        ffn=config.number("intermediate_size_mlp", 16384),
    )


def _qwen3_next(config: Entries) -> Architecture:
    """Three layers of linear attention, then one of attention with gated results."""
    linear = LinearAttention(
        key_heads=config.number("linear_num_key_heads", 16),
        value_heads=config.number("linear_num_value_heads", 32),
        key=config.number("linear_key_head_dim", 128),
        value=config.number("linear_value_head_dim", 128),
        kernel=config.number("linear_conv_kernel_dim", 4),
    )
    experts = Experts(
        count=config.number("num_experts", 512),
        per_token=config.number("num_experts_per_tok", 10),
        ffn=config.number("moe_intermediate_size", 512),
        shared=config.number("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    count, every = config.layers(), config.number("full_attention_interval", 4)
    kinds = layer_kinds(
        config, default=["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    )
    layers = [
        Layer(attention=linear if kind == "linear_attention" else Attention(gated=True), mlp=mlp)
        for kind, mlp in zip(kinds, sparse_mlps(config, experts), strict=True)
    ]
    return _of_layers(config, layers, kv_heads=2, head_dim=config.number("head_dim", 256), qk_norm=True)


def _nemotron_h(config: Entries) -> Architecture:
    """Every layer is a state space, an attention, an MLP or a mixture of experts, under one norm."""
    if config.get("moe_latent_size"):
        raise unpriced_error(config, "moe_latent_size")
    space = StateSpace(
        heads=config.number("mamba_num_heads", 128),
        head_dim=config.number("mamba_head_dim", 64),
        state=config.number("ssm_state_size", 128),
        groups=config.number("n_groups", 8),
        kernel=config.number("conv_kernel", 4),
        chunk=config.number("chunk_size", 128),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )
    experts = Experts(
        count=config.number("n_routed_experts", 8),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("moe_intermediate_size", 7688),
        shared=config.number("moe_shared_expert_intermediate_size", 7688),
    )
    blocks = {
        "linear_attention": Layer(attention=space, mlp=None),
        "full_attention": Layer(mlp=None),
        "mlp": Layer(attention=None),
        "moe": Layer(attention=None, mlp=experts),
    }
    blocks |= {
        "M": blocks["linear_attention"], "mamba": blocks["linear_attention"], "*": blocks["full_attention"],
        "attention": blocks["full_attention"], "-": blocks["mlp"], "E": blocks["moe"],
    }  # fmt: skip
    kinds = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types") or ()
    for kind in kinds:
        if kind not in blocks:
            raise unpriced_error(config, str(kind))
    return _of_layers(
        config,
        [blocks[kind] for kind in kinds],
        kv_heads=8,
        head_dim=config.number("head_dim", 128),
        gated=False,
        mlp_bias=config.flag("mlp_bias", False),
        norm_eps=config.real("layer_norm_epsilon", 1e-5),
    )


_FAMILIES: Mapping[str, Callable[[Entries], Architecture]] = {
    "llama": _llama,
    "mistral": partial(_llama_like, kv_heads=8, qkv_bias=False, output_bias=False),
    "qwen2": partial(_llama_like, kv_heads=32, qkv_bias=True, output_bias=False),
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
}
