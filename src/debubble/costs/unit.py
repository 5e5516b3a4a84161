"""A unit of a model: its costs, the ways to recompute it, and its states on device and host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeVar

from debubble.ir import Number


@dataclass(frozen=True)
class Strategy:
    """One way to recompute a unit: bytes that its forward keeps, and time to bring the rest back."""

    activation: Number
    recompute: Number = 0
    operators: str | None = None
    """The operators that it recomputes, as a plan names them; None: the strategy's name says it."""
    after_full: Number | None = None
    """Bytes kept where the unit before it, of the same layer, is in its stage and recomputes in full: a framework that
    recomputes whole layers keeps one input for both.  None: as elsewhere."""
    attention: Number = 0
    """The part of `recompute` that grows with the keys that a token attends to."""

    def with_keys(self, keys: Number) -> Strategy:
        """The strategy where a token attends to so many times as many keys."""
        return replace(self, recompute=self.recompute + (keys - 1) * self.attention, attention=keys * self.attention)

    def scaled(self, factor: float) -> Strategy:
        """The strategy where everything takes so many times as long."""
        return replace(self, recompute=factor * self.recompute, attention=factor * self.attention)


class Saving(NamedTuple):
    """A step to a strategy that recomputes more: the seconds that it adds, and the bytes that it saves."""

    strategy: str
    seconds: float
    saved: float

    @property
    def price(self) -> float:
        """Seconds per byte saved."""
        return self.seconds / self.saved


def whole_activation(strategy: Strategy) -> Number:
    """Bytes that a unit keeps with a strategy, whatever its neighbours do."""
    return strategy.activation


Costs = TypeVar("Costs", "StateBytes", "HostStates")


def added(costs: type[Costs], parts: Sequence[Costs]) -> Costs:
    """The sum of such costs, entry by entry."""
    return costs(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(costs)})


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of a unit's model states on one device, by part."""

    weights: Number
    gradients: Number
    optimizer: Number

    @property
    def total(self) -> Number:
        """Bytes of all states together."""
        return self.weights + self.gradients + self.optimizer

    @staticmethod
    def sum(units: Iterable[Unit]) -> StateBytes:
        """The bytes of several units together, as far as they say them."""
        return added(StateBytes, [unit.states for unit in units if unit.states is not None])


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """Costs of a unit whose optimizer states and step are the host's."""

    static: Number
    """Bytes that stay on the device."""
    gradients: Number
    """Bytes that go down to the host, once per step."""
    parameters: Number
    """Bytes that come up from it."""
    step: Number
    """Time of the optimizer step on the host."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One model unit.  `strategies` always has `none`."""

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
    """Bytes that its forward or backward needs while it runs; a stage needs the largest of its units'."""
    states: StateBytes | None = field(default=None, compare=False)
    """The parts of `static`; None: a units file does not say."""
    on_host: HostStates | None = None
    """None: its optimizer states stay on the device."""
    hosted: Number = 0
    """Bytes on the host of what `--host-optimizer` puts there."""
    gradient_reduce: Number = 0
    """Time of summing its gradients over the data-parallel ranks, next to what every stage takes."""
    optimizer_step: Number = 0
    """Time of its optimizer step on the device, next to what every stage takes."""
    module_bytes: Mapping[str, Number] = field(default_factory=dict)
    """Bytes of what `none` keeps, by the module that it is the input of, where a framework offloads by module."""
    parameter_gather: Number = 0
    """Time of gathering its parameters, where ranks divide them (ZeRO-3), next to what every stage takes."""
    gathered: Number = 0
    """Bytes of its whole parameters, once they are gathered."""
    undivided: Number = 0
    """Bytes that its gradients have beyond this rank's part (ZeRO-2), where they stay whole until they are summed."""
    attention_forward: Number = 0
    """The part of `forward` that grows with the keys that a token attends to."""
    attention_backward: Number = 0
    """The part of `backward_input` that does."""
    keys_and_values: Number = 0
    """Bytes of a slice's keys and values, which stay on the device from its forward to its backward."""
    key_value_gradient: Number = 0
    """Bytes of the gradients of a slice's keys and values, while slices after it add to them."""

    @property
    def activation(self) -> Number:
        """Bytes per micro-batch that the forward keeps for the backward if nothing is recomputed."""
        return self.strategies["none"].activation

    @property
    def work(self) -> Number:
        """Time per micro-batch of the forward and the whole backward."""
        return self.forward + self.backward_input + self.backward_weight

    def savings(
        self, allowed: Collection[str] | None = None, *, kept_by: Callable[[Strategy], Number] = whole_activation
    ) -> list[Saving]:
        """Steps from `none` along the convex hull of the strategies, cheapest byte first: no mix of them saves more.

        Args:
            allowed: The only names to choose from next to `none`; None: all.
            kept_by: Bytes that the unit keeps with a strategy other than `none`.
        """
        ways = [
            (name, float(kept_by(strategy)), float(strategy.recompute))
            for name, strategy in self.strategies.items()
            if allowed is None or name == "none" or name in allowed
        ]
        kept, spent = float(self.activation), 0.0
        steps: list[Saving] = []
        while smaller := [
            ((time - spent) / (kept - size), -size, name, time) for name, size, time in ways if size < kept
        ]:
            _, size, name, time = min(smaller)
            steps.append(Saving(name, time - spent, kept + size))
            kept, spent = -size, time
        return steps

    def with_keys(self, keys: Number, strategies: Mapping[str, Strategy]) -> Unit:
        """The unit where a token attends to so many times as many keys, with its strategies there."""
        return replace(
            self,
            forward=self.forward + (keys - 1) * self.attention_forward,
            backward_input=self.backward_input + (keys - 1) * self.attention_backward,
            strategies=strategies,
            attention_forward=keys * self.attention_forward,
            attention_backward=keys * self.attention_backward,
        )

    def scaled(self, factor: float, strategies: Mapping[str, Strategy]) -> Unit:
        """The unit where everything takes so many times as long, with its strategies, scaled."""
        host = self.on_host
        return replace(
            self,
            strategies=strategies,
            on_host=None if host is None else replace(host, step=factor * host.step),
            **{name: factor * getattr(self, name) for name in (*TIMES, *STEP_TIMES)},
        )

    def strategy_named(self, operators: str) -> str | None:
        """The name of the strategy that recomputes what a plan says, of the operators that the unit has.

        None if it has none of them in a strategy of their own.
        """
        for name, strategy in self.strategies.items():
            if operators in (name, strategy.operators):
                return name
        known = {part for name in self.strategies for part in name.split("+")}
        wanted = known.intersection(operators.split("+"))
        return next((name for name in self.strategies if set(name.split("+")) == wanted), None)


