"""Phase 1 of SCOPE's planner: the model as layer types, and the coefficients of the integer program.

A type t is a run of equal layers.  A layer is one unit, or a repeated pattern of units, such as attention and MLP,
which always move together.

The program rounds times to about a millionth of the slowest layer, and bytes up to about a millionth of the limit, so
that no solution exceeds it.  Both units are powers of two, so that small integers stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.costs.partition import Partition
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import Schedule
from debubble.planners.partitioning.pareto import menu_of

RESOLUTION = 2**20
"""Approximate number of time units in the slowest layer, and of memory units in the limit."""

MAX_PATTERN_UNITS = 4
"""Maximum number of units per layer."""


@dataclass(frozen=True)
class Option:
    """One recomputation strategy r of a layer type: GetCompCost(t, r) and GetMemCost(t, r).

    Attributes:
        strategies: The strategy of each unit of the layer.
        time: FP + BP + Recom: forward, backward and recomputation per micro-batch.
        activation: M_A: activation bytes per micro-batch.
        restored: Peak bytes that recomputing the layer restores.
    """

    strategies: tuple[str, ...]
    time: float
    activation: float
    restored: float


@dataclass(frozen=True)
class LayerType:
    """A layer type t: a run of equal layers.

    Attributes:
        first: Index of the first layer's first unit.
        size: Units per layer.
        count: Number of layers.
        static: M_S: bytes of a layer's model states.
        workspace: Workspace bytes of a layer's forward and backward.
        options: The recomputation strategies r of a layer.
    """

    first: int
    size: int
    count: int
    static: float
    workspace: float
    options: tuple[Option, ...]


def layer_types(units: Units) -> list[LayerType]:
    """Split the model into layer types with their Pareto-optimal combinations of strategies."""
    types: list[LayerType] = []
    first = 0
    while first < len(units.units):
        size, count = _longest_repetition(units.units, first)
        types.append(_layer_type(units, first, size, count))
        first += size * count
    return types


def _longest_repetition(units: Sequence[Unit], first: int) -> tuple[int, int]:
    """(units per layer, layers) of the longest run that starts at `first`; ties go to the shorter pattern."""
    best = (1, 1)
    for size in range(1, MAX_PATTERN_UNITS + 1):
        pattern = [_signature(u) for u in units[first : first + size]]
        count = 1
        while [_signature(u) for u in units[first + count * size : first + (count + 1) * size]] == pattern:
            count += 1
        if count > 1 and size * count > best[0] * best[1]:
            best = (size, count)
    return best


def _signature(unit: Unit) -> tuple[object, ...]:
    times = (unit.forward, unit.backward_input, unit.backward_weight)
    return (unit.type, *times, unit.static, unit.workspace, tuple(sorted(unit.strategies.items(), key=str)))


def _layer_type(units: Units, first: int, size: int, count: int) -> LayerType:
    layer = units.units[first : first + size]
    work = float(sum(unit.work for unit in layer))
    return LayerType(
        first=first,
        size=size,
        count=count,
        static=float(sum(u.static + u.gathered for u in layer)),
        workspace=float(max(u.workspace for u in layer)),
        options=tuple(Option(c.strategies, work + c.recompute, c.retained, c.workspace) for c in menu_of(layer)),
    )


def partition_of_layers(types: Sequence[LayerType], layers: Sequence[Sequence[Sequence[int]]]) -> Partition:
    """Phase 4: build S*, the partition in which stage s has `layers[t][r][s]` layers of each type and strategy."""
    stages = len(layers[0][0])
    partition: list[list[tuple[int, str]]] = []
    used = [0] * len(types)
    for stage in range(stages):
        units: list[tuple[int, str]] = []
        for t, layer_type in enumerate(types):
            here = [option for r, option in enumerate(layer_type.options) for _ in range(layers[t][r][stage])]
            for option in here:
                begin = layer_type.first + used[t] * layer_type.size
                units += list(enumerate(option.strategies, start=begin))
                used[t] += 1
        partition.append(units)
    return Partition(partition)


@dataclass(frozen=True)
class DeviceInstance:
    """Coefficients of one device x.

    Attributes:
        stages: Its stages, one per chunk.
        capacity: Memory for model states, activations in flight and one layer's restored activations.
        static: M_S of a layer, per type.
        alive_bytes: `alive_bytes[row][t][r][c]`: activations of a layer at each combination in flight;
            empty without a limit.
        restored: `restored[t][r]`: memory that recomputing such a layer restores.
    """

    stages: tuple[int, ...]
    capacity: int
    static: tuple[int, ...]
    alive_bytes: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    restored: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Instance:
    """Coefficients of the integer program.

    Attributes:
        counts: Layers per type.
        times: `times[t][r]`: time of a layer per micro-batch, in time units.
        devices: Coefficients per device.
        micro_batches: Micro-batches per step, mu.
        time_unit: Seconds (or the costs' unit of time) per time unit.
    """

    counts: tuple[int, ...]
    times: tuple[tuple[int, ...], ...]
    devices: tuple[DeviceInstance, ...]
    micro_batches: int
    time_unit: float

    @property
    def chunks(self) -> int:
        """Stages per device."""
        return len(self.devices[0].stages)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.devices) * self.chunks

    @property
    def weight(self) -> int:
        """Weight of max T in the objective, weight x max T + sum T, which is C times the step time."""
        return self.micro_batches * self.chunks - 1

    @cached_property
    def longest(self) -> int:
        """Upper bound of a device's time."""
        return sum(count * max(times) for count, times in zip(self.counts, self.times, strict=True))

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """Per type, the stages that may hold its layers if every stage holds at least one layer."""
        total, before, windows = sum(self.counts), 0, []
        for count in self.counts:
            windows.append(range(max(0, self.stages - total + before), min(self.stages, before + count)))
            before += count
        return tuple(windows)


def instance(types: Sequence[LayerType], schedule: Schedule, *, limits: Sequence[float], static: float) -> Instance:
    """The coefficients for a model on a schedule; `static`: bytes on every device besides those of layers."""
    time_unit = _unit(max(option.time for layer in types for option in layer.options))
    workspace = max((layer.workspace for layer in types if layer.count > 1), default=0.0)
    devices = tuple(
        _device(types, stages, rows, limit=limit, static=static + workspace, shared_workspace=workspace)
        for stages, rows, limit in zip(schedule.placement.stages_of, in_flight_rows(schedule), limits, strict=True)
    )
    return Instance(
        counts=tuple(layer.count for layer in types),
        times=tuple(tuple(round(option.time / time_unit) for option in layer.options) for layer in types),
        devices=devices,
        micro_batches=schedule.micro_batches,
        time_unit=time_unit,
    )


def _device(
    types: Sequence[LayerType],
    stages: Sequence[int],
    combinations: Sequence[tuple[int, ...]],
    *,
    limit: float,
    static: float,
    shared_workspace: float,
) -> DeviceInstance:
    limited = limit < float("inf")
    unit = _unit(limit) if limited else 1.0
    return DeviceInstance(
        stages=tuple(stages),
        capacity=math.floor(limit / unit) - math.ceil(static / unit) if limited else 0,
        static=tuple(
            math.ceil((t.static + max(0.0, t.workspace - shared_workspace) * (t.count == 1)) / unit) for t in types
        ),
        alive_bytes=tuple(
            tuple(
                tuple(tuple(math.ceil(n * option.activation / unit) for n in numbers) for option in layer.options)
                for layer in types
            )
            for numbers in (combinations if limited else ())
        ),
        restored=tuple(tuple(math.ceil(option.restored / unit) for option in t.options) for t in types),
    )


def in_flight_rows(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Per device, the combinations of micro-batches in flight per chunk that the schedule reaches and C_2 needs.

    Alive bytes are linear in the combination, so a combination dominated by a mixture of two others needs no row.
    """
    return [_extreme(sorted(set(schedule.in_flight(device)))) for device in range(schedule.devices)]


def _extreme(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows, in order, that are not dominated by another row or by a mixture of their neighbors."""
    extreme: list[tuple[int, ...]] = []
    for row in rows:
        if any(other != row and all(a <= b for a, b in zip(row, other, strict=True)) for other in rows):
            continue
        extreme.append(row)
        while len(extreme) > 2 and _covered(extreme[-2], extreme[-3], extreme[-1]):
            del extreme[-2]
    return extreme


def _covered(row: Sequence[int], before: Sequence[int], after: Sequence[int]) -> bool:
    """Tell whether some convex combination of `before` and `after` is at least `row` everywhere."""
    low, high = 0.0, 1.0
    for middle, a, b in zip(row, before, after, strict=True):
        if a > b:
            low = max(low, (middle - b) / (a - b))
        elif a < b:
            high = min(high, (b - middle) / (b - a))
        elif middle > a:
            return False
    return low <= high


def _unit(largest: float) -> float:
    """The power of two such that `largest` is about RESOLUTION units."""
    return 2.0 ** math.ceil(math.log2(largest)) / RESOLUTION
