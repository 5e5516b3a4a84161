"""The families whose prices are said to be held against measurements are those with measured runs."""

from __future__ import annotations

import re
from pathlib import Path

from debubble.models import models
from debubble.models.architecture import MEASURED_FAMILIES
from debubble.models.mixers import Attention

NOTES = Path(__file__).parents[2] / "docs" / "notes" / "measured.md"


def test_families_with_measured_runs_are_named() -> None:
    found = {name.removesuffix("-without-mtp") for name in re.findall(r"\| ([\w.-]+) on \d+x", NOTES.read_text())}
    priced = {model.family for name, model in models.items() if name in found and model.whole_layers}
    mixed = {
        model.family
        for model in models.values()
        if model.whole_layers and not all(isinstance(layer.attention, Attention) for layer in model.per_layer)
    }

    assert priced & mixed == MEASURED_FAMILIES
