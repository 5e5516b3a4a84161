"""The shape of a model: what building its units needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
class Experts:
    """The mixture of experts that a layer has instead of an MLP."""

    count: int
    per_token: int
    ffn: int
    """Inner width of one expert."""
    renormalised: bool
    """Whether the weights of a token's experts sum to 1."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What may differ from layer to layer."""

    rope: Rope | None = None
    window: int | None = None
    """Attention reaches that many tokens back, itself included; None: all."""
    experts: Experts | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer: Llama-like, or GPT-2 (`positions` set)."""

    family: str
    """Hugging Face's `model_type`."""
    per_layer: tuple[Layer, ...]
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
    positions: int = 0
    """Learned position embeddings (0: rotary)."""
    padding: int | None = None
    """Token whose embedding gets no gradient."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    """What norms add to their weights (Gemma: 1)."""
    norms_results: bool = False
    """Whether the result of a half-layer passes a norm before it is added to the residual stream."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """Scores x become cap tanh(x / cap)."""
    logit_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    router_balance: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0: there is none."""
    residual_dropout: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.per_layer)

    @property
    def is_gpt2(self) -> bool:
        return self.positions > 0
