"""Building blocks: one micro-batch's operations, placed so that the pattern can repeat at a fixed interval.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.  A block fixes the lifespan
of every activation, and lifespan over interval is memory.  The paper's blocks have uniform offsets between neighboring
devices for F = B = W; here blocks are built for arbitrary times: each operation gets the first start, modulo the
interval, that leaves gaps for its device's remaining operations.

A `BlockShape` determines how much a block stretches: later turns and slower hops let more forwards run ahead.  A
`Pattern` is the order of a block's operations on each device.  A `BlockCandidate` is a shape with the rule to follow
its pattern, encoded as a tuple of genes that can be varied.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from debubble.ir import Kind, Placement, StageCosts
from debubble.search.constructive.list_scheduling import NO_OVERTAKING, OrderFollowing

_EPSILON = 1e-9
"""Rounding tolerance of times and of fractions of the interval."""

Pattern = tuple[tuple[tuple[int, int], ...], ...]
"""Per device, (track, rounds of lag) in the order of one round; tracks as in `dispatch`."""


@dataclass(frozen=True)
class BlockShape:
    """Stretch of a block.  A leg is one pass of the micro-batch through all devices: v forwards, v backwards."""

    slack: float
    """Interval relative to the busiest device's work for one micro-batch, minus one."""
    turns: tuple[float, ...]
    """Wait before the first operation of each leg, in mean forward times."""
    hops: tuple[float, ...]
    """Wait before each further operation of each leg."""
    weight_first: bool = False
    """Place each W with its I, before the backward continues."""


def build_pattern(placement: Placement, costs: StageCosts, shape: BlockShape) -> Pattern | None:
    """Build a block and return the order in which it repeats; None if the block does not pack."""
    work = max(float(sum(map(costs.work, stages))) for stages in placement.stages_of)
    interval = work * (1 + shape.slack)
    starts = _BlockBuilder(placement, costs, interval, shape).starts()
    if starts is None:
        return None
    return tuple(_round_order(starts, stages, placement.stages, interval) for stages in placement.stages_of)


def _round_order(
    starts: dict[tuple[Kind, int], float], stages: tuple[int, ...], count: int, interval: float
) -> tuple[tuple[int, int], ...]:
    phases = []
    for s in stages:
        for kind in (Kind.I, Kind.F):
            lag = math.floor(starts[kind, s] / interval + _EPSILON)
            phases.append((starts[kind, s] - lag * interval, kind is Kind.F, s + (kind is Kind.I) * count, lag))
    return tuple((track, lag) for *_, track, lag in sorted(phases))


def repeat_pattern(pattern: Pattern, micro_batches: int) -> list[list[int]]:
    """Repeat a pattern for all micro-batches: per device, the numbers that `ListScheduler.follow` takes."""
    return [
        [
            track * micro_batches + n - lag
            for n in range(micro_batches + max(lag for _, lag in device_pattern))
            for track, lag in device_pattern
            if 0 <= n - lag < micro_batches
        ]
        for device_pattern in pattern
    ]


class _BlockBuilder:
    def __init__(self, placement: Placement, costs: StageCosts, interval: float, shape: BlockShape) -> None:
        self.placement, self.costs, self.shape = placement, costs, shape
        self.times = {Kind.F: costs.forward, Kind.I: costs.backward_input, Kind.W: costs.backward_weight}
        self.unit = float(sum(costs.forward)) / placement.stages
        self.tables = [
            _ModuloTimeline(interval, [float(times[s]) for s in device_stages for times in self.times.values()])
            for device_stages in placement.stages_of
        ]

    def starts(self) -> dict[tuple[Kind, int], float] | None:
        """Place the operations of micro-batch 0 and return their starts; None if they do not pack."""
        stages = range(self.placement.stages)
        operations = [(Kind.F, s) for s in stages] + [(Kind.I, s) for s in reversed(stages)]
        starts: dict[tuple[Kind, int], float] = {}
        now, previous_stage = 0.0, 0
        for n, (kind, s) in enumerate(operations):
            leg, first = divmod(n, self.placement.devices)
            wait = (self.shape.hops[leg] if first else self.shape.turns[leg]) * self.unit
            now += wait + self._message(previous_stage, s)
            placed = self._place(kind, s, now)
            if placed is None:
                return None
            starts[kind, s] = placed
            now, previous_stage = placed + float(self.times[kind][s]), s
            if kind is Kind.I and self.shape.weight_first and self._place(Kind.W, s, now) is None:
                return None
        return starts

    def _place(self, kind: Kind, stage: int, earliest: float) -> float | None:
        return self.tables[self.placement.device_of[stage]].place(earliest, float(self.times[kind][stage]))

    def _message(self, a: int, b: int) -> float:
        device_of = self.placement.device_of
        return 0.0 if device_of[a] == device_of[b] else float(self.costs.communication[min(a, b)])


