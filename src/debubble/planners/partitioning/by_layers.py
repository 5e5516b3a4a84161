"""Partitions by numbers of decoder layers per stage, as in frameworks' configurations."""

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
"""Layer -> strategy names of its attention half and its MLP half; missing layers recompute nothing."""


def partition_by_layers(
    units: Units, layers: Sequence[int], strategies: Strategies, *, mtp_stage: int | None = None
) -> Partition:
    """The partition into stages with these numbers of layers.

    Args:
        units: The model's units.
        layers: Number of layers of every stage, in model order; units before the first layer are in the first stage,
            units after the last layer in the last stage.
        strategies: The recomputation strategies of layers.
        mtp_stage: The stage of the multi-token prediction modules; None: the last.
    """
    ends = list(accumulate(layers))
    last = len(ends) - 1
    after = {"head": last, "mtp": last if mtp_stage is None else mtp_stage}
    stages: list[list[tuple[int, str]]] = [[] for _ in ends]
    for index, unit in enumerate(units.units):
        if unit.type not in LAYERS or unit.layer is None:
            stages[after.get(unit.type, 0)].append((index, "none"))
            continue
        strategy = strategies.get(unit.layer, ("none", "none"))[unit.type == "mlp"]
        stages[bisect_right(ends, unit.layer)].append((index, unit.strategy_named(strategy) or "none"))
    return Partition(stages)


def layers_named(text: str) -> tuple[int, ...]:
    """Parse numbers of layers per stage: `15,6x16,15` is a stage of 15 layers, six of 16, and one of 15.

    Raises:
        InputError: If the text does not have this form.
    """
    layers: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,4})x)?(\d{1,6})\s*", group)
        if match is None:
            raise InputError(f"'{text}' are no layers of stages; write them as 15,6x16,15.")
        layers += [int(match[2])] * int(match[1] or 1)
    return tuple(layers)