def changed_by_kind(units: Iterable[Unit], change: Callable[[Unit], Unit]) -> Iterator[Unit]:
    """Every unit changed; of units that have the same entries but for the layer, as equal layers do, only the first.

    A search of degrees changes thousands of models.
    """
    made: dict[tuple[int, ...], Unit] = {}
    for unit in units:
        kind = kind_of(unit)
        if kind not in made:
            made[kind] = change(unit)
        yield at_layer(made[kind], unit.layer)


def kind_of(unit: Unit) -> tuple[int, ...]:
    """The identities of a unit's entries but for the layer: equal layers, which are priced once, have the same."""
    entries = dict(vars(unit))
    del entries["layer"]
    return tuple(map(id, entries.values()))


def at_layer(unit: Unit, layer: int | None) -> Unit:
    """The unit of another layer, of which a job has thousands: `replace` checks every entry again."""
    moved = object.__new__(Unit)
    moved.__dict__.update(unit.__dict__, layer=layer)
    return moved


def fastest_units(tables: Sequence[Sequence[Unit]]) -> tuple[Unit, ...]:
    """The units with the least time that they take on any type of device; sizes are the same on all."""
    merged: dict[int, Mapping[str, Strategy]] = {}
    fastest = []
    for equal in zip(*tables, strict=True):
        first = equal[0]
        # Layers of one kind have one table of strategies, and keep one.
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
        least = {time: min(getattr(unit, time) for unit in equal) for time in times}
        fastest.append(replace(first, strategies=merged[id(first.strategies)], **least))
    return tuple(fastest)


TIMES = ("forward", "backward_input", "backward_weight", "attention_forward", "attention_backward")
STEP_TIMES = ("gradient_reduce", "optimizer_step", "parameter_gather")
"""Times of a unit's parameters."""
OF_TOKENS = ("keys_and_values", "key_value_gradient")
OF_PARAMETERS = ("static", "hosted", *STEP_TIMES, "gathered", "undivided")
"""The entries of a unit that its parameters cost."""


def joined_unit(kind: str, layer: int | None, *halves: Unit) -> Unit:
    """The halves of a layer, and perhaps more, as one unit, which recomputes in full or not at all.

    Args:
        kind: The unit's type.
        layer: Index of its decoder layer; None: it is none.
        halves: Its parts, in order.
    """
    hosts = [half.on_host for half in halves if half.on_host is not None]
    full = [half.strategies["full"] for half in halves]
    return Unit(
        **{name: sum(getattr(half, name) for half in halves) for name in (*TIMES, *OF_TOKENS, *OF_PARAMETERS)},
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
