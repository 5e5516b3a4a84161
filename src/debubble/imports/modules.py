"""Stages of a model by the names of their modules, and models by the names that hubs have for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from debubble.models import Model, models

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)$")


def layers_of(parts: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Decoder layers per stage, of modules such as `model.layers.3` or `transformer.h.3`."""
    return tuple(sum(_LAYER.search(name) is not None for name in part) for part in parts)


def hub_model(name: str) -> Model | None:
    """The known model that a hub's name such as `meta-llama/Meta-Llama-3-8B` means; None if none is."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    short = re.sub(r"-(instruct|hf|base|it|chat|v0\.\d)\b", "", last)
    names = (last, short, short.replace("llama-", "llama"), re.sub(r"-(?=\d)", "", short, count=1))
    return next((models[each] for each in names if each in models), None)