class _ModuloTimeline:
    """One device's time, modulo the interval: its placed operations, and the lengths of the remaining ones."""

    def __init__(self, interval: float, lengths: list[float]) -> None:
        self.interval = interval
        self.placed: list[tuple[float, float]] = []
        self.remaining_lengths = sorted(lengths, reverse=True)

    def place(self, earliest: float, length: float) -> float | None:
        """The first start, at once or next to a placed operation, that leaves gaps for all remaining operations."""
        remaining = self.remaining_lengths.copy()
        remaining.remove(length)
        for start in sorted(self._candidates(earliest, length)):
            phase = start % self.interval
            placed = sorted([*self.placed, (0.0 if self.interval - phase < _EPSILON else phase, length)])
            gaps = self._gaps(placed)
            if min(gaps) >= -_EPSILON and _packs(tuple(sorted(gaps)), tuple(remaining)):
                self.placed, self.remaining_lengths = placed, remaining
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
    """Tell whether operations of these lengths (longest first) fit into the gaps."""
    if not lengths:
        return True
    longest, rest = lengths[0], lengths[1:]
    return any(
        gap >= longest - _EPSILON and _packs(tuple(sorted((*gaps[:i], round(gap - longest, 9), *gaps[i + 1 :]))), rest)
        for i, gap in enumerate(gaps)
        if i == 0 or gap != gaps[i - 1]
    )


Genes = tuple[float, ...]

SLACKS = (0.2, 0.4, 0.1, 0.3, 0.0, 0.01, 0.02, 0.05, 0.15, 0.25, 0.6, 0.8)
TURNS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
HOPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
OVERLAPS = (0, 0.25, 0.5, 0.75, 1)
FILLINGS = (NO_OVERTAKING, 0, 0.25, 0.5, 1)


@dataclass(frozen=True)
class BlockCandidate:
    """A block, and the rule to follow its pattern."""

    shape: BlockShape
    equal_times: bool
    """Build the block for equal times, as in the paper: its order may be the best for other times too."""
    rule: OrderFollowing

    @staticmethod
    def from_genes(genes: Genes) -> BlockCandidate:
        """Decode genes: slack, the legs' turns and hops, weight first, even, overlap, filling, late."""
        slack, *stretch, weight_first, equal_times, overlap, filling, late = genes
        legs = len(stretch) // 2
        shape = BlockShape(slack, tuple(stretch[:legs]), tuple(stretch[legs:]), weight_first == 1)
        return BlockCandidate(shape, equal_times == 1, OrderFollowing(overlap, filling, late == 1))


@dataclass(frozen=True)
class GeneSampler:
    """Draws genes for blocks of `legs` legs."""

    legs: int
    rng: random.Random

    def draw(self) -> Genes:
        """Draw every gene: its first choice or a random one, with equal probability."""
        return tuple(self.rng.choice(choice) if self.rng.random() < 0.5 else choice[0] for choice in self._choices)

    def draw_near(self, genes: Genes) -> Genes:
        """Change one to three genes."""
        changed = list(genes)
        for k in self.rng.sample(range(len(genes)), self.rng.choice((1, 1, 2, 3))):
            changed[k] = self.rng.choice(self._choices[k])
        return tuple(changed)

    @property
    def _choices(self) -> list[tuple[float, ...]]:
        return [SLACKS, *[TURNS] * self.legs, *[HOPS] * self.legs, (0, 1), (0, 1), OVERLAPS, FILLINGS, (0, 0, 1)]


