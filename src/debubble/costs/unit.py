"""A unit of a model: its costs, its recomputation strategies, and its model states on device and host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeVar

from debubble.ir import Number


@dataclass(frozen=True)
class Strategy:
    """A recomputation strategy of a unit: bytes that its forward keeps, and time to recompute the others."""

    activation: Number
    recompute: Number = 0
    operators: str | None = None
    """The recomputed operators, as a plan names them; None: the strategy's name."""
    after_full: Number | None = None
    """Bytes kept if the previous unit of the same layer is in the same stage and recomputes in full: a framework that
    recomputes whole layers keeps one input for both.  None: `activation`."""
    attention: Number = 0
    """Time within `recompute` that is proportional to the keys that a token attends to."""

    def with_keys(self, keys: Number) -> Strategy:
        """The strategy where a token attends to `keys` times as many keys."""
        return replace(self, recompute=self.recompute + (keys - 1) * self.attention, attention=keys * self.attention)

    def scaled(self, factor: float) -> Strategy:
        """The strategy with all times scaled by a factor."""
        return replace(self, recompute=factor * self.recompute, attention=factor * self.attention)


class Saving(NamedTuple):
    """A step to a strategy that recomputes more, with the seconds that it adds and the bytes that it saves."""

    strategy: str
    seconds: float
    saved: float

    @property
    def price(self) -> float:
        """Seconds per byte saved."""
        return self.seconds / self.saved


Costs = TypeVar("Costs", "StateBytes", "HostStates")


def added(costs: type[Costs], terms: Sequence[Costs]) -> Costs:
    """The sum of the terms, field by field."""
    return costs(**{f.name: sum(getattr(term, f.name) for term in terms) for f in fields(costs)})


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of a unit's model states on one device, by kind."""

    weights: Number
    gradients: Number
    optimizer: Number

    @property
    def total(self) -> Number:
        """Bytes of all states together."""
        return self.weights + self.gradients + self.optimizer

    @staticmethod
    def sum(units: Iterable[Unit]) -> StateBytes:
        """The bytes of several units together; units without `states` count as 0."""
        return added(StateBytes, [unit.states for unit in units if unit.states is not None])


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """Costs of a unit whose optimizer states and step are offloaded to the host."""

    static: Number
    """Bytes that stay on the device."""
    gradients: Number
    """Bytes offloaded to the host once per step."""
    parameters: Number
    """Bytes loaded from the host once per step."""
    step: Number
    """Time of the CPU optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Costs of one model unit, such as a half-layer.  `strategies` always has `none`."""

    type: str
    layer: int | None
    forward: Number
    backward_input: Number
    backward_weight: Number
    static: Number
    strategies: Mapping[str, Strategy]
    activation_after_input: Number | None = None
    """Bytes that remain between I and W; None: half of what `none` keeps."""
    workspace: Number = 0
    """Transient bytes of its forward or backward; a stage needs the maximum over its units."""
    states: StateBytes | None = field(default=None, compare=False)
    """The breakdown of `static`; None: unknown, as in a units file."""
    on_host: HostStates | None = None
    """Costs if its optimizer is offloaded; None: it cannot be."""
    hosted: Number = 0
    """Host bytes under `--host-optimizer`."""
    gradient_reduce: Number = 0
    """Time to reduce its gradients over the data-parallel ranks, in addition to the time per stage."""
    optimizer_step: Number = 0
    """Time of its optimizer step on the device, in addition to the time per stage."""
    module_bytes: Mapping[str, Number] = field(default_factory=dict)
    """Module -> bytes that `none` keeps as its input, where a framework offloads by module."""
    parameter_gather: Number = 0
    """Time to gather its parameters where they are sharded (ZeRO-3), in addition to the time per stage."""
    gathered: Number = 0
    """Bytes of its gathered parameters."""
    undivided: Number = 0
    """Bytes of its unsharded gradients beyond this rank's shard (ZeRO-2), where they stay unsharded until reduced."""
    attention_forward: Number = 0
    """Time within `forward` that is proportional to the keys that a token attends to."""
    attention_backward: Number = 0
    """Time within `backward_input` that is."""
    keys_and_values: Number = 0
    """Bytes of a slice's keys and values, which stay on the device from its forward to its backward."""
    key_value_gradient: Number = 0
    """Bytes of the gradients of a slice's keys and values, to which the slices after it add."""

    @property
    def activation(self) -> Number:
        """Bytes per micro-batch that the forward keeps for the backward without recomputation."""
        return self.strategies["none"].activation

    @property
    def work(self) -> Number:
        """Time per micro-batch of the forward and the whole backward."""
        return self.forward + self.backward_input + self.backward_weight

    def savings(
        self, allowed: Collection[str] | None = None, *, activation_of: Callable[[Strategy], Number] | None = None
    ) -> list[Saving]:
        """Steps from `none` along the lower convex hull of (bytes, seconds) of the strategies, cheapest byte first.

        Args:
            allowed: The names to choose from, besides `none`; None: all.
            activation_of: Bytes that the unit keeps with a strategy other than `none`; None: its `activation`.
        """
        candidates = [
            (name, float(activation_of(strategy) if activation_of else strategy.activation), float(strategy.recompute))
            for name, strategy in self.strategies.items()
            if allowed is None or name == "none" or name in allowed
        ]
        current, spent = float(self.activation), 0.0
        steps: list[Saving] = []
        while smaller := [
            ((time - spent) / (current - size), -size, name, time) for name, size, time in candidates if size < current
        ]:
            _, size, name, time = min(smaller)
            steps.append(Saving(name, time - spent, current + size))
            current, spent = -size, time
        return steps

    def with_keys(self, keys: Number, strategies: Mapping[str, Strategy]) -> Unit:
        """The unit where a token attends to `keys` times as many keys, with the strategies for that."""
        return replace(
            self,
            forward=self.forward + (keys - 1) * self.attention_forward,
            backward_input=self.backward_input + (keys - 1) * self.attention_backward,
            strategies=strategies,
            attention_forward=keys * self.attention_forward,
            attention_backward=keys * self.attention_backward,
        )

    def scaled(self, factor: float, strategies: Mapping[str, Strategy]) -> Unit:
        """The unit with all times scaled by a factor, and its scaled strategies."""
        host = self.on_host
        return replace(
            self,
            strategies=strategies,
            on_host=None if host is None else replace(host, step=factor * host.step),
            **{name: factor * getattr(self, name) for name in (*TIMES, *STEP_TIMES)},
        )

    def strategy_named(self, operators: str) -> str | None:
        """The name of the strategy that recomputes the operators that a plan names, ignoring those that the unit lacks.

        None if no strategy recomputes exactly these.
        """
        for name, strategy in self.strategies.items():
            if operators in (name, strategy.operators):
                return name
        known = {operator for name in self.strategies for operator in name.split("+")}
        wanted = known.intersection(operators.split("+"))
        return next((name for name in self.strategies if set(name.split("+")) == wanted), None)


