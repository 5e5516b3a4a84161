"""Building blocks: one micro-batch's operations, placed so that the pattern can repeat at a fixed interval.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.  A block fixes the lifespan
of every activation, and lifespan over interval is memory.  The paper's blocks have uniform offsets between neighbouring
devices for F = B = W; here a block is built for the given times: each operation goes to the first place, modulo the
interval, that leaves gaps for what its device has still to place.

A `Shape` says how much a block stretches: later turns and slower hops let more forwards run ahead.  A `Pattern` is
what remains of a block for dispatching: the order on each device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from debubble.ir import Kind, Placement, StageCosts
from debubble.search.constructive.order_following import Passage

_EPSILON = 1e-9

Pattern = tuple[tuple[tuple[int, int], ...], ...]
"""Per device, (track, rounds that it lags behind) in the order of one round."""


@dataclass(frozen=True)
class Shape:
    """Stretch of a block.  A leg is one way of the micro-batch through all devices: v legs forwards, v backwards."""

    slack: float
    """Interval over the busiest device's work for one micro-batch, minus one."""
    turns: tuple[float, ...]
    """Per leg, wait before its first operation, in mean forward times."""
    hops: tuple[float, ...]
    """Per leg, wait before each further operation."""
    weight_first: bool = False
    """Place each W with its I, before the backward goes on."""


def pattern_of(placement: Placement, costs: StageCosts, shape: Shape) -> Pattern | None:
    """The order in which the repeated block runs on each device.  None if it does not pack."""
    interval = max(float(sum(costs.work(s) for s in held)) for held in placement.stages_of) * (1 + shape.slack)
    starts = _Block(placement, costs, interval, shape).starts()
    return None if starts is None else tuple(_round(starts, held, interval) for held in placement.stages_of)


def _round(
    starts: dict[tuple[Kind, int], float], stages: tuple[int, ...], interval: float
) -> tuple[tuple[int, int], ...]:
    phases = []
    for s in stages:
        for kind in (Kind.I, Kind.F):
            lag = math.floor(starts[kind, s] / interval + _EPSILON)
            phases.append((starts[kind, s] - lag * interval, kind is Kind.F, 2 * s + (kind is Kind.I), lag))
    return tuple((track, lag) for *_, track, lag in sorted(phases))


def repeated(pattern: Pattern, micro_batches: int) -> list[list[Passage]]:
    """Per device, the forwards and backwards of all micro-batches."""
    return [
        [
            (track, n - lag)
            for n in range(micro_batches + max(lag for _, lag in once))
            for track, lag in once
            if 0 <= n - lag < micro_batches
        ]
        for once in pattern
    ]


class _Block:
    def __init__(self, placement: Placement, costs: StageCosts, interval: float, shape: Shape) -> None:
        self.placement, self.costs, self.shape = placement, costs, shape
        self.times = {Kind.F: costs.forward, Kind.I: costs.backward_input, Kind.W: costs.backward_weight}
        self.unit = float(sum(costs.forward)) / placement.stages
        self.tables = [
            _Table(interval, [float(times[s]) for s in held for times in self.times.values()])
            for held in placement.stages_of
        ]

    def starts(self) -> dict[tuple[Kind, int], float] | None:
        """When each operation of micro-batch 0 starts."""
        stages = range(self.placement.stages)
        ways = [(Kind.F, s) for s in stages] + [(Kind.I, s) for s in reversed(stages)]
        starts: dict[tuple[Kind, int], float] = {}
        now, before = 0.0, 0
        for n, (kind, s) in enumerate(ways):
            leg, first = divmod(n, self.placement.devices)
            now += (self.shape.hops[leg] if first else self.shape.turns[leg]) * self.unit + self._message(before, s)
            placed = self._place(kind, s, now)
            if placed is None:
                return None
            starts[kind, s] = placed
            now, before = placed + float(self.times[kind][s]), s
            if kind is Kind.I and self.shape.weight_first and self._place(Kind.W, s, now) is None:
                return None
        return starts

    def _place(self, kind: Kind, stage: int, earliest: float) -> float | None:
        return self.tables[self.placement.device_of[stage]].place(earliest, float(self.times[kind][stage]))

    def _message(self, a: int, b: int) -> float:
        device_of = self.placement.device_of
        return 0.0 if device_of[a] == device_of[b] else float(self.costs.communication[min(a, b)])


class _Table:
    """One device's time, modulo the interval: what is placed, and the lengths that are still to come."""

    def __init__(self, interval: float, lengths: list[float]) -> None:
        self.interval = interval
        self.placed: list[tuple[float, float]] = []
        self.left = sorted(lengths, reverse=True)

    def place(self, earliest: float, length: float) -> float | None:
        """The first start, at once or next to something placed, that leaves gaps for all that is to come."""
        rest = self.left.copy()
        rest.remove(length)
        for start in sorted(self._candidates(earliest, length)):
            phase = start % self.interval
            placed = sorted([*self.placed, (0.0 if self.interval - phase < _EPSILON else phase, length)])
            gaps = self._gaps(placed)
            if min(gaps) >= -_EPSILON and _packs(tuple(sorted(gaps)), tuple(rest)):
                self.placed, self.left = placed, rest
                return start
        return None

    def _candidates(self, earliest: float, length: float) -> Iterator[float]:
        yield earliest
        for start, other in self.placed:
            for aligned in (start + other, start - length):
                yield earliest + (aligned - earliest) % self.interval

    def _gaps(self, placed: list[tuple[float, float]]) -> list[float]:
        following = [start for start, _ in placed[1:]] + [placed[0][0] + self.interval]
        return [round(then - start - length, 9) for (start, length), then in zip(placed, following, strict=True)]


@lru_cache(maxsize=100_000)
def _packs(gaps: tuple[float, ...], lengths: tuple[float, ...]) -> bool:
    """Whether pieces of these lengths (longest first) fit into the gaps."""
    if not lengths:
        return True
    longest, rest = lengths[0], lengths[1:]
    return any(
        gap >= longest - _EPSILON and _packs(tuple(sorted((*gaps[:i], round(gap - longest, 9), *gaps[i + 1 :]))), rest)
        for i, gap in enumerate(gaps)
        if i == 0 or gap != gaps[i - 1]
    )
