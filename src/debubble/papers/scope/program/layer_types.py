"""Phase 1 of SCOPE's planner: the model as a sequence of layer types.

A type t is a run of equal layers; a layer is one unit, or a repeated pattern of units (attention and MLP, say) that
partitioning then moves together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.costs.units import Partition, Unit, Units
from debubble.planners.partitioning.pareto import efficient, menu_of, recomputation

LONGEST_PATTERN = 4
"""Units that one layer may consist of."""


@dataclass(frozen=True)
class Option:
    """One recomputation strategy r of a layer type: GetCompCost(t, r) and GetMemCost(t, r).

    Attributes:
        strategies: The strategy of each of the layer's units.
        time: Forward and backward with recomputation, per micro-batch.
        recompute: The recomputation's part of that time.
        activation: M_A: bytes kept per micro-batch.
        restored: Bytes that its recomputation brings back at a time.
    """

    strategies: tuple[str, ...]
    time: float
    recompute: float
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


def layer_runs(units: Units, strategies: Sequence[str] | None = None) -> list[LayerRun]:
    """Cut the model into runs of equal layers; each keeps the Pareto-optimal ones of `strategies` (None: all)."""
    runs: list[LayerRun] = []
    at = 0
    while at < len(units.units):
        size, count = _longest_repetition(units.units, at)
        runs.append(_run(units, at, size, count, strategies))
        at += size * count
    return runs


def _longest_repetition(units: Sequence[Unit], at: int) -> tuple[int, int]:
    """(units per layer, layers) of the run that covers most from here; the shorter pattern if two cover the same."""
    best = (1, 1)
    for size in range(1, LONGEST_PATTERN + 1):
        pattern = [_signature(u) for u in units[at : at + size]]
        count = 1
        while [_signature(u) for u in units[at + count * size : at + (count + 1) * size]] == pattern:
            count += 1
        if count > 1 and size * count > best[0] * best[1]:
            best = (size, count)
    return best


def _signature(unit: Unit) -> tuple[object, ...]:
    times = (unit.forward, unit.backward_input, unit.backward_weight)
    return (unit.type, *times, unit.static, unit.workspace, tuple(sorted(unit.strategies.items(), key=str)))


def _run(units: Units, first: int, size: int, count: int, strategies: Sequence[str] | None) -> LayerRun:
    layer = units.units[first : first + size]
    return LayerRun(
        first=first,
        size=size,
        count=count,
        static=float(sum(u.static + u.gathered for u in layer)),
        workspace=float(max(u.workspace for u in layer)),
        options=tuple(_options(layer, strategies)),
    )


def _options(layer: Sequence[Unit], strategies: Sequence[str] | None) -> list[Option]:
    """The layer's Pareto front of time and bytes: over its units' own strategies, or over the given ones for all."""
    if strategies is None:
        ways = [*menu_of(layer)]
    else:
        uniform = {tuple(name if name in u.strategies else "none" for u in layer) for name in ("none", *strategies)}
        ways = efficient(recomputation(layer, each) for each in uniform)
    work = float(sum(unit.work for unit in layer))
    return [Option(way.strategies, work + way.recompute, way.recompute, way.kept, way.workspace) for way in ways]


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
