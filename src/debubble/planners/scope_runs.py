"""Phase 1 of SCOPE's planner: the model as a sequence of layer types.

A type t is a run of equal layers; a layer is one unit, or a repeated pattern of units (attention and MLP, say) that
partitioning then moves together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from debubble.costs.units import Unit, Units
from debubble.planners.recomputation import ladder

LONGEST_PATTERN = 4
"""Units that one layer may consist of."""


@dataclass(frozen=True)
class Option:
    """One recomputation strategy r of a layer type: GetCompCost(t, r) and GetMemCost(t, r)."""

    strategy: str
    each: tuple[str, ...]
    """The strategy of each of the layer's units: `none` for those that lack this one."""
    time: float
    """Forward and backward with recomputation, per micro-batch."""
    recompute: float
    activation: float
    """M_A: bytes kept per micro-batch."""
    restored: float
    """Bytes that recomputing one of its units brings back."""


@dataclass(frozen=True)
class Run:
    """`count` layers of one type, the first of which begins at unit `first` and has `size` units."""

    first: int
    size: int
    count: int
    static: float
    """M_S of a layer."""
    workspace: float
    options: tuple[Option, ...]


def runs(units: Units, strategies: Sequence[str] | None = None) -> list[Run]:
    """Cut the model into runs; each keeps the `strategies` (None: all) that are Pareto-optimal for it."""
    found: list[Run] = []
    at = 0
    while at < len(units.units):
        size, count = _longest_repetition(units.units, at)
        found.append(_run(units, at, size, count, strategies))
        at += size * count
    return found


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


def _run(units: Units, first: int, size: int, count: int, strategies: Sequence[str] | None) -> Run:
    layer = units.units[first : first + size]
    names = dict.fromkeys(name for i in range(first, first + size) for name, _, _ in ladder(units, i))
    chosen = ["none", *(name for name in names if strategies is None or name in strategies)]
    options = [_option(layer, name) for name in chosen]
    efficient = [
        o
        for o in options
        if o.strategy == "none"
        or not any(
            (p.time, p.activation) <= (o.time, o.activation) and p.time <= o.time and p.activation <= o.activation
            for p in options
            if p is not o
        )
    ]
    return Run(
        first=first,
        size=size,
        count=count,
        static=float(sum(u.static for u in layer)),
        workspace=float(max(u.workspace for u in layer)),
        options=tuple(efficient),
    )


def _option(layer: Sequence[Unit], strategy: str) -> Option:
    """A layer under a strategy; its units that lack it keep everything."""
    chosen = [u.strategies.get(strategy, u.strategies["none"]) for u in layer]
    recompute = float(sum(s.recompute for s in chosen))
    return Option(
        strategy=strategy,
        each=tuple(strategy if strategy in u.strategies else "none" for u in layer),
        time=float(sum(u.work for u in layer)) + recompute,
        recompute=recompute,
        activation=float(sum(s.activation for s in chosen)),
        restored=float(max(u.activation - s.activation for u, s in zip(layer, chosen, strict=True))),
    )


def assigned(found: Sequence[Run], layers: Sequence[Sequence[Sequence[int]]]) -> list[list[tuple[int, str]]]:
    """Phase 4: the partition in which stage s holds `layers[run][option][s]` layers of each run and option."""
    stages = len(layers[0][0])
    partition: list[list[tuple[int, str]]] = []
    used = [0] * len(found)
    for stage in range(stages):
        units: list[tuple[int, str]] = []
        for r, run in enumerate(found):
            here = [option for o, option in enumerate(run.options) for _ in range(layers[r][o][stage])]
            for option in here:
                begin = run.first + used[r] * run.size
                units += list(enumerate(option.each, start=begin))
                used[r] += 1
        partition.append(units)
    return partition


def starts(found: Sequence[Run]) -> list[int]:
    """Layers before each run, and all of them last."""
    return [0, *accumulate(run.count for run in found)]