def changed_by_kind(units: Iterable[Unit], change: Callable[[Unit], Unit]) -> Iterator[Unit]:
    """Apply a change to every unit, only once per kind: a search of degrees changes thousands of models."""
    changed: dict[tuple[int, ...], Unit] = {}
    for unit in units:
        kind = kind_of(unit)
        if kind not in changed:
            changed[kind] = change(unit)
        yield at_layer(changed[kind], unit.layer)


def kind_of(unit: Unit) -> tuple[int, ...]:
    """The kind of a unit: the ids of its entries except `layer`, which equal layers share as they are priced once."""
    entries = dict(vars(unit))
    del entries["layer"]
    return tuple(map(id, entries.values()))


def at_layer(unit: Unit, layer: int | None) -> Unit:
    """A copy of the unit for another layer; thousands are made, and `dataclasses.replace` is too slow for that."""
    moved = object.__new__(Unit)
    moved.__dict__.update(unit.__dict__, layer=layer)
    return moved


def fastest_units(tables: Sequence[Sequence[Unit]]) -> tuple[Unit, ...]:
    """The units with the minimum of their times over all types of device; sizes are the same on all."""
    merged: dict[int, Mapping[str, Strategy]] = {}
    fastest = []
    for equal in zip(*tables, strict=True):
        first = equal[0]
        # Equal layers share one table of strategies, before and after.
        if id(first.strategies) not in merged:
            merged[id(first.strategies)] = {
                name: replace(
                    strategy,
                    recompute=min(unit.strategies[name].recompute for unit in equal),
                    attention=min(unit.strategies[name].attention for unit in equal),
                )
                for name, strategy in first.strategies.items()
            }
        times = (
            "forward", "backward_input", "backward_weight", "attention_forward", "attention_backward",
            "gradient_reduce", "optimizer_step",
        )  # fmt: skip
        fastest_times = {time: min(getattr(unit, time) for unit in equal) for time in times}
        fastest.append(replace(first, strategies=merged[id(first.strategies)], **fastest_times))
    return tuple(fastest)


TIMES = ("forward", "backward_input", "backward_weight", "attention_forward", "attention_backward")
"""Entries of a unit that are times per micro-batch."""
STEP_TIMES = ("gradient_reduce", "optimizer_step", "parameter_gather")
"""Entries of a unit that are times per step."""
SLICE_ENTRIES = ("keys_and_values", "key_value_gradient")
"""Entries of a unit that only slices of sequences have."""
PARAMETER_ENTRIES = ("static", "hosted", *STEP_TIMES, "gathered", "undivided")
"""Entries of a unit that are costs of its parameters."""


def joined_unit(kind: str, layer: int | None, *halves: Unit) -> Unit:
    """Join the halves of a layer, and other units, into one unit, which recomputes in full or not at all.

    Args:
        kind: The unit's type.
        layer: Index of its decoder layer; None: it is not a layer.
        halves: The units to join, in order.
    """
    hosts = [half.on_host for half in halves if half.on_host is not None]
    full = [half.strategies["full"] for half in halves]
    return Unit(
        **{name: sum(getattr(half, name) for half in halves) for name in (*TIMES, *SLICE_ENTRIES, *PARAMETER_ENTRIES)},
        type=kind,
        layer=layer,
        strategies={
            "none": Strategy(sum(half.activation for half in halves)),
            "full": Strategy(
                full[0].activation,
                sum(strategy.recompute for strategy in full),
                attention=sum(strategy.attention for strategy in full),
            ),
        },
        activation_after_input=sum(half.activation_after_input or 0 for half in halves),
        workspace=max(half.workspace for half in halves),
        states=StateBytes.sum(halves),
        on_host=added(HostStates, hosts) if hosts else None,
        module_bytes={name: size for half in halves for name, size in half.module_bytes.items()},
    )
