"""Stages of a model by the names of their modules, and models by the names that hubs have for them."""

from __future__ import annotations

import re

from debubble.ir import InputError
from debubble.models import Model, models

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)$")


def layers_of(parts: object) -> tuple[int, ...]:
    """Decoder layers per stage, of modules such as `model.layers.3` or `transformer.h.3`.

    Raises:
        InputError: if that is no list of lists of names.
    """
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise InputError(f"The modules of the stages are {parts!r}, which is no list of lists of names.")
    if not all(isinstance(name, str) for part in parts for name in part):
        raise InputError("The modules of the stages are no names.")
    return tuple(sum(_LAYER.search(name) is not None for name in part) for part in parts)


def hub_model(name: str) -> Model | None:
    """The known model that a hub's name such as `meta-llama/Meta-Llama-3-8B` means; None if none is."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    short = re.sub(r"-(instruct|hf|base|it|chat|v0\.\d)\b", "", last)
    names = (last, short, short.replace("llama-", "llama"), re.sub(r"-(?=\d)", "", short, count=1))
    return next((models[each] for each in names if each in models), None)
