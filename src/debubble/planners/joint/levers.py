"""A point of the joint search: everything that is chosen but the order, and what it costs.

A point says how many units each stage has, how each stage recomputes, what part of its activations it offloads, and how
the list scheduler orders.  Recomputation has levels, one per price of a byte: at a price, each unit takes the strategy
whose time and memory together cost least, so that level 0 recomputes nothing and the last one all that it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from debubble.costs.units import Partition, Unit, Units
from debubble.ir import Placement, Schedule
from debubble.planners.joint.list_scheduler import Ints, StageTable, schedule
from debubble.planners.problem import Problem, Solution


@dataclass(frozen=True)
class Point:
    """The choices for one number of chunks and one placement.

    Attributes:
        counts: Units per stage.
        levels: Per stage, its level of recomputation.
        shares: Per stage, the quarters of its activations that it offloads.
        most: Per stage, the micro-batches that may be in flight.
        policy: The list scheduler's entries.
    """

    counts: tuple[int, ...]
    levels: tuple[int, ...]
    shares: tuple[int, ...]
    most: tuple[int, ...]
    policy: tuple[float, ...]


QUARTERS = 4
"""Shares of a stage's activations are counted in quarters."""


SPARE = 0.95
"""The part of a device's room that states may take in the partitions that a search begins with."""


