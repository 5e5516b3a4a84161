"""The efficient ways to recompute a stage: every trade of bytes kept against recompute time worth having.

Obscura chooses operators by a 0-1 program: the least time r = sum x_i f_i such that a' = a - sum x_i a_i fits.  The
right-hand side changes with every swapping configuration, the operators do not; so the program is solved once per
stage for all right-hand sides, as its Pareto front of (a', r), and a configuration only looks its answer up.

What a unit keeps may depend on whether the one before it recomputes in full: two halves of a layer then share one
input.  So the front is made of blocks, runs of units that share inputs with no others.
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

RESOLUTION = 4096
"""Points of a front; beyond it, the fastest of each of so many equal steps of memory are kept."""


@dataclass(frozen=True)
class StageRecomputation:
    """The recomputation of a stage, or of a part of one.

    Attributes:
        kept: Bytes that its forward leaves: a'.
        recompute: Recompute time per micro-batch: r.
        workspace: Bytes that a fused recomputation brings back at a time.
        strategies: The strategy of each of its units; a fixed stage is one unit.
    """

    kept: float
    recompute: float
    workspace: float
    strategies: tuple[str, ...]


Menu = tuple[StageRecomputation, ...]
"""A block's efficient ways to recompute: blocks with the same menu are interchangeable."""


@dataclass(frozen=True, eq=False)
class Front:
    """A stage's efficient choices, from the fastest that keeps most to the slowest that keeps least.

    Attributes:
        menus: The menu of each of the stage's blocks.
        kept: [points]: bytes that the forward leaves.
        recompute: [points]: recompute time.
        workspace: [points]: bytes that a fused recomputation brings back at a time.
        counts: [points, columns]: blocks that take each choice of each menu.
        columns: The menu and choice of each column.
    """

    menus: tuple[Menu, ...]
    kept: Floats
    recompute: Floats
    workspace: Floats
    counts: Ints
    columns: tuple[tuple[Menu, StageRecomputation], ...]
    _looked_up: dict[int, StageRecomputation] = field(default_factory=dict)

    @staticmethod
    def of(menus: tuple[Menu, ...], points: Ints, columns: Sequence[tuple[Menu, StageRecomputation]]) -> Front:
        """The front of these points, as numbers of blocks per choice of each menu."""
        return Front(menus, *_totals(points, columns), points, tuple(columns))

    def cheapest(
        self,
        *,
        alive: float,
        budget: float,
        transfer: float = 0.0,
        period: float = float("inf"),
        at_least: float = 0.0,
    ) -> StageRecomputation | None:
        """The least recomputation with which the activations fit; None if none does.

        Args:
            alive: Activations that are in memory at a time.
            budget: Bytes for them and for the workspace.
            transfer: With swapping, seconds per byte kept, which may take `period` and the recompute time.
            period: Time of a micro-batch without recomputation.
            at_least: Recompute time below which nothing is chosen.
        """
        fits = (alive * self.kept + self.workspace <= budget) & (transfer * self.kept <= period + self.recompute)
        fits &= self.recompute >= at_least
        first = int(fits.argmax())
        return self[first] if fits[first] else None

    def __getitem__(self, point: int) -> StageRecomputation:
        if point not in self._looked_up:
            self._looked_up[point] = StageRecomputation(
                float(self.kept[point]),
                float(self.recompute[point]),
                float(self.workspace[point]),
                self._strategies(point),
            )
        return self._looked_up[point]

    def _strategies(self, point: int) -> tuple[str, ...]:
        """Interchangeable blocks get their strategies in the order of their menu."""
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
        left, right = _efficient_pairs(points, copies)
        points = _Points(
            np.hstack([points.counts[left], copies.counts[right]]), points.kept[left] + copies.kept[right],
            points.recompute[left] + copies.recompute[right],
        )  # fmt: skip
    columns = [(menu, choice) for menu in Counter(menus) for choice in menu]
    return Front.of(menus, points.counts, columns)


def blocks(units: Sequence[Unit]) -> list[list[Unit]]:
    """Cut a stage between units that keep the same bytes whatever the other recomputes."""
    found: list[list[Unit]] = []
    for unit in units:
        if found and shares_input(found[-1][-1], unit):
            found[-1].append(unit)
        else:
            found.append([unit])
    return found


