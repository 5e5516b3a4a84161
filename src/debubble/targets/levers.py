"""What a plan may choose for a framework: the order of operations, layers per stage, and recomputation settings.

Planners move a framework's units as any others: a decoder layer is one unit, whose strategies are named after the
framework's settings.  Nothing else recomputes, and nothing is offloaded.  `halves` translates a partition into layers
back to the half-layers in which a plan lists its stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from debubble.costs import joined_unit
from debubble.costs.partition import Partition
from debubble.costs.unit import Strategy, Unit, at_layer, changed_by_kind, kind_of
from debubble.costs.units import Units
from debubble.errors import UnsupportedError
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
    """The setting that recomputes the same operators in dense and MoE layers."""
    return Choice(way, way)


FULL_OR_NONE: Mapping[str, Choice] = {"none": same(NOTHING), "full": same(EVERYTHING)}
"""Settings of a framework that recomputes all of a layer or nothing."""


@dataclass(frozen=True)
class PerLayer:
    """Each layer has its own recomputation setting."""

    choices: Mapping[str, Choice]
    from_start: bool = False
    """Whether the framework gives the number of recomputing layers of a stage, counted from its first layer."""


@dataclass(frozen=True)
class Uniform:
    """All layers share one recomputation setting."""

    choices: Mapping[str, Choice]
    block: bool = False
    """Whether the first N layers of every stage may recompute fully instead (Megatron's `block`), N equal for all."""
    full: bool = True
    """Whether full recomputation of all layers is one of the settings."""


Recomputation = PerLayer | Uniform


HALVES = ("attention", "mlp")
LAYERS = (*HALVES, "layer")
"""Types of units that are decoder layers, or half of one."""


@dataclass(frozen=True)
class TargetLevers:
    """The levers that a framework leaves to a plan.

    Attributes:
        orders: The orders that it runs.
        recomputation: Its ways to recompute.
        keeps_until_weights: Whether all tensors of a forward stay until W next to their gradients, as in torch's
            split of a backward.
        offload: The ways in which it offloads modules of all layers alike; nothing else is offloaded.
    """

    orders: Orders
    recomputation: Recomputation
    keeps_until_weights: bool = False
    offload: tuple[ModuleOffload, ...] = ()

    def as_run(self, schedule: Schedule, recomputing: frozenset[int]) -> Schedule:
        """A planner's schedule as the framework runs it, without offload.

        Raises:
            UnsupportedError: if it runs no such order; InfeasibleError: if other micro-batches might.
        """
        compute = replace(without_transfers(schedule), fused_recompute=recomputing)
        taken = self.orders.as_run(compute, recomputing)
        refusal = self.orders.refusal(taken)
        if refusal is not None:
            if taken.placement.chunks > 1 and taken.micro_batches % taken.devices:
                raise InfeasibleError(f"The framework {refusal}.")
            raise UnsupportedError(
                f"The framework {refusal}, not '{schedule.name}': leave out --planner to ask planners of its orders."
            )
        return taken

    def half_layers(self, units: Units, model: Model, options: RunOptions) -> Units:
        """The half-layers with the framework's memory and, of all offload, its offload by module."""
        if not self.offload:
            halves = changed_by_kind(units.units, self._half_layer)
            return replace(units, units=tuple(halves), offload_bandwidth=None)
        halves = changed_by_kind(units.units, lambda unit: with_modules(self._half_layer(unit), model, options))
        return replace(units, units=tuple(halves), offload_bandwidth=None, module_bandwidth=units.offload_bandwidth)

    def offload_of(self, schedule: Schedule, units: Units, partition: Partition) -> ModuleOffload | None:
        """The offload setting that makes the schedule's transfers; None if no setting of the framework does."""
        return setting_of(schedule, units, partition, self.offload) if schedule.offloaded else None

    def layers(self, units: Units, sparse: frozenset[int]) -> Units:
        """The units of `half_layers` with the halves of each layer joined; `sparse` are the layers with experts."""
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
        """Partitions whose layers share one setting, in groups ordered by increasing recomputation."""
        layers = [unit for unit in units.units if unit.type in LAYERS]
        common = [name for name in self._choices if all(name in unit.strategies for unit in layers)]
        times = {name: sum(unit.strategies[name].recompute for unit in layers) for name in common}
        if isinstance(self.recomputation, Uniform):
            yield (
                Partition.cut(units, lengths, strategy=name) for name in sorted(common, key=lambda name: times[name])
            )
            if self.recomputation.block:
                yield (_block(units, lengths, number) for number in range(1, max(lengths) + 1))

    def in_target_order(self, units: Units, partition: Partition) -> Partition:
        """The partition with the equal layers of a stage in the framework's order of recomputation."""
        if not isinstance(self.recomputation, PerLayer) or not self.recomputation.from_start:
            return partition
        return Partition(_most_first(units, stage) for stage in partition)

    def allows(self, units: Units, partition: Partition) -> bool:
        """Tell whether the framework can run the combination of settings of a partition into layers."""
        if not isinstance(self.recomputation, Uniform):
            return True
        stages = [
            [frozenset({name}) for index, name in stage if units.units[index].type in LAYERS] for stage in partition
        ]
        names = {name for stage in stages for layer in stage for name in layer}
        return len(names) < 2 or (self.recomputation.block and _is_block(stages))

    def halves(self, units: Units, joined: Units, partition: Partition) -> Partition:
        """The partition of the half-layers `units` that a partition of the layers `joined` from them means."""
        spans = _spans(units.units)

        def expanded(stage: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
            for index, name in stage:
                first, last = spans[index]
                pair = joined.units[index].strategies[name].operators
                names = (name,) if pair is None else tuple(pair.split("|"))
                yield from zip(range(first, last + 1), names, strict=True)

        return Partition(expanded(stage) for stage in partition)

    def expresses(self, stages: Sequence[Sequence[PlannedUnit]], sparse: frozenset[int]) -> bool:
        """Tell whether stages end between layers, layers have its settings, and nothing else recomputes."""
        settings = [[self._settings(layer, sparse) for layer in _layers(stage)] for stage in stages]
        ends = (unit for stage in stages for unit in stage if unit.type not in LAYERS)
        if any(unit.strategy != "none" for unit in ends) or not all(all(stage) for stage in settings):
            return False
        of_layers = [names for stage in settings for names in stage]
        if not isinstance(self.recomputation, Uniform) or not of_layers or frozenset.intersection(*of_layers):
            return True
        return self.recomputation.block and _is_block(settings)

    def _settings(self, layer: Sequence[PlannedUnit], sparse: frozenset[int]) -> frozenset[str]:
        """Names of the settings that recompute these operators of a layer; empty for half a layer."""
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
        full = isinstance(self.recomputation, Uniform) and self.recomputation.full
        return {**self.recomputation.choices, **(FULL_OR_NONE if full else {})}

    def _distinct(self, *, dense: bool, sparse: bool) -> list[tuple[str, Choice]]:
        """The settings without those that recompute the same operators in the model's layers as an earlier one."""
        first: dict[tuple[Way | None, Way | None], tuple[str, Choice]] = {}
        for name, choice in self._choices.items():
            key = choice.dense if dense else None, choice.sparse if sparse else None
            first.setdefault(key, (name, choice))
        return list(first.values())

    def _half_layer(self, unit: Unit) -> Unit:
        after_input = unit.activation_after_input
        if self.keeps_until_weights:
            after_input = unit.activation + (unit.activation / 2 if after_input is None else after_input)
        return replace(unit, on_host=None, activation_after_input=after_input)


def _joined_layer(units: Sequence[Unit], ways: Mapping[str, Way]) -> Unit:
    """Join the halves of a layer; a unit that is a layer already keeps the strategies that both halves have."""
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
    """The layers of a stage, those of each kind in the order of decreasing recomputation."""
    strategies: dict[Number, list[str]] = {}
    for index, name in stage:
        strategies.setdefault(units.units[index].activation, []).append(name)
    for activation, names in strategies.items():
        kind = next(unit for index, _ in stage if (unit := units.units[index]).activation == activation)
        names.sort(key=lambda name: (name == "full", kind.strategies[name].recompute))
    yield from ((index, strategies[units.units[index].activation].pop()) for index, _ in stage)


def _block(units: Units, lengths: Sequence[int], number: int) -> Partition:
    """Stages whose first `number` layers recompute fully."""
    stages = []
    for stage in Partition.cut(units, lengths):
        layers = [index for index, _ in stage if units.units[index].type in LAYERS][:number]
        stages.append([(index, "full" if index in layers else "none") for index, _ in stage])
    return Partition(stages)


def _way(choice: Choice, layer: int | None, sparse: frozenset[int]) -> Way:
    return choice.sparse if layer in sparse else choice.dense


def _strategy(attention: Unit, mlp: Unit, way: Way) -> Strategy | None:
    """The strategy of the joined halves; None if one of them lacks its part."""
    names = attention.strategy_named(way.attention), mlp.strategy_named(way.mlp)
    if names[0] is None or names[1] is None:
        return None
    first, second = attention.strategies[names[0]], mlp.strategies[names[1]]
    shared = second.after_full if way == EVERYTHING and second.after_full is not None else second.activation
    return Strategy(first.activation + shared, first.recompute + second.recompute, f"{names[0]}|{names[1]}")


def _spans(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """First and last index of the units of each layer; an end of the model is a span of its own."""
    spans: list[tuple[int, int]] = []
    for index, unit in enumerate(units):
        before = units[index - 1] if index else None
        if unit.type == "mlp" and before is not None and before.type == "attention" and before.layer == unit.layer:
            spans[-1] = (index - 1, index)
        else:
            spans.append((index, index))
    return spans


def _layers(stage: Sequence[PlannedUnit]) -> list[list[PlannedUnit]]:
    """The units of a stage grouped by layer."""
    units = (unit for unit in stage if unit.type in LAYERS)
    return [list(run) for _, run in groupby(units, key=lambda unit: unit.layer)]


def _same_operators(ours: str, planned: str) -> bool:
    """Tell whether two names mean the same operators; `multiply` and `activation` are one kernel."""
    return _operators(ours) == _operators(planned)


def _operators(names: str) -> set[str]:
    return {"activation" if name == "multiply" else name for name in names.split("+")}


def _is_block(stages: Sequence[Sequence[frozenset[str]]]) -> bool:
    """Tell whether the first N layers of every stage recompute fully and the rest not at all."""
    full = [["full" in layer for layer in stage] for stage in stages]
    counts = [sum(stage) for stage in full]
    return all(
        count == min(max(counts), len(stage)) and all(flags[:count]) and all("none" in layer for layer in stage[count:])
        for count, flags, stage in zip(counts, full, stages, strict=True)
    )
