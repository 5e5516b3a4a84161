"""Which whole layers each stage of a plan holds: what other frameworks partition by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ir import ExportError, Plan, PlannedUnit

_ENDS = ("embedding", "head", "mtp")
_HALVES = {"attention", "mlp"}


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its number in the model, and the strategy of each of its units."""

    index: int
    strategies: tuple[str, ...]

    @property
    def recomputes(self) -> bool:
        return any(strategy != "none" for strategy in self.strategies)

    @property
    def whole(self) -> bool:
        """Whether all of it is recomputed."""
        return all(strategy == "full" for strategy in self.strategies)

    @property
    def operators(self) -> frozenset[str]:
        """What it recomputes, with the unit's place in the layer: `0:norm`, `1:activation`, `0:full`."""
        return frozenset(
            f"{place}:{operator}"
            for place, strategy in enumerate(self.strategies)
            if strategy != "none"
            for operator in strategy.split("+")
        )


@dataclass(frozen=True)
class StageLayers:
    """What one stage holds."""

    embedding: bool
    layers: tuple[Layer, ...]
    mtp: int
    head: bool


def stage_layers(plan: Plan, *, target: str) -> tuple[StageLayers, ...]:
    """Per stage, its whole layers.  Raises ExportError if the plan has none, or a stage ends within a layer."""
    if any(unit.type == "stage" for units in plan.partition for unit in units):
        raise ExportError(
            f"The plan was made from stage costs and names no model layers, which {target} partitions by; plan a MODEL"
            " or a units file, or export the order alone with --to torch."
        )
    first = 0
    result: list[StageLayers] = []
    for stage, units in enumerate(plan.partition):
        layers = _layers(stage, units, first, target)
        first += len(layers)
        types = [unit.type for unit in units]
        result.append(StageLayers("embedding" in types, layers, types.count("mtp"), "head" in types))
    return tuple(result)


def _layers(stage: int, units: Sequence[PlannedUnit], first: int, target: str) -> tuple[Layer, ...]:
    inner = [unit for unit in units if unit.type not in _ENDS]
    runs: list[list[PlannedUnit]] = []
    for unit in inner:
        if unit.type == "mlp" and runs and runs[-1][-1].type == "attention":
            runs[-1].append(unit)
        else:
            runs.append([unit])
    for run in runs:
        if len(run) == 1 and run[0].type in _HALVES:
            raise ExportError(
                f"Stage {stage} holds only the {run[0].type} half of layer {run[0].layer}, and {target} moves whole"
                " layers; plan again with a planner that does too, such as megatron-even or dapple."
            )
    return tuple(Layer(first + i, tuple(unit.strategy for unit in run)) for i, run in enumerate(runs))


def rounded_up(stages: Sequence[StageLayers], *, target: str) -> tuple[list[int], list[str]]:
    """The layers to recompute wholly where a target knows no less, and what is lost by it.

    A layer that recomputes some operators recomputes all: slower than planned, but it fits.
    """
    layers = [layer for stage in stages for layer in stage.layers]
    partly = [layer.index for layer in layers if layer.recomputes and not layer.whole]
    losses = [] if not partly else [f"{_count(partly)} some operators; for {target} all of the layer, which is slower."]
    return [layer.index for layer in layers if layer.recomputes], losses


def _count(indices: Sequence[int]) -> str:
    return f"Layer {indices[0]} recomputes" if len(indices) == 1 else f"{len(indices)} layers recompute"