def shares_input(before: Unit, unit: Unit) -> bool:
    """Tell whether a unit keeps less if the one before it recomputes in full."""
    return before.layer == unit.layer and any(way.after_full is not None for way in unit.strategies.values())


_MENUS: dict[tuple[tuple[bool, tuple[tuple[str, Strategy], ...]], ...], Menu] = {}


def menu_of(block: Sequence[Unit]) -> Menu:
    """The efficient ways to recompute of some units; those with the same strategies have the same."""
    key = tuple(
        (before is not None and shares_input(before, unit), tuple(unit.strategies.items()))
        for before, unit in pairwise((None, *block))
        if unit is not None
    )
    if key not in _MENUS:
        partial: list[tuple[str, ...]] = [()]
        for size, unit in enumerate(block, start=1):
            ways = [recomputation(block[:size], (*each, name)) for each in partial for name in unit.strategies]
            # The next unit may keep less after one that recomputes in full.
            full = [way for way in ways if way.strategies[-1] == "full"]
            partial = [way.strategies for way in dict.fromkeys(efficient(ways) + efficient(full))]
        _MENUS[key] = tuple(efficient(recomputation(block, each) for each in partial))
    return _MENUS[key]


def recomputation(units: Sequence[Unit], strategies: Sequence[str]) -> StageRecomputation:
    """The costs of units that recompute so, as a stage of their own."""
    sums = Units(units=tuple(units)).stage_sums(tuple(enumerate(strategies)))
    return StageRecomputation(
        float(sums.activation_recomputed), float(sums.recompute), float(sums.recompute_workspace), tuple(strategies)
    )


def efficient(ways: Iterable[StageRecomputation]) -> list[StageRecomputation]:
    """The ways that no other beats in time and bytes, fastest first."""
    found: list[StageRecomputation] = []
    for way in sorted(ways, key=lambda way: (way.recompute, way.kept, way.workspace, way.strategies)):
        if not found or way.kept < found[-1].kept:
            found.append(way)
    return found


class _Points(NamedTuple):
    """Numbers of blocks per choice, [points, columns], with the bytes kept and the recompute time of each point."""

    counts: Ints
    kept: Floats
    recompute: Floats


@cache
def _copies(menu: Menu, count: int) -> _Points:
    """Efficient points of `count` blocks with the same menu, as numbers of blocks per choice."""
    kept, recompute = (np.array([getattr(choice, name) for choice in menu]) for name in ("kept", "recompute"))
    single = _Points(np.eye(len(menu), dtype=np.int64), kept, recompute)
    if count == 1:
        return single
    fewer = _copies(menu, count - 1)
    left, right = _efficient_pairs(fewer, single)
    counts = fewer.counts[left] + single.counts[right]
    return _Points(counts, counts @ kept, counts @ recompute)


def _efficient_pairs(left: _Points, right: _Points) -> tuple[Ints, Ints]:
    """The pairs of a point of one and a point of the other that no pair beats, in order of recompute time."""
    kept = (left.kept[:, None] + right.kept).reshape(-1)
    recompute = (left.recompute[:, None] + right.recompute).reshape(-1)
    order = np.lexsort((kept, recompute))
    before = np.concatenate(([np.inf], np.minimum.accumulate(kept[order])[:-1]))
    order = order[kept[order] < before]
    if len(order) > RESOLUTION:
        steps = np.floor((kept[order] - kept[order[-1]]) / (kept[order[0]] - kept[order[-1]]) * RESOLUTION)
        order = order[np.unique(steps, return_index=True)[1][::-1]]
    pairs: tuple[Ints, Ints] = np.divmod(order, len(right.kept))
    return pairs


def _totals(points: Ints, columns: Sequence[tuple[Menu, StageRecomputation]]) -> tuple[Floats, Floats, Floats]:
    """(bytes kept, recompute time, workspace) of each point."""
    kept, recompute, workspace = (
        np.array([getattr(choice, name) for _, choice in columns]) for name in ("kept", "recompute", "workspace")
    )
    return points @ kept, points @ recompute, np.max(np.where(points > 0, workspace, 0.0), axis=1, initial=0.0)
