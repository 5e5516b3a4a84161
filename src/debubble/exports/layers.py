"""Whole layers per stage of a plan, by which other frameworks partition, and the names of their modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ir import ExportError, PlannedUnit
from debubble.models.config import ModelConfig
from debubble.models.module_bases import OTHER_BASES, UNNAMED
from debubble.plans import Plan
from debubble.targets import targets
from debubble.targets.limits import FURTHER_TOKENS

ENDS = ("embedding", "head", "mtp")
"""Types of units that are no decoder layers."""
_HALVES = {"attention", "mlp"}


@dataclass(frozen=True)
class PlannedLayer:
    """One decoder layer: its number in the model, and the strategy of each of its units."""

    index: int
    strategies: tuple[str, ...]

    @property
    def recomputes(self) -> bool:
        """True if any of it is recomputed."""
        return any(strategy != "none" for strategy in self.strategies)

    @property
    def full(self) -> bool:
        """True if all of it is recomputed."""
        return all(strategy == "full" for strategy in self.strategies)

    @property
    def operators(self) -> frozenset[str]:
        """The operators that recompute, with the unit's place in the layer: `0:norm`, `1:activation`, `0:full`."""
        return frozenset(
            f"{place}:{operator}"
            for place, strategy in enumerate(self.strategies)
            if strategy != "none"
            for operator in strategy.split("+")
        )


@dataclass(frozen=True)
class StageLayers:
    """The layers and ends of the model that one stage holds."""

    embedding: bool
    layers: tuple[PlannedLayer, ...]
    mtp: int
    head: bool


def require_layers(plan: Plan, *, target: str) -> None:
    """Raise ExportError for a plan that was made from stage costs."""
    if any(unit.type == "stage" for units in plan.partition for unit in units):
        raise ExportError(
            f"The plan was made from stage costs and names no model layers, which {target} partitions by; plan a MODEL"
            " or a units file, or export the order alone with --to torch."
        )


def stage_layers(plan: Plan, *, target: str, further_tokens: bool = True) -> tuple[StageLayers, ...]:
    """The whole layers of each stage.

    Raises ExportError if the plan has none, or a stage ends within a layer, or if there are multi-token-prediction
    layers in a target without `further_tokens`, whose modules debubble cannot name.
    """
    require_layers(plan, target=target)
    if not further_tokens and any(unit.type == "mtp" for units in plan.partition for unit in units):
        raise ExportError(FURTHER_TOKENS.format(title=target))
    first = 0
    result: list[StageLayers] = []
    for stage, units in enumerate(plan.partition):
        layers = _layers(plan, stage, first, target)
        first += len(layers)
        types = [unit.type for unit in units]
        result.append(StageLayers("embedding" in types, layers, types.count("mtp"), "head" in types))
    return tuple(result)


def _layers(plan: Plan, stage: int, first: int, target: str) -> tuple[PlannedLayer, ...]:
    runs: list[list[PlannedUnit]] = []
    for unit in plan.partition[stage]:
        if unit.type == "mlp" and runs and runs[-1][-1].type == "attention":
            runs[-1].append(unit)
        elif unit.type not in ENDS:
            runs.append([unit])
    for run in runs:
        if len(run) == 1 and run[0].type in _HALVES:
            raise ExportError(
                f"Stage {stage} holds only the {run[0].type} half of layer {run[0].layer}, and {target} moves whole"
                f" layers: {replanning_advice(plan, target)}."
            )
    return tuple(PlannedLayer(first + i, tuple(unit.strategy for unit in run)) for i, run in enumerate(runs))


def replanning_advice(plan: Plan, target: str) -> str:
    """Advice on how to plan for the target of that title."""
    if plan.model is None:
        return "plan again with --planner dapple+ on pipeline devices that divide the layers, or plan a MODEL"
    names = (name for name, entry in targets.items() if entry.title == target)
    return f"plan again with --for {next(names, 'TARGET')}, which searches what it can run"


def hf_names(model: ModelConfig | None, stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in a Hugging Face causal language model; rotary embeddings, which have no weights, are in every stage."""
    if any(stage.mtp for stage in stages):
        raise ExportError("debubble does not know the names of the modules of multi-token-prediction layers.")
    family = "" if model is None else str(model.config.get("model_type"))
    if family == "gpt2":
        return _names(
            stages, ["transformer.wte", "transformer.wpe"], "transformer.h.{}", ["transformer.ln_f", "lm_head"]
        )
    if family in UNNAMED:
        raise ExportError(f"debubble does not know the names of the modules of '{family}'; export to megatron.")
    base, embedding, layers, last = OTHER_BASES.get(family, ("model", "embed_tokens", "layers", "norm"))
    names = _names(stages, [f"{base}.{embedding}"], f"{base}.{layers}.{{}}", [f"{base}.{last}", "lm_head"])
    return [[*modules, f"{base}.rotary_emb"] for modules in names]


def torchtitan_names(stages: Sequence[StageLayers]) -> list[list[str]]:
    """Names in torchtitan's own models."""
    return _names(stages, ["tok_embeddings"], "layers.{}", ["norm", "lm_head"])


def _names(stages: Sequence[StageLayers], first: list[str], layer: str, last: list[str]) -> list[list[str]]:
    return [
        [
            *(first if stage.embedding else []),
            *(layer.format(planned.index) for planned in stage.layers),
            *(last if stage.head else []),
        ]
        for stage in stages
    ]
