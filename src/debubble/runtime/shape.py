"""The shape of a model, read from its Hugging Face config: what building its units needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from debubble.ir import InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: base, and how longer contexts scale the frequencies."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder-only transformer: Llama-like (`rope` set) or GPT-2 (`positions` set)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    activation: str
    initializer_range: float
    tied: bool
    rope: Rope | None = None
    positions: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """Attention reaches that many tokens back, itself included; None: all."""
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    @property
    def is_gpt2(self) -> bool:
        return self.rope is None


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape that a Hugging Face config describes.

    Raises InputError for a family that the runtime does not build, or a missing entry.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"The runtime cannot build the model type '{family}'; it builds {', '.join(FAMILIES)}.")
    try:
        return _gpt2(config) if family == "gpt2" else _llama(config, str(family))
    except KeyError as error:
        raise InputError(f"The model's config has no entry {error}.") from error


def _llama(config: Mapping[str, Any], family: str) -> Shape:
    heads = int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", False))
    windowed = family == "mistral" or bool(config.get("use_sliding_window"))
    if windowed and family != "mistral":
        raise InputError(
            f"The runtime has no per-layer sliding window for '{family}'; set use_sliding_window to false."
        )
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=config.get("hidden_act", "silu"),
        initializer_range=config.get("initializer_range", 0.02),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        window=config.get("sliding_window") if windowed else None,
        attention_dropout=config.get("attention_dropout") or 0.0,
    )


def _rope(config: Mapping[str, Any]) -> Rope:
    # transformers 5 writes `rope_parameters`; before it, `rope_theta` and `rope_scaling`.
    entries = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = entries.get("rope_theta", config.get("rope_theta", 10000.0))
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


def _gpt2(config: Mapping[str, Any]) -> Shape:
    hidden, heads = config["n_embd"], config["n_head"]
    return Shape(
        layers=config.get("n_layer") or config["num_hidden_layers"],
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
