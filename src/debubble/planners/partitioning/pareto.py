"""The Pareto front of a stage's recomputation: retained bytes against recompute time.

Obscura chooses operators by a 0-1 program: the least time r = sum x_i f_i such that a' = a - sum x_i a_i fits.  Only
the right-hand side changes with the swapping configuration; so the program is solved once per stage for all right-hand
sides, as its Pareto front of (a', r), in which configurations look up their solution.

The bytes that a unit retains may depend on full recomputation of the unit before it, as two halves of a layer then
share one input.  So the front is made of blocks: runs of units that share no input with other units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir.arrays import Floats, Ints

MAX_POINTS = 4096
"""A front with more points is thinned to the fastest point in each of this many equal intervals of memory."""


@dataclass(frozen=True)
class StageRecomputation:
    """The recomputation of a stage, or of a run of its units.

    Attributes:
        retained: Bytes of activations that remain after the forward: a'.
        recompute: Recompute time per micro-batch: r.
        workspace: Bytes that a fused recomputation restores at a time.
        strategies: The strategy of every unit; a fixed stage is one unit.
    """

    retained: float
    recompute: float
    workspace: float
    strategies: tuple[str, ...]


Menu = tuple[StageRecomputation, ...]
"""A block's Pareto-optimal choices; blocks with equal menus are interchangeable."""


@dataclass(frozen=True, eq=False)
class Front:
    """A stage's Pareto-optimal choices, by increasing recompute time and decreasing retained bytes.

    Attributes:
        menus: The menu of every block of the stage.
        retained: [points]: bytes that remain after the forward.
        recompute: [points]: recompute time.
        workspace: [points]: bytes that a fused recomputation restores at a time.
        counts: [points, columns]: number of blocks with the choice of that column.
        columns: The menu and the choice of every column.
    """

    menus: tuple[Menu, ...]
    retained: Floats
    recompute: Floats
    workspace: Floats
    counts: Ints
    columns: tuple[tuple[Menu, StageRecomputation], ...]
    _cache: dict[int, StageRecomputation] = field(default_factory=dict)

    @staticmethod
    def from_counts(menus: tuple[Menu, ...], points: Ints, columns: Sequence[tuple[Menu, StageRecomputation]]) -> Front:
        """The front of these points, each given by its `counts`."""
        return Front(menus, *_totals(points, columns), points, tuple(columns))

    def cheapest(
        self,
        *,
        in_flight: float,
        budget: float,
        transfer: float = 0.0,
        period: float = float("inf"),
        min_recompute: float = 0.0,
    ) -> StageRecomputation | None:
        """The least recomputation with which the activations fit; None if none does.

        Args:
            in_flight: Number of micro-batches whose activations are in memory at a time.
            budget: Bytes for activations and workspace.
            transfer: With swapping, seconds per retained byte; swapping must end within `period` plus recompute time.
            period: Time of a micro-batch without recomputation.
            min_recompute: Lower limit on the recompute time.
        """
        fits = in_flight * self.retained + self.workspace <= budget
        fits &= (transfer * self.retained <= period + self.recompute) & (self.recompute >= min_recompute)
        first = int(fits.argmax())
        return self[first] if fits[first] else None

    def __getitem__(self, point: int) -> StageRecomputation:
        if point not in self._cache:
            self._cache[point] = StageRecomputation(
                float(self.retained[point]),
                float(self.recompute[point]),
                float(self.workspace[point]),
                self._strategies(point),
            )
        return self._cache[point]

    def _strategies(self, point: int) -> tuple[str, ...]:
        """The strategies of a point; interchangeable blocks get theirs in the order of their menu."""
        pending: dict[Menu, list[tuple[str, ...]]] = {}
        for (menu, choice), count in zip(self.columns, self.counts[point], strict=True):
            pending.setdefault(menu, []).extend([choice.strategies] * int(count))
        return tuple(name for menu in self.menus for name in pending[menu].pop(0))


def front(units: Sequence[Unit]) -> Front:
    """The front of a stage of model units."""
    menus = tuple(menu_of(block) for block in blocks(units))
    points = _Points(np.zeros((1, 0), dtype=np.int64), np.zeros(1), np.zeros(1))
    for menu, count in Counter(menus).items():
        copies = _copies(menu, count)
        first, second = _efficient_pairs(points, copies)
        points = _Points(
            np.hstack([points.counts[first], copies.counts[second]]), points.retained[first] + copies.retained[second],
            points.recompute[first] + copies.recompute[second],
        )  # fmt: skip
    columns = [(menu, choice) for menu in Counter(menus) for choice in menu]
    return Front.from_counts(menus, points.counts, columns)


