"""The modules of each stage, as frameworks that split a model by name call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from debubble.exports.layers import StageLayers
from debubble.ir import ExportError
from debubble.models.module_bases import OTHER_BASES, UNNAMED


def hf_names(model: Mapping[str, Any], stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in a Hugging Face causal language model; rotary embeddings, which have no weights, are in every stage."""
    if any(stage.mtp for stage in stages):
        raise ExportError("debubble does not know the names of the modules of multi-token-prediction layers.")
    if model.get("model_type") == "gpt2":
        return _names(
            stages, ["transformer.wte", "transformer.wpe"], "transformer.h.{}", ["transformer.ln_f", "lm_head"]
        )
    family = str(model.get("model_type"))
    if family in UNNAMED:
        raise ExportError(f"debubble does not know the names of the modules of '{family}'; export to megatron.")
    base, embedding, layers, last = OTHER_BASES.get(family, ("model", "embed_tokens", "layers", "norm"))
    names = _names(stages, [f"{base}.{embedding}"], f"{base}.{layers}.{{}}", [f"{base}.{last}", "lm_head"])
    return [[*part, f"{base}.rotary_emb"] for part in names]


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
