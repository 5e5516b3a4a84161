"""Families of transformers whose modules have other names, or that compute between the modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_BASES = {
    "falcon": ("transformer", "word_embeddings", "h", "ln_f"),
    "gpt_neox": ("gpt_neox", "embed_in", "layers", "final_layer_norm"),
    "persimmon": ("model", "embed_tokens", "layers", "final_layernorm"),
    "phi": ("model", "embed_tokens", "layers", "final_layernorm"),
}
"""Family -> its names of the base model, its embedding, layers and final norm."""
UNNAMED = ("bloom", "gptj", "mpt")
"""Families without rotary embeddings in the base model, or with a norm after the embedding."""
_EXTRA_WORK = {
    "cohere": "scales its logits",
    "cohere2": "scales its logits",
    "gemma2": "caps its logits",
    "gemma3_text": "has rotary embeddings of two kinds",
    "olmo3": "has rotary embeddings of two kinds",
    "vaultgemma": "caps its logits",
}
"""Family -> its computing between modules, whatever its config."""


def why_not_plain(config: Mapping[str, Any]) -> str | None:
    """The reason why a model is not `model.embed_tokens`, `.layers`, `.norm`, `lm_head` in sequence; None if it is."""
    family = str(config.get("model_type"))
    if family in OTHER_BASES or family in UNNAMED or family == "gpt2":
        return f"the base of '{family}' is not embed_tokens, layers and norm"
    if family in _EXTRA_WORK:
        return f"'{family}' {_EXTRA_WORK[family]}"
    scaled = [name for name in ("embedding_multiplier", "logits_scaling", "logit_scale") if config.get(name, 1) != 1]
    return f"it leaves out {' and '.join(scaled)}" if scaled else None