class Levers:
    """The points of a problem for one placement."""

    def __init__(self, problem: Problem, units: Units, placement: Placement) -> None:
        self.problem, self.placement, self.units = problem, placement, units
        self.levels = len(self._strategies)
        self.device_of = np.array(placement.device_of)
        self.crosses = [*(a != b for a, b in pairwise(placement.device_of)), False]
        self._rows: dict[tuple[int, int, int], tuple[float, ...]] = {}
        group_of = {d: g for g, group in enumerate(self.units.link_groups) for d in group}
        links = [group_of.get(d, len(group_of) + d) for d in range(placement.devices)]
        lanes = {link: n for n, link in enumerate(dict.fromkeys(links))}
        self.down = np.array([lanes[link] for link in links])
        half = self.units.host_link == "half-duplex"
        self.up = self.down if half else self.down + placement.devices
        self.limits = np.array(problem.limits)
        self.longest = 4 * problem.micro_batches * float(self.units.work)
        """Longer than any step that is not stuck."""

    @cached_property
    def _strategies(self) -> list[list[str]]:
        """Per level, the strategy of each unit."""
        prices = sorted({price for unit in self.units.units for price in _prices(unit)})
        # Between two neighbouring prices all choices are the same.
        between = [0.0, *((a * b) ** 0.5 for a, b in pairwise(prices)), *(2 * price for price in prices[-1:])]
        chosen = [[_strategy(unit, price) for unit in self.units.units] for price in between]
        return [row for n, row in enumerate(chosen) if row not in chosen[:n]]

    @cached_property
    def balanced_counts(self) -> tuple[int, ...]:
        """Units per stage such that devices, not stages, have equal work, as far as moves of single units go.

        Boundaries between stages move, alone or several together, while that evens out the devices' work.
        """
        stages, devices = self.placement.stages, self.placement.devices
        work = np.array([float(unit.work) for unit in self.units.units])
        sums = np.concatenate(([0.0], np.cumsum(work)))
        ends = np.searchsorted(sums, sums[-1] * np.arange(1, stages) / stages)
        ends = np.maximum(ends, np.arange(1, stages))
        ends = np.minimum(np.maximum.accumulate(ends), len(work) - np.arange(stages - 1, 0, -1))
        for n in range(1, len(ends)):
            ends[n] = max(ends[n], ends[n - 1] + 1)

        states = np.concatenate(([0.0], np.cumsum([float(unit.static) for unit in self.units.units])))
        room = self.limits - float(self.units.static)

        def unevenness(ends: Ints) -> float:
            cuts = np.concatenate(([0], ends, [len(work)]))
            each = np.diff(sums[cuts])
            loads = np.bincount(self.device_of, weights=each, minlength=devices)
            static = np.bincount(self.device_of, weights=np.diff(states[cuts]), minlength=devices)
            lacking = np.maximum(static - SPARE * room, 0).sum() / room.min()
            return float((loads**2).sum() + 1e-3 * (each**2).sum() + 1e3 * lacking * sums[-1] ** 2)

        best = unevenness(ends)
        improved = True
        while improved:
            improved = False
            for begin in range(len(ends)):
                for end in range(begin, len(ends)):
                    for step in (-1, 1):
                        moved = ends.copy()
                        moved[begin : end + 1] += step
                        bounded = np.concatenate(([0], moved, [len(work)]))
                        if (np.diff(bounded) >= 1).all() and (value := unevenness(moved)) < best * (1 - 1e-12):
                            ends, best, improved = moved, value, True
        return tuple(int(n) for n in np.diff(np.concatenate(([0], ends, [len(work)]))))

    def partition(self, point: Point) -> Partition:
        """The units of each stage with their strategies."""
        ends = accumulate(point.counts, initial=0)
        return Partition(
            self._stage(begin, end, level) for (begin, end), level in zip(pairwise(ends), point.levels, strict=True)
        )

    def _stage(self, begin: int, end: int, level: int) -> tuple[tuple[int, str], ...]:
        """The units from one index to another, with their strategies at a level."""
        names = self._strategies[level]
        return tuple((index, names[index]) for index in range(begin, end))

    def table(self, point: Point) -> tuple[StageTable, float]:
        """The point as the list scheduler sees it, and the bytes that its states lack on the fullest device."""
        rows, begin = [], 0
        static = np.full(self.placement.devices, float(self.units.static))
        workspace = np.zeros(self.placement.devices)
        bandwidth = self.units.offload_bandwidth
        for s, (count, level, share) in enumerate(zip(point.counts, point.levels, point.shares, strict=True)):
            forward, backward, weight, kept, again, after, states, space = self._row(begin, begin + count, level)
            begin += count
            d = self.placement.device_of[s]
            static[d] += states
            workspace[d] = max(workspace[d], space)
            moved = 0.0 if bandwidth is None else kept * share / QUARTERS
            time = 0.0 if not moved or bandwidth is None else moved / float(bandwidth)
            send = float(self.units.communication) if self.crosses[s] else 0.0
            before = kept + again
            grows = max(after - before, 0.0)
            rows.append(
                (forward, backward, weight, send, kept, again + grows, max(before - after, 0.0), after, moved, time)
            )
        room = self.limits - static - workspace
        return StageTable(np.array(rows), self.device_of, room, self.down, self.up), float(max(0.0, -room.min()))

    def _row(self, begin: int, end: int, level: int) -> tuple[float, ...]:
        """Times and bytes of a stage: F, I, W, kept, restored before I, left after I, states, workspace."""
        key = begin, end, level
        if key not in self._rows:
            stage = self._stage(begin, end, level)
            sums = self.units.stage_sums(stage)
            recomputes = any(name != "none" for _, name in stage)
            again = min(float(sums.workspace_before_i), float(sums.activation - sums.kept)) if recomputes else 0.0
            self._rows[key] = (
                float(sums.forward), float(sums.backward_input + (sums.recompute if recomputes else 0)),
                float(sums.backward_weight), float(sums.kept if recomputes else sums.activation), again,
                float(sums.after_input), float(sums.static), float(sums.workspace),
            )  # fmt: skip
        return self._rows[key]

    def solution(self, point: Point) -> Solution:
        """The schedule of a point with its costs, as the list scheduler orders it."""
        table, _ = self.table(point)
        made = schedule(table, self.problem.micro_batches, np.array(point.policy), np.array(point.most))
        partition = self.partition(point)
        ordered = Schedule(
            name="joint",
            placement=self.placement,
            micro_batches=self.problem.micro_batches,
            orders=made.orders(self.device_of),
            fused_recompute=partition.recomputing,
            offload_fraction={s: share / QUARTERS for s, share in enumerate(point.shares) if 0 < share < QUARTERS},
        )
        return Solution(
            schedule=ordered, costs=self.units.stage_costs(partition, self.placement), partition=partition
        )  # fmt: skip


def _prices(unit: Unit) -> list[float]:
    """The prices of a byte at which the unit's best strategy changes: the slopes of its lower convex hull."""
    points = sorted({(float(s.activation), float(s.recompute)) for s in unit.strategies.values()}, reverse=True)
    hull: list[tuple[float, float]] = []
    for point in points:
        while hull and point[1] <= hull[-1][1]:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-1], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return [_slope(a, b) for a, b in pairwise(hull)]


def _slope(more: tuple[float, float], less: tuple[float, float]) -> float:
    return (less[1] - more[1]) / max(more[0] - less[0], 1e-30)


def _strategy(unit: Unit, price: float) -> str:
    return min(
        unit.strategies,
        key=lambda name: (
            float(unit.strategies[name].recompute) + price * float(unit.strategies[name].activation),
            name != "none",
        ),
    )
