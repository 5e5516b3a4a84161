"""The levers that a framework leaves to a plan: orders, whole layers, and ways to recompute them.

Planners move a framework's units as they move any others: a decoder layer is one unit, whose strategies are named after
the framework's settings; nothing else recomputes, and nothing is offloaded.  `halves` leads back to the half-layers in
which a plan lists its stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from debubble.costs import joined_unit
from debubble.costs.partition import Partition
from debubble.costs.unit import Strategy, Unit, at_layer, changed_by_kind, kind_of
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Number, PlannedUnit, RunOptions, Schedule
from debubble.models import Model
from debubble.targets.offload import ModuleOffload, setting_of, with_modules
from debubble.targets.orders import Orders, without_transfers


@dataclass(frozen=True)
class Way:
    """One way to recompute a layer: the operators of its attention half and of its MLP half."""

    attention: str
    mlp: str


NOTHING = Way("none", "none")
EVERYTHING = Way("full", "full")


@dataclass(frozen=True)
class Choice:
    """One setting of a framework, which may do different things to a dense layer and to one with experts."""

    dense: Way
    sparse: Way


def same(way: Way) -> Choice:
    """The setting that does the same to every layer."""
    return Choice(way, way)


WHOLE: Mapping[str, Choice] = {"none": same(NOTHING), "full": same(EVERYTHING)}
"""A layer recomputes wholly or not at all."""


@dataclass(frozen=True)
class EachLayer:
    """Every layer recomputes in a way of its own."""

    choices: Mapping[str, Choice]
    from_start: bool = False
    """True if the framework counts them from the start of a stage: those that recompute most come first."""


@dataclass(frozen=True)
class AllLayers:
    """All layers recompute in the same way."""

    choices: Mapping[str, Choice]
    block: bool = False
    """True if, in place of that, the first N layers of every stage may recompute wholly, N being the same for all."""
    whole: bool = True
    """True if all layers may recompute wholly."""


Recomputation = EachLayer | AllLayers


HALVES = ("attention", "mlp")
LAYERS = (*HALVES, "layer")
"""Types of units that are decoder layers, or half of one."""


@dataclass(frozen=True)
class TargetLevers:
    """The levers that a framework leaves to a plan.

    Attributes:
        orders: The orders that it runs.
        recomputation: Its ways to recompute.
        keeps_until_weights: Whether it keeps all of a forward's tensors until W, with the gradients next to them, as
            torch's split of a backward does.
        offload: The ways in which it offloads modules of all layers alike; nothing else is offloaded.
    """

    orders: Orders
    recomputation: Recomputation
    keeps_until_weights: bool = False
    offload: tuple[ModuleOffload, ...] = ()

    def as_run(self, schedule: Schedule, recomputing: frozenset[int]) -> Schedule:
        """A planner's schedule as the framework runs it, without offload.

        Raises:
            InfeasibleError: if it runs no such order.
        """
        compute = replace(without_transfers(schedule), fused_recompute=recomputing)
        taken = self.orders.as_run(compute, recomputing)
        refusal = self.orders.refusal(taken)
        if refusal is not None:
            raise InfeasibleError(f"The target {refusal}, and '{schedule.name}' is another.")
        return taken

    def half_layers(self, units: Units, model: Model, options: RunOptions) -> Units:
        """The half-layers with the framework's memory; without offload, but for what it offloads by module."""
        if not self.offload:
            kept = changed_by_kind(units.units, self._half_layer)
            return replace(units, units=tuple(kept), offload_bandwidth=None)
        known = changed_by_kind(units.units, lambda unit: with_modules(self._half_layer(unit), model, options))
        return replace(units, units=tuple(known), offload_bandwidth=None, module_bandwidth=units.offload_bandwidth)

    def offload_of(self, schedule: Schedule, units: Units, partition: Partition) -> ModuleOffload | None:
        """The way to offload that a schedule of these units has; None: another than the framework's, or none."""
        return setting_of(schedule, units, partition, self.offload) if schedule.offloaded else None

    def layers(self, units: Units, sparse: frozenset[int]) -> Units:
        """The units that `half_layers` gave with every layer whole; `sparse` are the layers with experts."""
        layers = {unit.layer for unit in units.units if unit.type in LAYERS}
        choices = self._distinct(dense=bool(layers - sparse), sparse=bool(layers & sparse))
        made: dict[tuple[Hashable, ...], Unit] = {}
        joined = []
        for first, last in _spans(units.units):
            halves, layer = units.units[first : last + 1], units.units[first].layer
            kind = (layer in sparse, *map(kind_of, halves))
            if kind not in made:
                made[kind] = _joined_layer(halves, {name: _way(choice, layer, sparse) for name, choice in choices})
            joined.append(at_layer(made[kind], layer))
        return replace(units, units=tuple(joined))

    def uniform_partitions(self, units: Units, lengths: Sequence[int]) -> Iterator[Iterator[Partition]]:
        """The ways in which all layers can recompute alike, from the least recomputation to the most in each group."""
        layers = [unit for unit in units.units if unit.type in LAYERS]
        common = [name for name in self._choices if all(name in unit.strategies for unit in layers)]
        times = {name: sum(unit.strategies[name].recompute for unit in layers) for name in common}
        if isinstance(self.recomputation, AllLayers):
            yield (
                Partition.cut(units, lengths, strategy=name) for name in sorted(common, key=lambda name: times[name])
            )
            if self.recomputation.block:
                yield (_block(units, lengths, number) for number in range(1, max(lengths) + 1))

    def in_target_order(self, units: Units, partition: Partition) -> Partition:
        """The partition with equal layers of a stage in the order that the framework counts them in."""
        if not isinstance(self.recomputation, EachLayer) or not self.recomputation.from_start:
            return partition
        return Partition(_most_first(units, stage) for stage in partition)

    def alike(self, units: Units, partition: Partition) -> bool:
        """Tell whether the whole layers of a partition recompute together as the framework can."""
        if not isinstance(self.recomputation, AllLayers):
            return True
        stages = [
            [frozenset({name}) for index, name in stage if units.units[index].type in LAYERS] for stage in partition
        ]
        names = {name for stage in stages for layer in stage for name in layer}
        return len(names) < 2 or (self.recomputation.block and _is_block(stages))

    def halves(self, units: Units, joined: Units, partition: Partition) -> Partition:
        """The partition of `units` that one of the whole layers `joined` from them stands for."""
        spans = _spans(units.units)

        def expanded(stage: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
            for index, name in stage:
                first, last = spans[index]
                pair = joined.units[index].strategies[name].operators
                names = (name,) if pair is None else tuple(pair.split("|"))
                yield from zip(range(first, last + 1), names, strict=True)

        return Partition(expanded(stage) for stage in partition)

    def expresses(self, stages: Sequence[Sequence[PlannedUnit]], sparse: frozenset[int]) -> bool:
        """Tell whether stages hold whole layers that recompute as the framework can, and nothing else recomputes."""
        settings = [[self._settings(layer, sparse) for layer in _layers(stage)] for stage in stages]
        ends = (unit for stage in stages for unit in stage if unit.type not in LAYERS)
        if any(unit.strategy != "none" for unit in ends) or not all(all(stage) for stage in settings):
            return False
        of_layers = [names for stage in settings for names in stage]
        if not isinstance(self.recomputation, AllLayers) or not of_layers or frozenset.intersection(*of_layers):
            return True
        return self.recomputation.block and _is_block(settings)

    def _settings(self, layer: Sequence[PlannedUnit], sparse: frozenset[int]) -> frozenset[str]:
        """Names of the settings that recompute a layer so; none if it is not whole."""
        if layer[0].type != "layer" and [unit.type for unit in layer] != list(HALVES):
            return frozenset()
        ways = {name: _way(choice, layer[0].layer, sparse) for name, choice in self._choices.items()}
        return frozenset(
            name
            for name, way in ways.items()
            if all(
                _same_operators(ours, unit.strategy)
                for ours, unit in zip((way.attention, way.mlp), layer, strict=False)
            )
        )

    @property
    def _choices(self) -> Mapping[str, Choice]:
        whole = isinstance(self.recomputation, AllLayers) and self.recomputation.whole
        return {**self.recomputation.choices, **(WHOLE if whole else {})}

    def _distinct(self, *, dense: bool, sparse: bool) -> list[tuple[str, Choice]]:
        """The settings that do different things to the kinds of layers that there are; of those alike, the first."""
        kept: dict[tuple[Way | None, Way | None], tuple[str, Choice]] = {}
        for name, choice in self._choices.items():
            key = choice.dense if dense else None, choice.sparse if sparse else None
            kept.setdefault(key, (name, choice))
        return list(kept.values())

    def _half_layer(self, unit: Unit) -> Unit:
        after_input = unit.activation_after_input
        if self.keeps_until_weights:
            after_input = unit.activation + (unit.activation / 2 if after_input is None else after_input)
        return replace(unit, on_host=None, activation_after_input=after_input)


def _joined_layer(units: Sequence[Unit], ways: Mapping[str, Way]) -> Unit:
    """The units of a layer as one; a unit alone keeps those of its strategies that are ways of both halves."""
    first = units[0]
    if len(units) == 1:
        known = {name for name, way in ways.items() if way.attention == way.mlp == name} if first.type in LAYERS else {}
        strategies = {name: strategy for name, strategy in first.strategies.items() if name in {"none", *known}}
        return replace(first, strategies=strategies)
    attention, mlp = units
    both = {name: _strategy(attention, mlp, way) for name, way in ways.items()}
    strategies = {name: strategy for name, strategy in both.items() if strategy is not None}
    return replace(joined_unit("layer", first.layer, attention, mlp), strategies=strategies)


def _most_first(units: Units, stage: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The layers of each kind in a stage, those that recompute most first."""
    strategies: dict[Number, list[str]] = {}
    for index, name in stage:
        strategies.setdefault(units.units[index].activation, []).append(name)
    for activation, names in strategies.items():
        kind = next(unit for index, _ in stage if (unit := units.units[index]).activation == activation)
        names.sort(key=lambda name: (name == "full", kind.strategies[name].recompute))
    yield from ((index, strategies[units.units[index].activation].pop()) for index, _ in stage)


def _block(units: Units, lengths: Sequence[int], number: int) -> Partition:
    """Stages of which the first `number` layers recompute wholly."""
    stages = []
    for stage in Partition.cut(units, lengths):
        layers = [index for index, _ in stage if units.units[index].type in LAYERS][:number]
        stages.append([(index, "full" if index in layers else "none") for index, _ in stage])
    return Partition(stages)


def _way(choice: Choice, layer: int | None, sparse: frozenset[int]) -> Way:
    return choice.sparse if layer in sparse else choice.dense


def _strategy(attention: Unit, mlp: Unit, way: Way) -> Strategy | None:
    """Both halves recomputing so; None if one of them cannot."""
    names = attention.strategy_named(way.attention), mlp.strategy_named(way.mlp)
    if names[0] is None or names[1] is None:
        return None
    first, second = attention.strategies[names[0]], mlp.strategies[names[1]]
    shared = second.after_full if way == EVERYTHING and second.after_full is not None else second.activation
    return Strategy(first.activation + shared, first.recompute + second.recompute, f"{names[0]}|{names[1]}")


def _spans(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """First and last index of every unit of whole layers."""
    spans: list[tuple[int, int]] = []
    for index, unit in enumerate(units):
        before = units[index - 1] if index else None
        if unit.type == "mlp" and before is not None and before.type == "attention" and before.layer == unit.layer:
            spans[-1] = (index - 1, index)
        else:
            spans.append((index, index))
    return spans


def _layers(stage: Sequence[PlannedUnit]) -> list[list[PlannedUnit]]:
    """The units of a stage's layers, layer by layer."""
    units = (unit for unit in stage if unit.type in LAYERS)
    return [list(run) for _, run in groupby(units, key=lambda unit: unit.layer)]


def _same_operators(ours: str, planned: str) -> bool:
    """Tell whether two names stand for the same operators.

    One kernel has `activation` and `multiply`, which a plan names by the one that its MLP has.
    """
    return _operators(ours) == _operators(planned)


def _operators(names: str) -> set[str]:
    return {"activation" if name == "multiply" else name for name in names.split("+")}


def _is_block(stages: Sequence[Sequence[frozenset[str]]]) -> bool:
    """Tell whether the first N layers of every stage recompute wholly and the others not at all."""
    whole = [["full" in layer for layer in stage] for stage in stages]
    counts = [sum(stage) for stage in whole]
    return all(
        count == min(max(counts), len(stage)) and all(flags[:count]) and all("none" in layer for layer in stage[count:])
        for count, flags, stage in zip(counts, whole, stages, strict=True)
    )
