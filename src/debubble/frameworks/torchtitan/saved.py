"""Reads configurations that torchtitan saves, whose model has adapters and MTP layers, but no converted dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from debubble.imports.reader import SettingsReader
from debubble.ir import RunOptions

_MODEL = "model_spec.model."


def adapter_rank(read: SettingsReader) -> int:
    """The rank of the adapters on the model's linear layers; 0: full fine-tuning."""
    return max(_ranks(read.get(f"{_MODEL}layers")), default=0)


def remarks_on_saved(read: SettingsReader, options: RunOptions) -> Iterator[str]:
    """Sentences on features of a saved model that the prediction does not follow."""
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
    other_optimizers = sorted(named - {"AdamW", "Adam"})
    if other_optimizers:
        yield f"optimizer.param_groups has {', '.join(other_optimizers)}, and the prediction counts on AdamW."


def _ranks(module: Any) -> Iterator[int]:
    """The adapter ranks of the linear layers in a module's configuration, 0 without adapters."""
    if isinstance(module, dict) and "in_features" in module:
        yield module["rank"] if isinstance(module.get("rank"), int) else 0
    elif isinstance(module, dict):
        yield from _ranks(list(module.values()))
    elif isinstance(module, list):
        for child in module:
            yield from _ranks(child)
