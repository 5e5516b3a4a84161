"""A model's shape: all that its costs depend on, and its exact number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from debubble.ir import InputError

Norm = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that replaces the MLP in the layers that are not dense."""

    count: int
    per_token: int
    ffn: int
    """Inner width of one expert."""
    shared: int = 0
    """Inner width of the expert that every token passes through."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have a plain MLP instead."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer.  `config` is the Hugging Face config that it came from, unchanged."""

    family: str
    """Hugging Face's `model_type`."""
    hidden: int
    layers: int
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
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the projection after the attention core."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head."""
    positions: int = 0
    """Learned position embeddings (0: rotary)."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens back attention reaches (None: all); empty: all, in every layer."""
    norms_results: bool = False
    """Whether the result of a half-layer passes a second norm (Gemma 2 and 3)."""
    dropout: bool = False
    experts: Experts | None = None
    whole_layers: bool = False
    """Whether a layer is one unit, not two halves: the runtime then runs transformers' own modules."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

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
    def from_hf(source: str | Path | Mapping[str, Any]) -> Model:
        """Read a Hugging Face `config.json`, a folder with one, or its content.

        Raises InputError with one sentence if it is none, incomplete, inconsistent, or of an unknown model_type.
        """
        from debubble.models.families import parse

        return parse(source)

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
        """Of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def half_layer_norms(self) -> int:
        """Norms of one half-layer."""
        return 2 if self.norms_results else 1

    def attended(self, layer: int, length: int) -> float:
        """Tokens that a token of a sequence attends to, on average, itself counted half."""
        window = self.windows[layer] if self.windows else None
        reach = length if window is None else min(window, length)
        return reach * (1 - reach / (2 * length))

    def is_moe(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Of one attention half-layer, its norm included."""
        h, q, kv = self.hidden, self.attention_width, self.kv_width
        bias = self.qkv_bias * (q + 2 * kv) + self.output_bias * h
        norms = self.half_layer_norms * self.norm_parameters
        return 2 * h * q + 2 * h * kv + bias + self.qk_norm * 2 * self.head_dim + norms

    def mlp_parameters(self, layer: int) -> int:
        """Of one MLP half-layer, its norm, router and experts included."""
        h, n = self.hidden, self.matrices
        if self.is_moe(layer):
            assert self.experts is not None
            experts = self.experts.count * (h + n * h * self.experts.ffn)
            return experts + n * h * self.experts.shared + self.norm_parameters
        bias = self.mlp_bias * ((n - 1) * self.ffn + h)
        return n * h * self.ffn + bias + self.half_layer_norms * self.norm_parameters

    def expert_parameters(self, layer: int) -> int:
        """Of the experts of one MLP half-layer alone, which expert parallelism divides."""
        if not self.is_moe(layer):
            return 0
        assert self.experts is not None
        return self.experts.count * self.matrices * self.hidden * self.experts.ffn

    @property
    def head_parameters(self) -> int:
        """Of the final norm and the head's table, tied or not: in a pipeline the last stage has its own copy."""
        return self.vocab * self.hidden + self.norm_parameters

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied table counts once."""
        layers = sum(self.attention_parameters + self.mlp_parameters(layer) for layer in range(self.layers))
        table = self.vocab * self.hidden if self.tied else 0
        return self.embedding_parameters + layers + self.head_parameters - table

    @property
    def qkv_layers(self) -> int:
        """Linear layers before the attention core: one in GPT-2, else three."""
        return 1 if self.positions else 3

    def attention_adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on one attention half-layer."""
        h, q = self.hidden, self.attention_width
        return rank * (self.qkv_layers * h + q + 2 * self.kv_width + q + h)

    def mlp_adapters(self, rank: int) -> int:
        """The same of one MLP half-layer; models with a mixture of experts have adapters on attention alone."""
        return 0 if self.experts is not None else rank * self.matrices * (self.hidden + self.ffn)

    def trained_parameters(self, rank: int) -> int:
        """Of the whole model, if its adapters of that rank are trained, or itself (0)."""
        return self.layers * (self.attention_adapters(rank) + self.mlp_adapters(rank)) if rank else self.parameters

    def matrix_parameters(self, rank: int) -> int:
        """Those of them in the layers, whose matrices Muon orthogonalizes; norms and biases are few and count too."""
        if rank:
            return self.trained_parameters(rank)
        return sum(self.attention_parameters + self.mlp_parameters(layer) for layer in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Those that one token passes through: of a mixture, only the experts that it is routed to."""
        idle = 0
        if self.experts is not None:
            held = sum(self.expert_parameters(layer) for layer in range(self.layers))
            idle = held // self.experts.count * (self.experts.count - self.experts.per_token)
        return self.parameters - idle
