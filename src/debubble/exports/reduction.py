"""Reduction of a plan to what a target can run, and the price of it: operations, ZeRO level, ways to recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from debubble.costs import Units
from debubble.costs.partition import partition_named
from debubble.exports.layers import ENDS, PlannedLayer, replanning_advice, stage_layers
from debubble.exports.prices import fits, slowdown, units_of, with_options, with_partition
from debubble.ir import ExportError, Kind, OutOfMemoryError
from debubble.ir.schedule import all_shares
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.targets import Target
from debubble.targets.orders import OwnOrders, own_order, without_transfers


def compute_only(plan: Plan, *, target: Target, offloads: bool) -> tuple[Plan, tuple[str, ...]]:
    """The plan without offload, with recomputation in the backward, and one optimizer step at the end; what is lost.

    Where the target `offloads` as the plan does, the plan keeps that.

    All optimizer states stay on the devices, divided as the target's nearest ZeRO level does it.  Raises ExportError if
    the plan then no longer fits in memory, or if its costs cannot say whether it does.
    """
    if offloads:
        return plan, ()
    reduced = replace(plan, schedule=without_transfers(plan.schedule))
    losses = _schedule_losses(plan)
    needed = ["offload"] if plan.schedule.offloaded else []
    if plan.schedule.deeper & plan.schedule.explicit_recompute:
        needed.append("deeper recomputation for single micro-batches")
    zero = target.nearest_zero(plan.options.zero, pipeline=plan.devices)
    if plan.schedule.host_steps or plan.options.zero != zero:
        sentence, need = _states(plan, target=target.title, zero=zero)
        losses.append(sentence)
        needed.append(need)
        on_devices = with_options(plan, replace(plan.options, zero=zero))
        if on_devices is None:
            raise ExportError(
                f"{target.title} cannot run this plan, whose memory depends on {need}; its costs do not say what it"
                f" needs without: {replanning_advice(plan, target.title)}."
            )
        reduced = replace(reduced, costs=on_devices.costs, options=on_devices.options)
    if not losses:
        return reduced, ()
    try:
        losses.append(f"With that {slowdown(reduced, plan)}.")
    except OutOfMemoryError as error:
        needs = " and ".join(needed) or "when it recomputes"
        raise ExportError(
            f"{target.title} cannot run this plan, whose memory depends on {needs}: {error}  To avoid that,"
            f" {replanning_advice(plan, target.title)}."
        ) from error
    return reduced, tuple(losses)


def _schedule_losses(plan: Plan) -> list[str]:
    s = plan.schedule
    losses: list[str] = []
    if s.offloaded:
        where = " to other devices" if s.peers else ""
        losses.append(
            f"Offload: all activations stay on their devices, also the {len(s.offloaded)} to be moved{where}."
        )
    if s.explicit_recompute:
        losses.append("Recomputation that the plan places in bubbles happens right before the backward.")
    if s.deeper & s.explicit_recompute:
        losses.append("Micro-batches that the plan recomputes deeper recompute as the others.")
    if any(share != 1 for _, shares in all_shares(s.recompute_fraction) for share in shares):
        losses.append("Stages of which the plan recomputes a share recompute all that they can.")
    if any(op.kind in (Kind.S, Kind.G) and op.stage not in s.host_steps for op in s.operations):
        losses.append("Optimizer steps and gradient reductions among the micro-batches move to the end of the step.")
    if s.link_orders:
        losses.append("Transfers of devices that share a link to the host are served by arrival, in no planned order.")
    if s.asynchronous and plan.costs.communication_model == "blocking":
        losses.append("Messages that the plan lets overlap compute are as the target's own: counted as blocking.")
    return losses


def _states(plan: Plan, *, target: str, zero: int) -> tuple[str, str]:
    """A sentence on the states that cannot be kept as planned, and the name of what is missing."""
    if plan.schedule.host_steps:
        stages = ", ".join(map(str, sorted(plan.schedule.host_steps)))
        return (
            f"The optimizer states of stages {stages} stay on the devices: debubble writes no optimizer offload by"
            f" stages for {target}.",
            "optimizer states on the host",
        )
    where = "over" if plan.devices > 1 else "without"
    memory = "more memory than planned, but fits" if zero < plan.options.zero else "less memory than planned"
    return (
        f"{target} divides model states as ZeRO-{zero} {where} a pipeline, not as ZeRO-{plan.options.zero}, which takes"
        f" {memory}.",
        f"ZeRO-{plan.options.zero}",
    )


def require_order(plan: Plan, target: Target) -> str:
    """Find which of the orders that the target makes itself a plan has.  Raises ExportError if it has none of them."""
    levers, schedule = target.levers_of(plan.options, pipeline=plan.devices), without_transfers(plan.schedule)
    assert levers is not None
    assert isinstance(levers.orders, OwnOrders)
    name = own_order(schedule, levers.orders.names)
    if name is not None:
        return name
    raise ExportError(
        f"{target.title} {levers.orders.refusal(schedule)}, and this plan's '{plan.schedule.name}' is another; export"
        f" it to torch, which takes any order, or {replanning_advice(plan, target.title)}."
    )


T = TypeVar("T")

LayerStrategies = Mapping[int, tuple[str, ...]]
"""The strategies of every layer's units, by the layer's number."""


@dataclass(frozen=True)
class Alternative(Generic[T]):
    """One way in which a target can recompute."""

    setting: T
    layers: LayerStrategies
    sentence: str
    """The difference from the plan, as the beginning of a sentence."""


def fastest(
    plan: Plan, sequences: Iterable[Sequence[Alternative[T]]], *, target: str
) -> tuple[Plan, T, tuple[str, ...]]:
    """The fastest choice that keeps no more than planned on any stage: the plan with it, its setting, what is lost.

    The choices of a sequence recompute more and more, so its first one that suffices is taken.  Where the plan's costs
    are not those of model units, it is the first choice of all that recomputes what is planned.
    """
    units = units_of(plan)
    fitting = [pair for choices in sequences if (pair := _first(plan, units, choices)) is not None]
    if not fitting:
        raise ExportError(
            f"{target} has no recomputation that keeps as little as planned; {replanning_advice(plan, target)}."
        )
    same = [(choice, changed) for choice, changed in fitting if changed.partition == plan.partition]
    choice, changed = (same or fitting)[0]
    if not same and units is not None:
        choice, changed = min(fitting, key=lambda pair: seconds_per_step(pair[1]))
    losses = () if same else (f"{choice.sentence}; {_price(changed, plan, units)}.",)
    return changed, choice.setting, losses


def all_or_nothing(layer: PlannedLayer) -> bool:
    """Tell whether all of a layer is recomputed, or nothing."""
    return layer.full or not layer.recomputes


def recomputed_layers(plan: Plan, *, target: str) -> list[int]:
    """The numbers of the layers of which anything is recomputed."""
    return [layer.index for stage in stage_layers(plan, target=target) for layer in stage.layers if layer.recomputes]


def whole_where_needed(
    plan: Plan, *, target: str, expressible: Callable[[PlannedLayer], bool] = all_or_nothing
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
            if units is not None and _kept_bytes(_with_layers(plan, units, chosen), s) <= _kept_bytes(plan, s):
                break
        counts.append(count if layers else 0)
    changed = _with_layers(plan, units, chosen)
    total = sum(map(len, partly))
    plural = "s" * (total > 1)
    return changed, (
        f"{target} does not recompute parts of layers as planned for {total} layer{plural}: {sum(counts)} of them"
        f" recompute{'s' * (sum(counts) == 1)} wholly, the others nothing; {_price(changed, plan, units)}.",
    )


def with_kept_ends(plan: Plan, *, target: str) -> tuple[Plan, tuple[str, ...]]:
    """The plan whose head keeps everything, as targets recompute layers alone.

    Raises ExportError if it then does not fit, or if its costs cannot say whether it does.
    """
    if not any(unit.type in ENDS and unit.strategy != "none" for units in plan.partition for unit in units):
        return plan, ()
    units = units_of(plan)
    strategies = [u.strategy for stage in plan.partition for u in stage if u.type not in ENDS]
    changed = _with_strategies(plan, units, strategies)
    if units is None or not fits(changed):
        raise ExportError(
            f"{target} recomputes decoder layers alone, and this plan recomputes its head to fit;"
            f" {replanning_advice(plan, target)}."
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
        return with_partition(plan, units, partition_named(changed.partition, units))
    fused = frozenset(s for s, stage in enumerate(partition) if any(unit.strategy != "none" for unit in stage))
    return replace(changed, schedule=replace(plan.schedule, fused_recompute=fused))


def _first(plan: Plan, units: Units | None, choices: Sequence[Alternative[T]]) -> tuple[Alternative[T], Plan] | None:
    for choice in choices:
        changed = _with_layers(plan, units, choice.layers)
        if _keeps_no_more(changed, plan, priced=units is not None):
            return choice, changed
    return None


def _keeps_no_more(changed: Plan, plan: Plan, *, priced: bool) -> bool:
    if priced:
        return all(_kept_bytes(changed, s) <= _kept_bytes(plan, s) for s in range(plan.schedule.stages)) and fits(
            changed
        )
    pairs = zip(changed.partition, plan.partition, strict=True)
    return all(
        _covers(ours.strategy, planned.strategy)
        for stage, before in pairs
        for ours, planned in zip(stage, before, strict=True)
    )


def _kept_bytes(plan: Plan, stage: int) -> float:
    """The smallest number of bytes that a stage keeps of any micro-batch."""
    return min(float(plan.schedule.kept_bytes(plan.costs, stage, j)) for j in range(plan.schedule.micro_batches))


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
