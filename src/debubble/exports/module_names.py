"""The modules of each stage, as frameworks that split a model by name call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from debubble.exports.layers import StageLayers


def hf_names(model: Mapping[str, Any], stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in a Hugging Face causal language model; rotary embeddings, which have no weights, are in every stage."""
    if model.get("model_type") == "gpt2":
        return _names(
            stages, ["transformer.wte", "transformer.wpe"], "transformer.h.{}", ["transformer.ln_f", "lm_head"]
        )
    names = _names(stages, ["model.embed_tokens"], "model.layers.{}", ["model.norm", "lm_head"])
    return [[*part, "model.rotary_emb"] for part in names]


def torchtitan_names(stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in torchtitan's own models."""
    return _names(stages, ["tok_embeddings"], "layers.{}", ["norm", "lm_head"])


def _names(stages: Sequence[StageLayers], first: list[str], layer: str, last: list[str]) -> list[list[str]]:
    return [
        [
            *(first if stage.embedding else []),
            *(layer.format(each.index) for each in stage.layers),
            *(last if stage.head else []),
        ]
        for stage in stages
    ]
