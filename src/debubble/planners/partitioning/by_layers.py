"""Stages given by their numbers of decoder layers, as frameworks' configurations give them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InputError
from debubble.targets.levers import LAYERS

Strategies = Mapping[int, tuple[str, str]]
"""Layer -> the operators that its attention half and its MLP half recompute; those left out recompute nothing."""


def partition_by_layers(
    units: Units, layers: Sequence[int], strategies: Strategies, *, mtp_stage: int | None = None
) -> Partition:
    """The stages with so many layers each.

    Args:
        units: The model's units.
        layers: Layers of every stage, in model order; what is before the first layer is in the first stage, what is
            after the last in the last.
        strategies: What layers recompute.
        mtp_stage: The stage with the modules for further tokens; None: the last.
    """
    ends = list(accumulate(layers))
    last = len(ends) - 1
    after = {"head": last, "mtp": last if mtp_stage is None else mtp_stage}
    stages: list[list[tuple[int, str]]] = [[] for _ in ends]
    for index, unit in enumerate(units.units):
        if unit.type not in LAYERS or unit.layer is None:
            stages[after.get(unit.type, 0)].append((index, "none"))
            continue
        wanted = strategies.get(unit.layer, ("none", "none"))[unit.type == "mlp"]
        stages[bisect_right(ends, unit.layer)].append((index, unit.strategy_named(wanted) or "none"))
    return Partition(stages)


def layers_named(text: str) -> tuple[int, ...]:
    """The layers of stages that are written as `15,6x16,15`: one of 15, six of 16, one of 15.

    Raises:
        InputError: If the text is not written so.
    """
    layers: list[int] = []
    for part in text.split(","):
        written = re.fullmatch(r"\s*(?:(\d{1,4})x)?(\d{1,6})\s*", part)
        if written is None:
            raise InputError(f"'{text}' are no layers of stages; write them as 15,6x16,15.")
        layers += [int(written[2])] * int(written[1] or 1)
    return tuple(layers)