def blocks(units: Sequence[Unit]) -> list[list[Unit]]:
    """Cut a stage into runs of units whose retained bytes do not depend on units outside of the run."""
    runs: list[list[Unit]] = []
    for unit in units:
        if runs and shares_input(runs[-1][-1], unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def shares_input(before: Unit, unit: Unit) -> bool:
    """Whether a unit retains less if the one before it recomputes in full."""
    return before.layer == unit.layer and any(strategy.after_full is not None for strategy in unit.strategies.values())


_MENUS: dict[tuple[tuple[bool, tuple[tuple[str, Strategy], ...]], ...], Menu] = {}


def menu_of(block: Sequence[Unit]) -> Menu:
    """The Pareto-optimal choices of a block; cached, as blocks with the same strategies have the same."""
    key = tuple(
        (before is not None and shares_input(before, unit), tuple(unit.strategies.items()))
        for before, unit in pairwise((None, *block))
        if unit is not None
    )
    if key not in _MENUS:
        partial: list[tuple[str, ...]] = [()]
        for size, unit in enumerate(block, start=1):
            choices = [recomputation(block[:size], (*names, name)) for names in partial for name in unit.strategies]
            # The next unit may retain less after one that recomputes in full.
            full = [choice for choice in choices if choice.strategies[-1] == "full"]
            partial = [choice.strategies for choice in dict.fromkeys(efficient(choices) + efficient(full))]
        _MENUS[key] = tuple(efficient(recomputation(block, names) for names in partial))
    return _MENUS[key]


def recomputation(units: Sequence[Unit], strategies: Sequence[str]) -> StageRecomputation:
    """The costs of these units with these strategies, as one stage."""
    sums = Units(units=tuple(units)).stage_sums(tuple(enumerate(strategies)))
    return StageRecomputation(
        float(sums.activation_recomputed), float(sums.recompute), float(sums.recompute_workspace), tuple(strategies)
    )


def efficient(choices: Iterable[StageRecomputation]) -> list[StageRecomputation]:
    """The Pareto-optimal choices in time and bytes, fastest first."""
    best: list[StageRecomputation] = []
    for choice in sorted(choices, key=lambda c: (c.recompute, c.retained, c.workspace, c.strategies)):
        if not best or choice.retained < best[-1].retained:
            best.append(choice)
    return best


class _Points(NamedTuple):
    """Numbers of blocks per choice, [points, columns], with retained bytes and recompute time per point."""

    counts: Ints
    retained: Floats
    recompute: Floats


@cache
def _copies(menu: Menu, count: int) -> _Points:
    """Pareto-optimal points of `count` blocks with the same menu."""
    retained, recompute = (np.array([getattr(choice, name) for choice in menu]) for name in ("retained", "recompute"))
    single = _Points(np.eye(len(menu), dtype=np.int64), retained, recompute)
    if count == 1:
        return single
    fewer = _copies(menu, count - 1)
    first, second = _efficient_pairs(fewer, single)
    counts = fewer.counts[first] + single.counts[second]
    return _Points(counts, counts @ retained, counts @ recompute)


def _efficient_pairs(first: _Points, second: _Points) -> tuple[Ints, Ints]:
    """Indices of the Pareto-optimal pairs of a point of `first` and one of `second`, by recompute time."""
    retained = (first.retained[:, None] + second.retained).reshape(-1)
    recompute = (first.recompute[:, None] + second.recompute).reshape(-1)
    order = np.lexsort((retained, recompute))
    before = np.concatenate(([np.inf], np.minimum.accumulate(retained[order])[:-1]))
    order = order[retained[order] < before]
    if len(order) > MAX_POINTS:
        largest, smallest = retained[order[0]], retained[order[-1]]
        steps = np.floor((retained[order] - smallest) / (largest - smallest) * MAX_POINTS)
        order = order[np.unique(steps, return_index=True)[1][::-1]]
    pairs: tuple[Ints, Ints] = np.divmod(order, len(second.retained))
    return pairs


def _totals(points: Ints, columns: Sequence[tuple[Menu, StageRecomputation]]) -> tuple[Floats, Floats, Floats]:
    """Retained bytes, recompute time and workspace per point."""
    retained, recompute, workspace = (
        np.array([getattr(choice, name) for _, choice in columns]) for name in ("retained", "recompute", "workspace")
    )
    return points @ retained, points @ recompute, np.max(np.where(points > 0, workspace, 0.0), axis=1, initial=0.0)