# Slack, turns per leg, hops per leg, weight first, even, overlap, filling.
INITIAL_GENES: dict[int, tuple[Genes, ...]] = {
    2: (
        (0.3, 0.5, 1, 3, 0.25, 1, 1, 0.25, 0.25, 0),
        (0.8, 1.5, 1, 0.5, 0.75, 1, 1, 0, 0.25, 0),
        (0.05, 0, 0.5, 1, 3, 1, 0, 0.5, 1, 0),
        (0.05, 0, 0.5, 0.25, 0, 1, 0, 0, 0, 0),
        (0.2, 1.5, 1, 0.5, 0.75, 0, 1, 0.25, 0.5, 0),
        (0.8, 0.5, 0, 0.75, 0.25, 1, 1, 0, 0, 0),
        (0.01, 6, 0, 0, 2, 0, 0, 0.5, 0.5, 0),
        (0.8, 6, 4, 0, 1, 0, 1, 0, 0.25, 0),
        (0.1, 1.5, 0, 0.25, 2, 0, 1, 0.75, 1, 0),
        (0.6, 3, 0, 0, 0, 0, 0, 0.75, 0.25, 0),
        (0.8, 0, 3, 0.75, 0.25, 1, 1, 0, 0, 0),
        (0, 2, 1, 1, 0, 1, 0, 0, 0.5, 0),
    ),
    4: (
        (0.8, 3, 0, 5, 1, 0.25, 0.5, 2, 0.25, 0, 1, 0.75, 0.5, 0),
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1),
        (0, 1, 0, 3, 1, 3, 0.5, 2, 0.75, 1, 1, 0.25, 0, 0),
        (0.8, 2, 0, 1.5, 0.5, 1, 0, 2, 0, 1, 1, 0.25, 0.5, 0),
        (0.2, 5, 0, 3, 3, 0.75, 0.75, 0, 0.75, 0, 1, 0.75, 0.5, 0),
        (0.6, 1, 0, 6, 1, 0.5, 0.75, 0, 0.75, 1, 0, 0.25, 0.5, 0),
        (0.6, 3, 3, 2, 0.5, 0, 1, 0.25, 0.25, 1, 1, 0.75, 1, 0),
        (0.1, 6, 3, 1.5, 0, 0.75, 1.5, 1, 0.5, 1, 1, 0.5, 0, 0),
        (0.6, 3, 0, 1.5, 1.5, 0.5, 1.5, 0, 0, 1, 1, 0.5, 0.5, 0),
        (0.1, 4, 1.5, 0.5, 0.5, 0.25, 1, 0, 1, 1, 1, 0.25, 0.5, 0),
        (0.8, 2, 5, 6, 3, 1, 1.5, 0.75, 2, 0, 0, 0.25, 0.5, 0),
        (0.05, 5, 3, 1, 0.5, 0.25, 2, 0.5, 1, 1, 1, 0.75, 0.25, 0),
        (0.3, 4, 1, 0, 2, 0, 0.25, 0, 0.25, 1, 1, 0.25, 0, 0),
        (0.6, 1.5, 0.5, 5, 0, 0.5, 0.5, 0.5, 3, 1, 1, 0.5, 1, 0),
        (0.3, 3, 4, 4, 0.5, 0.75, 1, 0.5, 0, 0, 1, 0, 0.25, 0),
        (0.15, 5, 1.5, 1.5, 2, 0, 0, 3, 2, 1, 1, 0.25, 1, 0),
        (0.8, 3, 0.5, 1, 0.5, 0, 1.5, 0, 3, 0, 1, 0.25, 0, 0),
        (0.6, 3, 0, 1, 1, 0.25, 0.5, 1, 0.75, 0, 0, 0.25, 1, 0),
        (0, 0, 0, 3, 1, 1, 0, 1, 0, 0, 1, 0, 0.5, 0),
        (0.25, 1.5, 0.5, 1.5, 0, 0.5, 0, 0.75, 1, 0, 1, 1, 1, 0),
    ),
}  # fmt: skip
