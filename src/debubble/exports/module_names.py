"""The modules of each stage, as frameworks that split a model by name call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from debubble.exports.layers import StageLayers
from debubble.ir import ExportError


def hf_names(model: Mapping[str, Any], stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in a Hugging Face causal language model; rotary embeddings, which have no weights, are in every stage."""
    if any(stage.mtp for stage in stages):
        raise ExportError("debubble does not know the names of the modules of multi-token-prediction layers.")
    if model.get("model_type") == "gpt2":
        return _names(
            stages, ["transformer.wte", "transformer.wpe"], "transformer.h.{}", ["transformer.ln_f", "lm_head"]
        )
    family = str(model.get("model_type"))
    if family in _UNNAMED:
        raise ExportError(f"debubble does not know the names of the modules of '{family}'; export to megatron.")
    base, embedding, layers, last = _OTHERS.get(family, ("model", "embed_tokens", "layers", "norm"))
    names = _names(stages, [f"{base}.{embedding}"], f"{base}.{layers}.{{}}", [f"{base}.{last}", "lm_head"])
    return [[*part, f"{base}.rotary_emb"] for part in names]


_OTHERS = {
    "falcon": ("transformer", "word_embeddings", "h", "ln_f"),
    "gpt_neox": ("gpt_neox", "embed_in", "layers", "final_layer_norm"),
    "persimmon": ("model", "embed_tokens", "layers", "final_layernorm"),
    "phi": ("model", "embed_tokens", "layers", "final_layernorm"),
}
"""Families that call the base model, its embedding, layers and last norm otherwise."""
_UNNAMED = ("bloom", "gptj", "mpt")
"""Families without rotary embeddings of their own in the base model, or with a norm after the table."""


def plain_causal_model(model: Mapping[str, Any]) -> str | None:
    """Say why a model is not `model.embed_tokens`, `.layers`, `.norm` and `lm_head` in a row; None if it is."""
    family = str(model.get("model_type"))
    if family in _OTHERS or family in _UNNAMED or family == "gpt2":
        return f"the base of '{family}' is not embed_tokens, layers and norm"
    if family in _UNLIKE:
        return f"'{family}' {_UNLIKE[family]}"
    scaled = [name for name in ("embedding_multiplier", "logits_scaling", "logit_scale") if model.get(name, 1) != 1]
    return f"it leaves out {' and '.join(scaled)}" if scaled else None


_UNLIKE = {
    "cohere": "scales its logits",
    "cohere2": "scales its logits",
    "gemma2": "caps its logits",
    "gemma3_text": "has rotary embeddings of two kinds",
    "olmo3": "has rotary embeddings of two kinds",
    "vaultgemma": "caps its logits",
}
"""Work of families between the modules, whatever their config says of it."""


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
