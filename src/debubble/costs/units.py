"""Model units and their costs: what partitioning moves.

`Units` describes a model, measured or computed or given as a units file, before it is cut into stages.  A
`Partition` says which units form each stage and how each recomputes; `Units.stage_costs` gives the stages' costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from debubble.ir import Number, Placement, StageCosts
from debubble.ir.costs import CommunicationModel, HostLink
from debubble.ir.plan import PlannedUnit


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


@dataclass(frozen=True, kw_only=True)
class HostStates:
    """What a unit costs if its optimizer states and its step are the host's."""

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
    on_host: HostStates | None = None
    """None: its optimizer states stay on the device."""

    @property
    def activation(self) -> Number:
        return self.strategies["none"].activation

    @property
    def work(self) -> Number:
        return self.forward + self.backward_input + self.backward_weight


Partition = Sequence[Sequence[tuple[int, str]]]
"""Per stage, its units as (index, strategy), in model order."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """A model in model order, with what joins its units."""

    units: tuple[Unit, ...]
    communication: Number = 0
    """Time of one boundary tensor between two devices."""
    communication_model: CommunicationModel = "latency"
    offload_bandwidth: Number | None = None
    """Bytes per second of the host link, per direction; None: no offload."""
    host_link: HostLink = "full-duplex"
    link_groups: tuple[tuple[int, ...], ...] = ()
    memory_limit: tuple[Number, ...] | None = None
    """Per device, or one for all."""
    static: Number = 0
    """Bytes on every device beside its units' own."""
    micro_batch_scale: tuple[Number, ...] | None = None
    stage_entries: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of StageCosts that hold for every stage."""

    @cached_property
    def work(self) -> Number:
        """Recompute-free compute time of one micro-batch on the whole model."""
        return sum(unit.work for unit in self.units)

    @cached_property
    def hostable(self) -> bool:
        """Whether optimizer states can be offloaded: every unit says what that costs, and there is a link."""
        return self.offload_bandwidth is not None and all(unit.on_host is not None for unit in self.units)

    def stage_costs(self, partition: Partition, placement: Placement, *, on_host: Collection[int] = ()) -> StageCosts:
        """Costs of the stages that a partition makes; the optimizer states of the stages `on_host` are the host's.

        `recompute`, `activation_recomputed` and the workspace follow each unit's strategy; a stage where some unit's
        is not `none` belongs in the schedule's `fused_recompute` (or gets R operations).
        """
        stages = [[(self.units[index], strategy) for index, strategy in stage] for stage in partition]
        bandwidth = self.offload_bandwidth
        activation = [sum(u.activation for u, _ in stage) for stage in stages]
        transfer = None if bandwidth is None else [a / bandwidth for a in activation]
        recomputed = [_recomputed_runs(stage) for stage in stages]
        return StageCosts.of(
            stages=len(stages),
            forward=[sum(u.forward for u, _ in stage) for stage in stages],
            backward_input=[sum(u.backward_input for u, _ in stage) for stage in stages],
            backward_weight=[sum(u.backward_weight for u, _ in stage) for stage in stages],
            recompute=[sum(u.strategies[s].recompute for u, s in stage) for stage in stages],
            activation=activation,
            activation_after_input=[sum(_after_input(u) for u, _ in stage) for stage in stages],
            activation_recomputed=[sum(run.kept for run in runs) for runs in recomputed],
            recompute_workspace=[max((run.restored for run in runs), default=0) for runs in recomputed],
            communication=self.communication,
            communication_model=self.communication_model,
            offload=transfer,
            host_link=self.host_link,
            link_groups=self.link_groups,
            static=[self._static(held, stages, on_host) for held in placement.stages_of],
            memory_limit=self.memory_limit,
            micro_batch_scale=self.micro_batch_scale,
            **{**self.stage_entries, **(self._host_entries(stages, on_host) if on_host else {})},
        )

    def planned(self, partition: Partition) -> tuple[tuple[PlannedUnit, ...], ...]:
        """The partition as a plan lists it."""
        return tuple(
            tuple(PlannedUnit(u.type, u.layer, u.strategies[s].operators or s) for u, s in stage)
            for stage in ([(self.units[index], strategy) for index, strategy in stage] for stage in partition)
        )

    def _host_entries(
        self, stages: Sequence[Sequence[tuple[Unit, str]]], on_host: Collection[int]
    ) -> Mapping[str, list[Number]]:
        """What the optimizer step of the stages on the host takes."""
        assert self.offload_bandwidth is not None
        hosted = [[u.on_host for u, _ in stage if u.on_host and s in on_host] for s, stage in enumerate(stages)]
        return {
            "gradient_offload": [sum(h.gradients for h in stage) / self.offload_bandwidth for stage in hosted],
            "host_step": [sum(h.step for h in stage) for stage in hosted],
            "parameter_load": [sum(h.parameters for h in stage) / self.offload_bandwidth for stage in hosted],
        }

    def _static(
        self, held: Sequence[int], stages: Sequence[Sequence[tuple[Unit, str]]], on_host: Collection[int]
    ) -> Number:
        units = [(unit, stage in on_host) for stage in held for unit, _ in stages[stage]]
        states = sum(unit.on_host.static if away and unit.on_host else unit.static for unit, away in units)
        return self.static + states + max((unit.workspace for unit, _ in units), default=0)


def recomputing(partition: Partition) -> frozenset[int]:
    """The stages where some unit recomputes."""
    return frozenset(s for s, stage in enumerate(partition) if any(strategy != "none" for _, strategy in stage))


class _Run(NamedTuple):
    """Units of a stage that recompute together."""

    kept: Number
    restored: Number


def _recomputed_runs(stage: Sequence[tuple[Unit, str]]) -> list[_Run]:
    """Unit by unit, or layer by layer where two halves share one input."""
    runs: list[_Run] = []
    previous: tuple[int | None, str] = (None, "none")
    for unit, name in stage:
        strategy = unit.strategies[name]
        if strategy.after_full is not None and previous == (unit.layer, "full"):
            kept, restored = runs.pop()
            runs.append(_Run(kept + strategy.after_full, restored + unit.activation - strategy.after_full))
        else:
            runs.append(_Run(strategy.activation, unit.activation - strategy.activation))
        previous = unit.layer, name
    return runs


def _after_input(unit: Unit) -> Number:
    return unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
