"""The units of a model, whether measured, computed or read from a units file, and the costs of stages of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, pairwise
from typing import Any

from msgspec import UNSET

from debubble.costs.stage_sums import ADDED, StageSums, sums_of
from debubble.costs.unit import Strategy, Unit, fastest_units
from debubble.ir import Number, Placement, StageCosts
from debubble.ir.plan_entries import PlannedUnit
from debubble.ir.stage_costs import OVERLAPS, SLICED, CommunicationModel, HostLink, check_counts
from debubble.pickling import PickledFields


@dataclass(frozen=True, kw_only=True)
class Units(PickledFields):
    """A model's units in order, with the links, memory limits and fixed costs of its devices."""

    units: tuple[Unit, ...]
    seconds: bool = False
    """True if times are in seconds; False if they have a unit of the user's choice."""
    dtype: str | None = None
    """The compute dtype in which the units were measured, and a plan of them runs; None: unknown."""
    communication: Number = 0
    """Time to send an activation to another device, in another node if the pipeline has several."""
    communication_within_node: Number | None = None
    """Time to send an activation to a device of the same node; None: `communication`."""
    devices_per_node: int = 1
    """Pipeline devices per node; it matters where `communication_within_node` is set."""
    communication_model: CommunicationModel = "latency"
    offload_bandwidth: Number | None = None
    """Bytes per second of the host link, per direction; None: no offload."""
    module_bandwidth: Number | None = None
    """Bytes per second of a host link that a framework uses to offload modules' inputs, and planners do not use."""
    host_memory: Number | None = None
    """Bytes of host memory per device; None: no limit."""
    host_step_bandwidth: Number | None = None
    """Bytes per second of host memory for one device's CPU optimizer step; None: not measured."""
    host_link: HostLink = "full-duplex"
    link_groups: tuple[tuple[int, ...], ...] = ()
    memory_limit: tuple[Number, ...] | None = None
    """Per device, or one for all."""
    static: Number = 0
    """Bytes on every device besides those of its units."""
    receive_buffers: Number = 0
    """Bytes of a stage's receive buffers for one neighbor, where a framework has a buffer per micro-batch."""
    kept_outputs: Number = 0
    """Bytes of the logits that the last stage keeps to the end of a step, where a framework keeps them."""
    micro_batch_scale: tuple[Number, ...] | None = None
    slices: int = 1
    """Slices per sequence; the units have the costs of the first slice."""
    attention_scale: tuple[Number, ...] | None = None
    """Keys that a token attends to, as in StageCosts; the units have the costs of tokens that attend to the fewest."""
    stage_entries: Mapping[str, Any] = field(default_factory=dict)
    """Entries of StageCosts that every stage has in addition to the sums over its units."""
    on_devices: tuple[tuple[Unit, ...], ...] = ()
    """The units as each pipeline device runs them; empty: the same on all.  Where devices differ, `units` have the
    minimum of the devices' times."""
    streams: bool = True
    """True if offload moves the activations of a stage's first units, each while the others compute.  False for a
    framework that offloads a fraction of every unit."""
    divides_gradients: bool = True
    """True if a rank keeps only its shard of the reduced gradients (ZeRO-2), so that they are reduced in the step."""

    def check_for(self, *, devices: int, micro_batches: int) -> None:
        """Raise InputError if the length of an entry does not match the devices or micro-batches."""
        check_counts(
            devices=devices,
            micro_batches=micro_batches,
            static=(self.static,),
            memory_limit=self.memory_limit,
            micro_batch_scale=self.micro_batch_scale,
            attention_scale=None if self.slices > 1 else self.attention_scale,
            link_groups=self.link_groups,
        )

    @cached_property
    def work(self) -> Number:
        """Compute time of one micro-batch on the whole model without recomputation."""
        return sum(unit.work for unit in self.units)

    @cached_property
    def hostable(self) -> bool:
        """True if optimizer states can be offloaded: every unit has its costs, and there is a host link."""
        return self.offload_bandwidth is not None and all(unit.on_host is not None for unit in self.units)

    @cached_property
    def gathers(self) -> bool:
        """True if parameters are sharded (ZeRO-3): with more chunks per device, fewer bytes are gathered at a time."""
        return any(unit.gathered for unit in self.units)

    @cached_property
    def reduces_inside(self) -> bool:
        """True if gradients are reduced inside the step, which takes time and frees memory."""
        entry = self.stage_entries.get("gradient_reduce", 0)
        return self.divides_gradients and bool(entry or any(unit.gradient_reduce for unit in self.units))

    @property
    def min_communication(self) -> Number:
        """The minimum time to send an activation to another device."""
        within = self.communication_within_node
        return self.communication if within is None else min(within, self.communication)

    def communication_between(self, placement: Placement) -> tuple[Number, ...]:
        """Time to send an activation from every stage to the next; the last stage's entry is not used."""
        return (*(self.message(a, b) for a, b in pairwise(placement.device_of)), self.communication)

    def message(self, device: int, other: int) -> Number:
        """Time to send an activation from one pipeline device to another."""
        within = self.communication_within_node
        crosses_nodes = device // self.devices_per_node != other // self.devices_per_node
        return self.communication if within is None or crosses_nodes else within

    def stage_costs(
        self, partition: Sequence[Sequence[tuple[int, str]]], placement: Placement, *, on_host: Collection[int] = ()
    ) -> StageCosts:
        """Costs of the stages of a partition; the optimizer states of the stages `on_host` are offloaded.

        `recompute`, `activation_recomputed` and the workspace follow the units' strategies; a stage with a strategy
        other than `none` belongs in the schedule's `fused_recompute` (or gets R operations).
        """
        stages = [self.stage_sums(tuple(stage), d) for stage, d in zip(partition, placement.device_of, strict=True)]
        bandwidth = self.offload_bandwidth
        transfer = None if bandwidth is None else tuple(stage.activation / bandwidth for stage in stages)
        sums = dict(zip(StageSums._fields, zip(*stages, strict=True), strict=True))
        of_stages: dict[str, Any] = {name: sums[name] for name in _OF_STAGES}
        of_stages |= {name: tuple(time + self.stage_entries.get(name, 0) for time in sums[name]) for name in ADDED}
        of_stages |= dict.fromkeys(("host_step", "gradient_offload", "parameter_load", *SLICED), (0,) * len(stages))
        if bandwidth is not None and self.streams:
            of_stages |= {name: sums[name] for name in OVERLAPS}
        # Built directly: `StageCosts.of` would repeat the checks of `Units` for every candidate of a search.
        costs = StageCosts(
            **of_stages,
            communication=self.communication_between(placement),
            communication_model=self.communication_model,
            offload=transfer,
            reload=transfer,
            host_link=self.host_link,
            link_groups=self.link_groups,
            static=tuple(
                self._static([stages[s] for s in local], local, on_host) + self.buffers(local, placement.stages)
                for local in placement.stages_of
            ),
            memory_limit=self.memory_limit,
            micro_batch_scale=self.micro_batch_scale,
        )
        fixed = {name: value for name, value in self.stage_entries.items() if name not in ADDED}
        attention = {} if self.attention_scale is None else self._attention_entries(partition, placement)
        entries = {**fixed, **(self._host_entries(partition, on_host) if on_host else {}), **attention}
        return costs.replace(**entries) if entries else costs

    def with_deeper_level(
        self, costs: StageCosts, deeper: Sequence[Sequence[tuple[int, str]]], placement: Placement
    ) -> StageCosts:
        """The costs with a deeper recomputation level: the strategies of partition `deeper`, for some micro-batches."""
        deep = self.stage_costs(deeper, placement)
        overlaps = {name: [*map(min, getattr(costs, name), getattr(deep, name))] for name in OVERLAPS}
        return costs.replace(recompute_deeper=deep.recompute, activation_deeper=deep.activation_recomputed, **overlaps)

    def _attention_entries(
        self, partition: Sequence[Sequence[tuple[int, str]]], placement: Placement
    ) -> Mapping[str, int | Sequence[Number]]:
        """The entries of StageCosts for slices of sequences, or micro-batches of different lengths."""
        tables = [self.on(device) for device in placement.device_of]
        stages = [[(table[i], s) for i, s in stage] for table, stage in zip(tables, partition, strict=True)]
        return {
            "slices": self.slices,
            "attention_scale": self.attention_scale or (),
            "attention_forward": [sum(unit.attention_forward for unit, _ in stage) for stage in stages],
            "attention_backward": [sum(unit.attention_backward for unit, _ in stage) for stage in stages],
            "attention_recompute": [sum(unit.strategies[s].attention for unit, s in stage) for stage in stages],
            "keys_and_values": [sum(unit.keys_and_values for unit, _ in stage) for stage in stages],
            "key_value_gradient": [sum(unit.key_value_gradient for unit, _ in stage) for stage in stages],
        }

    def offloading_modules(self) -> Units:
        """The units where a framework offloads the inputs of their modules."""
        return replace(self, offload_bandwidth=self.module_bandwidth, streams=False)

    def planned(
        self, partition: Sequence[Sequence[tuple[int, str]]], deeper: Sequence[Sequence[tuple[int, str]]] | None = None
    ) -> tuple[tuple[PlannedUnit, ...], ...]:
        """The partition as a plan lists it, with the strategies of the deeper recomputation level, if there is one."""

        def planned(index: int, strategy: str, deep: str | None) -> PlannedUnit:
            unit = self.units[index]
            names = [name and (unit.strategies[name].operators or name) for name in (strategy, deep)]
            return PlannedUnit(unit.type, unit.layer, names[0] or strategy, names[1] or UNSET)

        if deeper is None:
            return tuple(tuple(planned(*unit, None) for unit in stage) for stage in partition)
        return tuple(
            tuple(planned(*unit, None if deep == unit[1] else deep) for unit, (_, deep) in zip(*stages, strict=True))
            for stages in zip(partition, deeper, strict=True)
        )

    @cached_property
    def _sums_cache(self) -> dict[tuple[int, tuple[tuple[int, str], ...]], StageSums]:
        """A cache of `sums_of`: planners ask for the same stages thousands of times."""
        return {}

    def with_unsharded_gradients(self) -> Units:
        """The units where gradients stay unsharded until the program reduces them, not only during a backward."""

        def unsharded(unit: Unit) -> Unit:
            host = unit.on_host
            on_host = None if host is None else replace(host, static=host.static + unit.undivided)
            return replace(unit, static=unit.static + unit.undivided, on_host=on_host)

        return self.map_units(unsharded)

    def map_units(self, change: Callable[[Unit], Unit]) -> Units:
        """Change every unit of the model, on every device."""
        tables = tuple(tuple(map(change, table)) for table in self.on_devices)
        units = fastest_units(tables) if tables else tuple(map(change, self.units))
        return replace(self, units=units, on_devices=tables)

    def _tables_with(self, change: Callable[[Strategy], Strategy]) -> dict[int, dict[str, Strategy]]:
        """All tables of strategies with every strategy changed, by the id of the table; equal layers share one."""
        tables = {id(unit.strategies): unit.strategies for units in (self.units, *self.on_devices) for unit in units}
        return {key: {name: change(entry) for name, entry in table.items()} for key, table in tables.items()}

    def _with_keys(self, keys: Number) -> Units:
        """The units where a token attends to `keys` times as many keys."""
        tables = self._tables_with(lambda strategy: strategy.with_keys(keys))
        return self.map_units(lambda unit: unit.with_keys(keys, tables[id(unit.strategies)]))

    def corrected(self, factor: float, static: float) -> Units:
        """The units with all times scaled by `factor`, and `static` more bytes on every device."""

        def slower(bandwidth: Number | None) -> Number | None:
            return None if bandwidth is None else bandwidth / factor

        within = self.communication_within_node
        scaled = self._tables_with(lambda strategy: strategy.scaled(factor))
        return replace(
            self.map_units(lambda unit: unit.scaled(factor, scaled[id(unit.strategies)])),
            communication=factor * self.communication,
            communication_within_node=None if within is None else factor * within,
            offload_bandwidth=slower(self.offload_bandwidth),
            module_bandwidth=slower(self.module_bandwidth),
            host_step_bandwidth=slower(self.host_step_bandwidth),
            stage_entries={name: factor * seconds for name, seconds in self.stage_entries.items()},
            static=self.static + static,
        )

    @cached_property
    def average(self) -> Units:
        """The units with the attention of the average token; the same object if all tokens attend to equally many."""
        if self.attention_scale is None:
            return self
        tokens = self.micro_batch_scale or (1,) * len(self.attention_scale)
        keys = sum(scale * count for scale, count in zip(cycle(self.attention_scale), tokens)) / sum(tokens)
        return self._with_keys(keys)

    def of_lengths(self, tokens: tuple[Number, ...], keys: tuple[Number, ...]) -> Units:
        """The units for micro-batches of sequences of different lengths.

        Args:
            tokens: Per micro-batch, its tokens over those of a full one.
            keys: Per micro-batch, the keys that a token attends to on average, over those in a full one.
        """
        min_keys = min(keys)
        units = self._with_keys(min_keys)
        return replace(units, micro_batch_scale=tokens, attention_scale=tuple(count / min_keys for count in keys))

    def of_slices(self, cuts: Sequence[float], *, sequences: int) -> Units:
        """The units for slices of different lengths.

        Args:
            cuts: The ends of the slices, as fractions of a sequence; the last one is 1.
            sequences: Micro-batches per step before slicing.
        """
        edges = [*pairwise((0.0, *cuts))]
        return replace(
            self,
            micro_batch_scale=tuple(self.slices * (end - begin) for begin, end in edges) * sequences,
            attention_scale=tuple(self.slices * (begin + end) for begin, end in edges),
        )

    def cuts_of_equal_work(self) -> tuple[float, ...]:
        """The ends of slices of equal compute time, as fractions of a sequence, rounded to 1/1024 for even GEMM shapes.

        Linear layers take the same time for every token, attention a time in proportion to the tokens before it.
        """
        n = self.slices
        attention = float(sum(unit.attention_forward + unit.attention_backward for unit in self.units))
        # The work up to a fraction x is linear x + square x^2.
        square, linear = n * n * attention, n * (float(sum(unit.work for unit in self.units)) - attention)
        ends = []
        for k in range(1, n + 1):
            work = (linear + square) * k / n
            end = 2 * work / (linear + math.sqrt(linear**2 + 4 * square * work))
            ends.append(round(1024 * end) / 1024)
        return tuple(ends)

    def on(self, device: int) -> tuple[Unit, ...]:
        """The units as a pipeline device runs them."""
        return self.on_devices[device] if self.on_devices else self.units

    def stage_sums(self, stage: tuple[tuple[int, str], ...], device: int | None = None) -> StageSums:
        """Add up the units of a stage, given as (index, strategy) in model order.

        Args:
            stage: The units.
            device: The pipeline device that runs them; None: the fastest one for every unit.
        """
        units = self.units if device is None else self.on(device)
        key = id(units), stage
        if key not in self._sums_cache:
            self._sums_cache[key] = sums_of([(units[index], strategy) for index, strategy in stage])
        return self._sums_cache[key]

    def _host_entries(
        self, partition: Sequence[Sequence[tuple[int, str]]], on_host: Collection[int]
    ) -> Mapping[str, list[Number]]:
        """Times of gradient offload, CPU step and parameter load of the stages `on_host`, by name and stage."""
        assert self.offload_bandwidth is not None
        hosted = [
            [h for index, _ in stage if s in on_host and (h := self.units[index].on_host)]
            for s, stage in enumerate(partition)
        ]
        return {
            "gradient_offload": [sum(h.gradients for h in stage) / self.offload_bandwidth for stage in hosted],
            "host_step": [sum(h.step for h in stage) for stage in hosted],
            "parameter_load": [sum(h.parameters for h in stage) / self.offload_bandwidth for stage in hosted],
        }

    def buffers(self, local: Collection[int], stages: int) -> Number:
        """Bytes of a device's buffers for the messages and outputs of a step.

        Args:
            local: The device's stages.
            stages: The number of all stages.
        """
        neighbors = sum((s > 0) + (s < stages - 1) for s in local)
        return neighbors * self.receive_buffers + (stages - 1 in local) * self.kept_outputs

    def _static(self, sums: Sequence[StageSums], local: Sequence[int], on_host: Collection[int]) -> Number:
        states = sum(s.static_on_host if stage in on_host else s.static for stage, s in zip(local, sums, strict=True))
        gathered = sum(sorted((s.gathered for s in sums), reverse=True)[:2])
        # A correction by measured runs may make `self.static` negative, and the sum with it for small stages.
        return max(0, self.static + states + max((s.workspace for s in sums), default=0) + gathered)


_OF_STAGES = (
    "forward", "backward_input", "backward_weight", "recompute", "activation", "activation_after_input",
    "activation_recomputed", "recompute_workspace", "recompute_workspace_input", "gathered",
)  # fmt: skip
"""Entries of StageCosts that are copied from StageSums."""
