"""The model of a job, by a hub's name for it, or by its sizes where a framework has no Hugging Face config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from debubble.ir import InputError
from debubble.models import Model, models


def hub_model(name: str) -> Model | None:
    """The known model that a hub's name such as `meta-llama/Meta-Llama-3-8B` means; None if none is."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    short = re.sub(r"-(instruct|hf|base|it|chat|v0\.\d)\b", "", last)
    names = (last, short, short.replace("llama-", "llama"), re.sub(r"-(?=\d)", "", short, count=1))
    return next((models[each] for each in names if each in models), None)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes and parts of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int | None = None
    gated: bool = True
    rms_norm: bool = True
    rotary: bool = True
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 4096
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int | None = None
    mtp_layers: int = 0

    def model(self) -> Model:
        """The model of one of Hugging Face's families that has these parts.

        Raises:
            InputError: if none has.
        """
        return Model.from_hf(dict(self._config()))

    def _config(self) -> Mapping[str, Any]:
        if not self.gated and not self.rms_norm and not self.rotary and not self.experts:
            return {
                "model_type": "gpt2", "n_layer": self.layers, "n_embd": self.hidden, "n_head": self.heads,
                "n_inner": self.ffn, "vocab_size": self.vocab, "n_positions": self.positions,
                "tie_word_embeddings": self.tied,
            }  # fmt: skip
        if not (self.gated and self.rms_norm and self.rotary):
            parts = {"SwiGLU": self.gated, "RMSNorm": self.rms_norm, "rotary positions": self.rotary}
            missing = " and ".join(name for name, there in parts.items() if not there)
            raise InputError(
                f"The configuration describes a model without {missing}, which is neither Llama-like nor GPT-2: give"
                " its config.json with --model."
            )
        common = {
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "intermediate_size": self.ffn, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "max_position_embeddings": self.positions,
            **({"head_dim": self.head_dim} if self.head_dim is not None else {}),
        }  # fmt: skip
        if self.mtp_layers:
            return self._with_further_tokens(common)
        if not self.experts:
            family = "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"
            return {"model_type": family, **common}
        routed = {"num_experts_per_tok": self.experts_per_token}
        if self.qk_norm:
            widths = {"num_experts": self.experts, "moe_intermediate_size": self.expert_ffn or self.ffn}
            return {"model_type": "qwen3_moe", **common, **routed, **widths}
        widths = {"num_local_experts": self.experts, "intermediate_size": self.expert_ffn or self.ffn}
        return {"model_type": "mixtral", **common, **routed, **widths}

    def _with_further_tokens(self, common: Mapping[str, Any]) -> Mapping[str, Any]:
        """GLM-4.5, whose layers may all be dense: of the families with grouped attention it predicts further tokens."""
        if self.qk_norm or self.experts:
            raise InputError(
                "The configuration describes multi-token prediction with experts or normed queries: give the model's"
                " config.json, with num_nextn_predict_layers, with --model."
            )
        return {
            "model_type": "glm4_moe", **common, "attention_bias": self.qkv_bias, "n_routed_experts": 2,
            "num_experts_per_tok": 1, "first_k_dense_replace": self.layers,
            "num_nextn_predict_layers": self.mtp_layers,
        }  # fmt: skip
