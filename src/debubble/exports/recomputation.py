"""Recomputation as a target can express it: never keeping more than planned, and as fast as that allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from debubble.costs import Units
from debubble.exports.layers import ENDS, PlannedLayer, again, stage_layers
from debubble.exports.prices import fits, partition_of, seconds, slowdown, units_of, with_partition
from debubble.ir import ExportError, Plan

T = TypeVar("T")

LayerStrategies = Mapping[int, tuple[str, ...]]
"""The strategies of every layer's units, by the layer's number."""


@dataclass(frozen=True)
class Choice(Generic[T]):
    """One way in which a target can recompute."""

    setting: T
    layers: LayerStrategies
    sentence: str
    """The difference from the plan, as the beginning of a sentence."""


def fastest(plan: Plan, ladders: Iterable[Sequence[Choice[T]]], *, target: str) -> tuple[Plan, T, tuple[str, ...]]:
    """The fastest choice that keeps no more than planned on any stage: the plan with it, its setting, what is lost.

    Each ladder's choices recompute more and more, so its first that suffices is the one.  Where the plan's costs are
    not those of model units, the first choice of all that recomputes what is planned.
    """
    units = units_of(plan)
    fitting = [pair for ladder in ladders if (pair := _first(plan, units, ladder)) is not None]
    if not fitting:
        raise ExportError(f"{target} has no recomputation that keeps as little as planned; {again(plan, target)}.")
    same = [(choice, changed) for choice, changed in fitting if changed.partition == plan.partition]
    choice, changed = (same or fitting)[0]
    if not same and units is not None:
        choice, changed = min(fitting, key=lambda pair: seconds(pair[1]))
    losses = () if same else (f"{choice.sentence}; {_price(changed, plan, units)}.",)
    return changed, choice.setting, losses


def wholly_or_not(layer: PlannedLayer) -> bool:
    """Tell whether all of a layer is recomputed, or nothing."""
    return layer.whole or not layer.recomputes


def recomputed_layers(plan: Plan, *, target: str) -> list[int]:
    """The numbers of the layers of which anything is recomputed."""
    return [layer.index for stage in stage_layers(plan, target=target) for layer in stage.layers if layer.recomputes]


def whole_where_needed(
    plan: Plan, *, target: str, expressible: Callable[[PlannedLayer], bool] = wholly_or_not
) -> tuple[Plan, tuple[str, ...]]:
    """The plan for a target that recomputes other layers wholly or not at all.

    Of the layers that are not expressible, as many recompute wholly as it takes to keep no more than planned on their
    stage: all of them, where the plan's costs are not those of model units.
    """
    stages = stage_layers(plan, target=target)
    chosen = {layer.index: layer.strategies for stage in stages for layer in stage.layers}
    partly = [[layer for layer in stage.layers if not expressible(layer)] for stage in stages]
    if not any(partly):
        return plan, ()
    units = units_of(plan)
    counts = []
    for s, layers in enumerate(partly):
        for count in range(len(layers) + 1):
            for place, layer in enumerate(layers):
                chosen[layer.index] = ("full" if place < count else "none",) * len(layer.strategies)
            if units is not None and _kept(_with_layers(plan, units, chosen), s) <= _kept(plan, s):
                break
        counts.append(count if layers else 0)
    changed = _with_layers(plan, units, chosen)
    total = sum(map(len, partly))
    plural = "s" * (total > 1)
    return changed, (
        f"{target} does not recompute parts of layers as planned for {total} layer{plural}: {sum(counts)} of them"
        f" recompute{'s' * (sum(counts) == 1)} wholly, the others nothing; {_price(changed, plan, units)}.",
    )


def ends_keep(plan: Plan, *, target: str) -> tuple[Plan, tuple[str, ...]]:
    """The plan whose head keeps everything, as targets recompute layers alone.

    Raises ExportError if it then does not fit, or if its costs cannot say whether it does.
    """
    if not any(unit.type in ENDS and unit.strategy != "none" for units in plan.partition for unit in units):
        return plan, ()
    units = units_of(plan)
    kept = {s: [u.strategy for u in units if u.type not in ENDS] for s, units in enumerate(plan.partition)}
    changed = _with_strategies(plan, units, [strategy for strategies in kept.values() for strategy in strategies])
    if units is None or not fits(changed):
        raise ExportError(
            f"{target} recomputes decoder layers alone, and this plan recomputes its head to fit;"
            f" {again(plan, target)}."
        )
    return changed, (f"The head keeps its activations, which fits, and is not recomputed: {slowdown(changed, plan)}.",)


def _with_layers(plan: Plan, units: Units | None, chosen: LayerStrategies) -> Plan:
    return _with_strategies(plan, units, [strategy for index in sorted(chosen) for strategy in chosen[index]])


def _with_strategies(plan: Plan, units: Units | None, strategies: Sequence[str]) -> Plan:
    """The plan with other strategies of its layers' units, in model order; nothing else recomputes."""
    following = iter(strategies)
    partition = tuple(
        tuple(replace(unit, strategy="none" if unit.type in ENDS else next(following)) for unit in stage)
        for stage in plan.partition
    )
    changed = replace(plan, partition=partition)
    if units is not None:
        return with_partition(plan, units, partition_of(changed, units))
    fused = frozenset(s for s, stage in enumerate(partition) if any(unit.strategy != "none" for unit in stage))
    return replace(changed, schedule=replace(plan.schedule, fused_recompute=fused))


def _first(plan: Plan, units: Units | None, ladder: Sequence[Choice[T]]) -> tuple[Choice[T], Plan] | None:
    for choice in ladder:
        changed = _with_layers(plan, units, choice.layers)
        if _keeps_no_more(changed, plan, priced=units is not None):
            return choice, changed
    return None


def _keeps_no_more(changed: Plan, plan: Plan, *, priced: bool) -> bool:
    if priced:
        return all(_kept(changed, s) <= _kept(plan, s) for s in range(plan.schedule.stages)) and fits(changed)
    pairs = zip(changed.partition, plan.partition, strict=True)
    return all(
        _covers(ours.strategy, planned.strategy)
        for stage, before in pairs
        for ours, planned in zip(stage, before, strict=True)
    )


def _kept(plan: Plan, stage: int) -> float:
    return float(plan.schedule.kept(plan.costs, stage, 0))


def _covers(strategy: str, planned: str) -> bool:
    """Tell whether a strategy recomputes all that was planned; recomputing the inner MLP includes its parts."""
    parts = set(strategy.split("+"))
    if "mlp" in parts:
        parts |= {"activation", "multiply"}
    return strategy == "full" or planned == "none" or set(planned.split("+")) <= parts


def _price(changed: Plan, plan: Plan, units: Units | None) -> str:
    if units is None:
        return "how much slower that is, the plan's costs do not say"
    return slowdown(changed, plan)
