"""Builds a model from the sizes that a framework's configuration gives in place of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from debubble.ir import InputError
from debubble.models import Model


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of the mixture-of-experts layers of a decoder.

    Attributes:
        count: Experts per layer.
        per_token: Experts that every token is routed to.
        ffn: Inner width of an expert.
        dense: Layers with a dense MLP in place of experts.
        shared: Inner width of the shared expert; 0: none.
        gate: Whether the shared expert is weighted per token.
        sinks: Whether attention has learned sinks and every second layer a sliding window, as in gpt-oss.
    """

    count: int
    per_token: int
    ffn: int
    dense: tuple[int, ...] = ()
    shared: int = 0
    gate: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention: ranks of queries (None: not compressed) and keys, and widths per head."""

    query_rank: int | None
    rank: int
    content: int
    rotary: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes and architecture of a decoder.

    Attributes:
        activation: `swiglu`, or `gelu` or `squared_relu` without a gate.
        positions: `rotary`, `learned` or `alibi`.
        post_norm: Whether dense layers also normalize the outputs of attention and MLP.
        length: Number of learned positions.
        norm_eps: Epsilon of the norms; None: the family's default.
        initializer_range: Standard deviation of initial weights; None: the family's default.
        rotary: Config entries on rotary positions, such as `rope_theta`; empty: the family's defaults.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int | None = None
    activation: str = "swiglu"
    rms_norm: bool = True
    positions: str = "rotary"
    tied: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    post_norm: bool = False
    length: int = 4096
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    mtp_layers: int = 0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    norm_eps: float | None = None
    initializer_range: float | None = None
    rotary: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> Model:
        """The model, as a member of a Hugging Face family with this architecture.

        Raises:
            InputError: if there is no such family.
        """
        plain = self.experts is None and self.latent is None and self._is_multi_head
        if plain and (self.activation, self.rms_norm, self.positions) == ("gelu", False, "learned"):
            return Model.from_hf(self._gpt2())
        family, more = self._latent() or self._sparse() or self._dense()
        if self.mtp_layers and family not in _MTP_FAMILIES:
            raise InputError(
                f"Multi-token prediction is not read for models like {family}: give the model's config.json, with"
                " num_nextn_predict_layers, with --model."
            )
        return Model.from_hf({"model_type": family, **self._common(), **more})

    @property
    def _is_multi_head(self) -> bool:
        """Tell whether attention is multi-head, without grouped keys and values or another head width."""
        return self.kv_heads == self.heads and self.head_dim in (None, self.hidden // self.heads)

    def _common(self) -> Mapping[str, Any]:
        return {
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "intermediate_size": self.ffn, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "max_position_embeddings": self.length,
            **({"head_dim": self.head_dim} if self.head_dim is not None and self.latent is None else {}),
            **({"num_nextn_predict_layers": self.mtp_layers} if self.mtp_layers else {}),
            **({"attention_dropout": self.attention_dropout} if self.attention_dropout else {}),
            **self._numerics("rms_norm_eps"),
            **(self.rotary if self.positions == "rotary" else {}),
        }  # fmt: skip

    def _numerics(self, norm: str) -> dict[str, float]:
        """Known entries that cost nothing and that running the model needs."""
        known = {norm: self.norm_eps, "initializer_range": self.initializer_range}
        return {name: value for name, value in known.items() if value is not None}

    def _gpt2(self) -> dict[str, Any]:
        return {
            "model_type": "gpt2", "n_layer": self.layers, "n_embd": self.hidden, "n_head": self.heads,
            "n_inner": self.ffn, "vocab_size": self.vocab, "n_positions": self.length,
            "tie_word_embeddings": self.tied, "attn_pdrop": self.attention_dropout,
            "resid_pdrop": self.hidden_dropout, "embd_pdrop": self.hidden_dropout,
            **self._numerics("layer_norm_epsilon"),
        }  # fmt: skip

    def _dense(self) -> tuple[str, Mapping[str, Any]]:
        """A dense decoder: Llama-like, or with parts of GPT-2."""
        plain = self.activation, self.rms_norm, self.positions
        if plain == ("swiglu", True, "rotary"):
            if self.post_norm and not (self.mtp_layers or self.qk_norm):
                return "glm4", {"attention_bias": self.qkv_bias}
            if self.mtp_layers and not self.qk_norm:
                # GLM-4.5 is the family with grouped attention that has MTP layers and may have dense layers.
                experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": self.layers}
                return "glm4_moe", {"attention_bias": self.qkv_bias, **experts}
            return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama", {}
        norm = {} if self.rms_norm else {"layer_norm_eps": 1e-5 if self.norm_eps is None else self.norm_eps}
        dropped = {"hidden_dropout": self.hidden_dropout} if self.hidden_dropout else {}
        if self.positions == "alibi" and self.activation == "gelu":
            return "bloom", {**norm, **dropped, "use_bias": True}
        if self.activation not in ("swiglu", "gelu", "squared_relu"):
            raise InputError(
                f"The configuration describes a model with the activation {self.activation}, which is not read here:"
                " give its config.json with --model."
            )
        family = "stablelm" if self.activation == "swiglu" else "arcee"
        return family, {**norm, **dropped, "use_qkv_bias": self.qkv_bias, "use_bias": self.linear_bias}

    def _sparse(self) -> tuple[str, Mapping[str, Any]] | None:
        experts = self.experts
        if experts is None:
            return None
        routed = {"num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.ffn}
        if experts.sinks:
            kinds = ["sliding_attention", "full_attention"] * ((self.layers + 1) // 2)
            widths = {"num_local_experts": experts.count, "intermediate_size": experts.ffn}
            return "gpt_oss", {**routed, **widths, "sliding_window": 128, "layer_types": kinds[: self.layers]}
        if self.activation != "swiglu":
            return self._sparse_without_gate(experts, routed)
        interleaved = experts.dense != tuple(range(len(experts.dense)))
        if interleaved and experts.shared == experts.ffn and not (experts.gate or self.qk_norm or self.mtp_layers):
            return "llama4_text", {
                "num_experts_per_tok": experts.per_token, "num_local_experts": experts.count,
                "intermediate_size": experts.ffn, "intermediate_size_mlp": self.ffn, "attention_chunk_size": None,
                "moe_layers": [layer for layer in range(self.layers) if layer not in experts.dense],
            }  # fmt: skip
        if self.mtp_layers or (experts.shared and not experts.gate):
            return "glm4_moe", {
                **routed, **self._first_dense(experts), "use_qk_norm": self.qk_norm, "attention_bias": self.qkv_bias,
            }  # fmt: skip
        listed = {"num_experts": experts.count, "mlp_only_layers": list(experts.dense)}
        if experts.gate:
            return "qwen2_moe", {
                **routed, **listed, "shared_expert_intermediate_size": experts.shared, "qkv_bias": self.qkv_bias,
            }  # fmt: skip
        if self.qk_norm or experts.dense:
            return "qwen3_moe", {**routed, **listed}
        return "mixtral", {
            "num_experts_per_tok": experts.per_token, "num_local_experts": experts.count,
            "intermediate_size": experts.ffn,
        }  # fmt: skip

    def _sparse_without_gate(self, experts: ExpertSizes, routed: Mapping[str, int]) -> tuple[str, Mapping[str, Any]]:
        """Experts of two matrices, which no Hugging Face family combines with attention in every layer."""
        family, parts = self._dense()
        return family, {
            **parts, **routed, "num_experts": experts.count, "mlp_only_layers": list(experts.dense),
            "shared_expert_intermediate_size": experts.shared, "experts_bias": self.linear_bias,
        }  # fmt: skip

    def _first_dense(self, experts: ExpertSizes) -> Mapping[str, int]:
        """Shared experts as a multiple of the routed width; dense layers must come first."""
        number, remainder = divmod(experts.shared, experts.ffn)
        if remainder or experts.dense != tuple(range(len(experts.dense))):
            raise InputError(
                "The configuration describes a shared expert of another width, or dense layers between those with"
                " experts: give the model's config.json with --model."
            )
        return {
            "n_routed_experts": experts.count,
            "n_shared_experts": number,
            "first_k_dense_replace": len(experts.dense),
        }

    def _latent(self) -> tuple[str, Mapping[str, Any]] | None:
        latent = self.latent
        if latent is None:
            return None
        if self.activation != "swiglu":
            raise InputError(
                f"The configuration describes latent attention next to MLPs with the activation {self.activation},"
                " which is not modelled: to predict it with gated MLPs, give --args '--swiglu --ffn-hidden-size N', N"
                " being two thirds of its width."
            )
        attention = {
            "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank, "qk_nope_head_dim": latent.content,
            "qk_rope_head_dim": latent.rotary, "v_head_dim": latent.value,
        }  # fmt: skip
        if self.experts is None:
            return "youtu", attention
        routed = {"num_experts_per_tok": self.experts.per_token, "moe_intermediate_size": self.experts.ffn}
        return "deepseek_v3", {**attention, **routed, **self._first_dense(self.experts)}


_MTP_FAMILIES = ("glm4_moe", "deepseek_v3")
"""Families with multi-token-prediction layers."""
