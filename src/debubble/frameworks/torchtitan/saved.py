"""The configuration that torchtitan saves: its model says the adapters and further layers, but no converted dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from debubble.imports.reader import SettingsReader
from debubble.ir import RunOptions

_MODEL = "model_spec.model."


def adapter_rank(read: SettingsReader) -> int:
    """The rank of the adapters on the model's linear layers; 0: the whole model is trained."""
    return max(_ranks(read.get(f"{_MODEL}layers")), default=0)


def remarks_on_saved(read: SettingsReader, options: RunOptions) -> Iterator[str]:
    """Sentences on what a saved model has, or may have, and is predicted otherwise."""
    if not any(name.startswith(_MODEL) for name in read.settings):
        return
    if options.dtype == "bf16":
        yield "A saved configuration does not say whether linear layers compute in fp8 or in 4 bits: give --dtype then."
    if options.lora and 0 in _ranks(read.get(f"{_MODEL}layers")):
        yield "Adapters are on some linear layers, and the prediction counts on all."
    if read.get(f"{_MODEL}mtp_layers"):
        yield f"{_MODEL}mtp_layers, which predict further tokens, are not in the prediction."
    groups = read.get("optimizer.param_groups")
    named = {str(group.get("optimizer_name")) for group in groups or () if isinstance(group, dict)}
    others = sorted(named - {"AdamW", "Adam"})
    if others:
        yield f"optimizer.param_groups has {', '.join(others)}, and the prediction counts on AdamW."


def _ranks(part: Any) -> Iterator[int]:
    """The ranks of the linear layers in a part of the model, 0 for those without adapters."""
    if isinstance(part, dict) and "in_features" in part:
        yield part["rank"] if isinstance(part.get("rank"), int) else 0
    elif isinstance(part, dict):
        yield from _ranks(list(part.values()))
    elif isinstance(part, list):
        for each in part:
            yield from _ranks(each)
