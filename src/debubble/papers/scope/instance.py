"""Phase 1 of SCOPE's planner: the model as layer types, and the numbers of the integer program.

A type t is a run of equal layers; a layer is one unit, or a repeated pattern of units (attention and MLP, say) that
partitioning then moves together.

In the program times are rounded to about a millionth of the slowest layer, bytes are rounded up to about a millionth of
the limit, so that no answer breaks it.  Both units are powers of two, so that small integers stay exact.
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
"""Units of time in the slowest layer, and of memory in the limit."""

LONGEST_PATTERN = 4
"""Units that one layer may consist of."""


@dataclass(frozen=True)
class Option:
    """One recomputation strategy r of a layer type: GetCompCost(t, r) and GetMemCost(t, r).

    Attributes:
        strategies: The strategy of each of the layer's units.
        time: Forward and backward with recomputation, per micro-batch.
        activation: M_A: bytes kept per micro-batch.
        restored: Bytes that its recomputation brings back at a time.
    """

    strategies: tuple[str, ...]
    time: float
    activation: float
    restored: float


@dataclass(frozen=True)
class LayerRun:
    """Equal layers in a row.

    Attributes:
        first: Unit at which the first layer begins.
        size: Units per layer.
        count: Layers.
        static: M_S: bytes of a layer's model states.
        workspace: Bytes that a layer needs while it runs.
        options: The ways to recompute a layer.
    """

    first: int
    size: int
    count: int
    static: float
    workspace: float
    options: tuple[Option, ...]


def layer_runs(units: Units) -> list[LayerRun]:
    """Cut the model into runs of equal layers; each keeps its Pareto-optimal combinations of strategies."""
    runs: list[LayerRun] = []
    first = 0
    while first < len(units.units):
        size, count = _longest_repetition(units.units, first)
        runs.append(_run(units, first, size, count))
        first += size * count
    return runs


def _longest_repetition(units: Sequence[Unit], first: int) -> tuple[int, int]:
    """(units per layer, layers) of the run that covers most from here; the shorter pattern if two cover the same."""
    best = (1, 1)
    for size in range(1, LONGEST_PATTERN + 1):
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


def _run(units: Units, first: int, size: int, count: int) -> LayerRun:
    layer = units.units[first : first + size]
    work = float(sum(unit.work for unit in layer))
    return LayerRun(
        first=first,
        size=size,
        count=count,
        static=float(sum(u.static + u.gathered for u in layer)),
        workspace=float(max(u.workspace for u in layer)),
        options=tuple(Option(c.strategies, work + c.recompute, c.retained, c.workspace) for c in menu_of(layer)),
    )


def partition_of_layers(runs: Sequence[LayerRun], layers: Sequence[Sequence[Sequence[int]]]) -> Partition:
    """Phase 4: the partition in which stage s holds `layers[run][option][s]` layers of each run and option."""
    stages = len(layers[0][0])
    partition: list[list[tuple[int, str]]] = []
    used = [0] * len(runs)
    for stage in range(stages):
        units: list[tuple[int, str]] = []
        for r, run in enumerate(runs):
            here = [option for o, option in enumerate(run.options) for _ in range(layers[r][o][stage])]
            for option in here:
                begin = run.first + used[r] * run.size
                units += list(enumerate(option.strategies, start=begin))
                used[r] += 1
        partition.append(units)
    return Partition(partition)


@dataclass(frozen=True)
class DeviceInstance:
    """One device's numbers.

    Attributes:
        stages: Its stages, one per chunk.
        capacity: Bytes for its layers' states, for what is alive of them and for what one recomputation brings back.
        static: Bytes of a layer of each run.
        kept: `kept[row][run][option][chunk]`: bytes of a layer's activations, at each combination alive; empty without
            a limit.
        restored: `restored[run][option]`: what recomputing such a layer brings back.
    """

    stages: tuple[int, ...]
    capacity: int
    static: tuple[int, ...]
    kept: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    restored: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Instance:
    """The integer program's numbers.

    Attributes:
        counts: Layers per run.
        times: `times[run][option]`: time of a layer per micro-batch, in time units.
        devices: What holds for each device.
        micro_batches: Micro-batches per step.
        time_unit: Seconds (or the costs' own unit of time) per time unit.
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
        """Weight of the slowest device: the objective is weight x (max T) + sum T, C times the step time."""
        return self.micro_batches * self.chunks - 1

    @cached_property
    def longest(self) -> int:
        """Time that no device can exceed."""
        return sum(count * max(times) for count, times in zip(self.counts, self.times, strict=True))

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """The stages that may hold the layers of each run if every stage holds at least one."""
        total, before, windows = sum(self.counts), 0, []
        for count in self.counts:
            windows.append(range(max(0, self.stages - total + before), min(self.stages, before + count)))
            before += count
        return tuple(windows)


def instance(runs: Sequence[LayerRun], schedule: Schedule, *, limits: Sequence[float], static: float) -> Instance:
    """The numbers for a model's runs on a schedule; `static`: bytes on every device next to its layers' own."""
    time_unit = _unit(max(option.time for run in runs for option in run.options))
    everywhere = max((run.workspace for run in runs if run.count > 1), default=0.0)
    devices = tuple(
        _device(runs, stages, combinations, limit=limit, static=static + everywhere, everywhere=everywhere)
        for stages, combinations, limit in zip(schedule.placement.stages_of, alive(schedule), limits, strict=True)
    )
    return Instance(
        counts=tuple(run.count for run in runs),
        times=tuple(tuple(round(option.time / time_unit) for option in run.options) for run in runs),
        devices=devices,
        micro_batches=schedule.micro_batches,
        time_unit=time_unit,
    )


def _device(
    runs: Sequence[LayerRun],
    stages: Sequence[int],
    combinations: Sequence[tuple[int, ...]],
    *,
    limit: float,
    static: float,
    everywhere: float,
) -> DeviceInstance:
    limited = limit < float("inf")
    unit = _unit(limit) if limited else 1.0
    return DeviceInstance(
        stages=tuple(stages),
        capacity=math.floor(limit / unit) - math.ceil(static / unit) if limited else 0,
        static=tuple(
            math.ceil((run.static + max(0.0, run.workspace - everywhere) * (run.count == 1)) / unit) for run in runs
        ),
        kept=tuple(
            tuple(
                tuple(tuple(math.ceil(n * option.activation / unit) for n in numbers) for option in run.options)
                for run in runs
            )
            for numbers in (combinations if limited else ())
        ),
        restored=tuple(tuple(math.ceil(option.restored / unit) for option in run.options) for run in runs),
    )


def alive(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """The combinations of live micro-batches per chunk that the order of each device reaches, as far as they matter.

    What is alive is linear in the combination, so those that a mixture of two others covers need no row.
    """
    return [_extreme(sorted(set(schedule.in_flight(device)))) for device in range(schedule.devices)]


def _extreme(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows, in order, that neither another row nor a mixture of their neighbours covers."""
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if any(other != row and all(a <= b for a, b in zip(row, other, strict=True)) for other in rows):
            continue
        kept.append(row)
        while len(kept) > 2 and _covered(kept[-2], kept[-3], kept[-1]):
            del kept[-2]
    return kept


def _covered(row: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Tell whether some share x of `left` and 1 - x of `right` is at least `row` everywhere."""
    low, high = 0.0, 1.0
    for middle, a, b in zip(row, left, right, strict=True):
        if a > b:
            low = max(low, (middle - b) / (a - b))
        elif a < b:
            high = min(high, (b - middle) / (b - a))
        elif middle > a:
            return False
    return low <= high


def _unit(largest: float) -> float:
    """The power of two of which `largest` has about RESOLUTION."""
    return 2.0 ** math.ceil(math.log2(largest)) / RESOLUTION
