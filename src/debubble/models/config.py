"""A model as its Hugging Face config describes it: all that costs and modules depend on, read once, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from debubble.ir import InputError, PlannedUnit

Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base, and how longer contexts scale the frequencies."""

    theta: float
    kind: str = "default"
    """transformers' `rope_type`."""
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention whose keys and values are shared by groups of query heads; its sizes are the model's."""

    rope: Rope | None = None
    window: int | None = None
    """How many tokens back it reaches, the token itself included; None: all."""


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A dense MLP; its sizes are the model's."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP."""

    count: int
    per_token: int
    ffn: int
    """Inner width of one expert."""
    shared: int = 0
    """Inner width of the expert that every token passes through."""
    renormalised: bool = False
    """Whether the weights of a token's experts sum to 1."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: what mixes its tokens, and what maps each of them."""

    attention: Attention = Attention()
    mlp: Mlp | Experts = Mlp()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: Llama-like, or GPT-2 (`positions` set)."""

    family: str
    """Hugging Face's `model_type`."""
    per_layer: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of the MLP."""
    vocab: int
    gated: bool = True
    """Whether the MLP multiplies by a gate (SwiGLU, GeGLU)."""
    tied: bool = False
    """Whether the head uses the embedding's table."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """What norms add to their weights (Gemma: 1)."""
    norms_results: bool = False
    """Whether the result of a half-layer passes a second norm (Gemma 2 and 3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the projection after the attention core."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head."""
    positions: int = 0
    """Learned position embeddings (0: rotary)."""
    padding: int | None = None
    """Token whose embedding gets no gradient."""
    activation: str = "silu"
    initializer_range: float = 0.02
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Of the scores; None: 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """Scores x become cap tanh(x / cap)."""
    logit_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    router_balance: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0: there is none."""
    whole_layers: bool = False
    """Whether a layer is one unit, not two halves: the runtime then runs transformers' own modules."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The Hugging Face config that it was read from, unchanged."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"A model's {name} must be at least 1, not {getattr(self, name)}.")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads:"
                " the first number must be a multiple of the second."
            )
        if self.experts is not None and not 1 <= self.experts.per_token <= self.experts.count:
            raise InputError(
                f"{self.experts.per_token} experts per token is impossible with {self.experts.count} experts."
            )

    @staticmethod
    def from_hf(source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`.

        Equal contents are parsed once.

        Args:
            source: The file, a folder with one, or its content.

        Raises:
            InputError: It is no config, incomplete, inconsistent, or of layers that debubble does not know.
        """
        from debubble.models.families import read_config

        return read_config(source)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.per_layer)

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        """What partitioning moves, in model order: embedding, two half-layers (or one whole) per layer, head."""
        parts = ("layer",) if self.whole_layers else ("attention", "mlp")
        inner = (PlannedUnit(part, layer) for layer in range(self.layers) for part in parts)
        return (PlannedUnit("embedding", None), *inner, PlannedUnit("head", None))

    @property
    def experts(self) -> Experts | None:
        """The mixture of the first layer that has one; None for a dense model."""
        return next((layer.mlp for layer in self.per_layer if isinstance(layer.mlp, Experts)), None)

    @property
    def is_gpt2(self) -> bool:
        """Whether positions are learned, as in GPT-2."""
        return self.positions > 0

    @property
    def dropout(self) -> bool:
        """Whether any result is dropped in training."""
        return any((self.embedding_dropout, self.attention_dropout, self.residual_dropout))

    @property
    def remark(self) -> str | None:
        """What one should know of its costs."""
        if not self.whole_layers:
            return None
        return (
            f"'{self.family}' is priced as a Llama of its sizes, in whole layers; `debubble profile` measures what they"
            " really take."
        )

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Weight matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def half_layer_norms(self) -> int:
        """Norms of one half-layer."""
        return 2 if self.norms_results else 1

    def attended(self, layer: int, length: int) -> float:
        """Tokens that a token of a sequence attends to, on average, itself counted half."""
        window = self.per_layer[layer].attention.window
        reach = length if window is None else min(window, length)
        return reach * (1 - reach / (2 * length))

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return isinstance(self.per_layer[layer].mlp, Experts)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of tokens and of learned positions."""
        return (self.vocab + self.positions) * self.hidden

    def attention_parameters(self, layer: int) -> int:
        """Parameters of one attention half-layer, its norm included."""
        h, q, kv = self.hidden, self.attention_width, self.kv_width
        bias = self.qkv_bias * (q + 2 * kv) + self.output_bias * h
        norms = self.half_layer_norms * self.norm_parameters
        return 2 * h * q + 2 * h * kv + bias + self.qk_norm * 2 * self.head_dim + norms

    def mlp_parameters(self, layer: int) -> int:
        """Parameters of one MLP half-layer, its norm, router and experts included."""
        h, n = self.hidden, self.matrices
        match self.per_layer[layer].mlp:
            case Experts() as experts:
                return experts.count * (h + n * h * experts.ffn) + n * h * experts.shared + self.norm_parameters
            case Mlp():
                bias = self.mlp_bias * ((n - 1) * self.ffn + h)
                return n * h * self.ffn + bias + self.half_layer_norms * self.norm_parameters

    def expert_parameters(self, layer: int) -> int:
        """Parameters of the experts of one MLP half-layer alone, which expert parallelism divides."""
        match self.per_layer[layer].mlp:
            case Experts() as experts:
                return experts.count * self.matrices * self.hidden * experts.ffn
            case Mlp():
                return 0

    def layer_parameters(self, layer: int) -> int:
        """Parameters of both halves of a layer."""
        return self.attention_parameters(layer) + self.mlp_parameters(layer)

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and the head's table, tied or not: the last stage has its own copy."""
        return self.vocab * self.hidden + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied table counts once."""
        table = self.vocab * self.hidden if self.tied else 0
        return self.embedding_parameters + self.matrix_parameters(0) + self.head_parameters - table

    @property
    def qkv_layers(self) -> int:
        """Linear layers before the attention core: one in GPT-2, else three."""
        return 1 if self.positions else 3

    def attention_adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on one attention half-layer."""
        h, q = self.hidden, self.attention_width
        return rank * (self.qkv_layers * h + q + 2 * self.kv_width + q + h)

    def mlp_adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on one MLP half-layer; with a mixture of experts attention alone has them."""
        return 0 if self.experts is not None else rank * self.matrices * (self.hidden + self.ffn)

    def trained_parameters(self, rank: int) -> int:
        """Parameters that are trained: those of adapters of that rank, or all (0)."""
        return self.layers * (self.attention_adapters(rank) + self.mlp_adapters(rank)) if rank else self.parameters

    def matrix_parameters(self, rank: int) -> int:
        """Trained parameters in layers, whose matrices Muon orthogonalizes; norms and biases are few and count too."""
        if rank:
            return self.trained_parameters(rank)
        return sum(self.layer_parameters(layer) for layer in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through: of a mixture, only the experts that it is routed to."""
        idle = 0
        for layer in range(self.layers):
            if isinstance(experts := self.per_layer[layer].mlp, Experts):
                idle += self.expert_parameters(layer) // experts.count * (experts.count - experts.per_token)
        return self.parameters - idle
