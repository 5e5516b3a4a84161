"""Reads a model's shape from its Hugging Face config, one function per family.

Entries that a config leaves out have transformers' own defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from debubble.ir import InputError
from debubble.models.layer_types import expert_layers, sliding_layers, windows
from debubble.runtime.models.shape import Experts, Layer, Rope, Shape

Config = Mapping[str, Any]


def read_shape(config: Config) -> Shape:
    """The shape that a Hugging Face config describes.

    Raises InputError for a family or a feature that the runtime does not build, or a missing entry.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise InputError(f"The runtime cannot build the model type '{family}'; it builds {', '.join(_FAMILIES)}.")
    if config.get("use_bidirectional_attention"):
        raise InputError("The runtime has causal attention alone: set use_bidirectional_attention to false.")
    try:
        return _FAMILIES[family](config)
    except KeyError as error:
        raise InputError(f"The model's config has no entry {error}.") from error


def _llama_like(config: Config, **changes: Any) -> Shape:
    """Llama and what differs from it in a few entries; `changes` override."""
    heads = int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", False))
    shape: dict[str, Any] = {
        "family": config["model_type"],
        "per_layer": _layers(config),
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": config.get("hidden_act", "silu"),
        "initializer_range": config.get("initializer_range", 0.02),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "padding": config.get("pad_token_id"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        # Transformers adds the auxiliary loss where logits of routers are asked for.
        "router_balance": config.get("router_aux_loss_coef", 0.001) if config.get("output_router_logits") else 0.0,
    }
    return Shape(**{**shape, **changes})


def _mistral(config: Config) -> Shape:
    return _llama_like(config, qkv_bias=False, output_bias=False, mlp_bias=False)


def _qwen2(config: Config) -> Shape:
    return _llama_like(config, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: Config) -> Shape:
    return _llama_like(config, head_dim=config.get("head_dim") or 128, qk_norm=True)


def _mixtral(config: Config) -> Shape:
    if config.get("router_jitter_noise"):
        raise InputError("The runtime has no noise in routers: set router_jitter_noise to 0.")
    experts = Experts(
        count=config.get("num_local_experts") or config.get("num_experts") or 8,
        per_token=config.get("num_experts_per_tok", 2),
        ffn=config["intermediate_size"],
        renormalised=True,
    )
    return _llama_like(
        config,
        per_layer=_layers(config, experts=experts, theta=1e6),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        qkv_bias=False,
        output_bias=False,
    )


def _qwen3_moe(config: Config) -> Shape:
    experts = Experts(
        count=config.get("num_experts") or config["num_local_experts"],
        per_token=config.get("num_experts_per_tok", 8),
        ffn=config["moe_intermediate_size"],
        renormalised=bool(config.get("norm_topk_prob", False)),
    )
    return _llama_like(config, per_layer=_layers(config, experts=experts), qk_norm=True)


def _gemma(config: Config, **changes: Any) -> Shape:
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    common: dict[str, Any] = {
        "head_dim": config.get("head_dim", 256),
        # The first checkpoints say gelu, and mean its approximation.
        "activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "padding": config.get("pad_token_id", 0),
        "norm_offset": 1.0,
        "embedding_scale": config["hidden_size"] ** 0.5,
    }
    return _llama_like(config, **{**common, **changes})


def _gemma2(config: Config, **changes: Any) -> Shape:
    common: dict[str, Any] = {
        "norms_results": True,
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": config.get("attn_logit_softcapping", 50.0),
        "logit_cap": config.get("final_logit_softcapping", 30.0),
    }
    return _gemma(config, **{**common, **changes})


def _gemma3(config: Config) -> Shape:
    rotary = config.get("rope_parameters") or {}
    scaling = {**(config.get("rope_scaling") or {}), **rotary.get("full_attention", {})}
    full = _rope_of({"rope_theta": config.get("rope_theta", 1e6), **scaling})
    local = _rope_of({"rope_theta": config.get("rope_local_base_freq", 1e4), **rotary.get("sliding_attention", {})})
    kinds = zip(sliding_layers(config), windows(config), strict=True)
    return _gemma2(
        config,
        per_layer=tuple(Layer(rope=local if sliding else full, window=window) for sliding, window in kinds),
        qk_norm=True,
        attention_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
    )


def _layers(config: Config, *, experts: Experts | None = None, theta: float = 10000.0) -> tuple[Layer, ...]:
    """The layers of a family with one kind of rotary positions, whose base is `theta` by default."""
    rope = _rope(config, theta=theta)
    kinds = zip(windows(config), expert_layers(config), strict=True)
    return tuple(Layer(rope=rope, window=window, experts=experts if moe else None) for window, moe in kinds)


def _rope(config: Config, *, theta: float = 10000.0) -> Rope:
    # transformers 5 writes `rope_parameters`; before it, `rope_theta` and `rope_scaling`.
    entries = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return _rope_of({"rope_theta": config.get("rope_theta", theta), **entries})


def _rope_of(entries: Config) -> Rope:
    theta = entries["rope_theta"]
    match entries.get("rope_type", entries.get("type", "default")):
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=entries["factor"])
        case "llama3":
            return Rope(
                theta=theta,
                kind="llama3",
                factor=entries["factor"],
                low=entries["low_freq_factor"],
                high=entries["high_freq_factor"],
                original_length=entries["original_max_position_embeddings"],
            )
        case other:
            raise InputError(f"The runtime does not know the rotary scaling '{other}'; it knows linear and llama3.")


def _gpt2(config: Config) -> Shape:
    hidden, heads = config["n_embd"], config["n_head"]
    return Shape(
        family="gpt2",
        per_layer=(Layer(),) * (config.get("n_layer") or config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=config.get("n_inner") or 4 * hidden,
        vocab=config["vocab_size"],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=config.get("activation_function", "gelu_new"),
        initializer_range=config.get("initializer_range", 0.02),
        tied=bool(config.get("tie_word_embeddings", True)),
        positions=config["n_positions"],
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_dropout=config.get("embd_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
        residual_dropout=config.get("resid_pdrop", 0.1),
    )


_FAMILIES: Mapping[Any, Callable[[Config], Shape]] = {
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
