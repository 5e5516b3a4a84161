"""The efficient ways to recompute a stage: every trade of bytes kept against recompute time worth having.

Obscura chooses operators by a 0-1 program: the least time r = sum x_i f_i such that a' = a - sum x_i a_i fits.  The
right-hand side changes with every swapping configuration, the operators do not; so the program is solved once per
stage for all right-hand sides, as its Pareto front of (a', r), and a configuration only looks its answer up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from debubble.costs.units import Unit

Floats = NDArray[np.float64]
Menu = tuple[tuple[str, float, float], ...]
"""A unit's strategies as (name, bytes kept, recompute time): units with the same menu are interchangeable."""

RESOLUTION = 4096
"""Points of a front; beyond it, the fastest of each of so many equal steps of memory are kept."""


@dataclass(frozen=True)
class StageRecomputation:
    """The recomputation of a stage.

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


@dataclass(frozen=True, eq=False)
class Front:
    """A stage's efficient choices, from the fastest that keeps most to the slowest that keeps least.

    Attributes:
        menus: The menu of each of the stage's units.
        kept: [points]: bytes that the forward leaves.
        recompute: [points]: recompute time.
        workspace: [points]: bytes that a fused recomputation brings back at a time.
        counts: [points, columns]: units that take each strategy of each menu.
        columns: The menu and strategy of each column.
    """

    menus: tuple[Menu, ...]
    kept: Floats
    recompute: Floats
    workspace: Floats
    counts: NDArray[np.int64]
    columns: tuple[tuple[Menu, str], ...]
    _looked_up: dict[int, StageRecomputation] = field(default_factory=dict)

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
        """Interchangeable units get their strategies in the order of their menu."""
        pending: dict[Menu, list[str]] = {}
        for (menu, name), count in zip(self.columns, self.counts[point], strict=True):
            pending.setdefault(menu, []).extend([name] * int(count))
        return tuple(pending[menu].pop(0) for menu in self.menus)


def front(units: Sequence[Unit]) -> Front:
    """The front of a stage of model units."""
    menus = tuple(menu_of(unit) for unit in units)
    columns: list[tuple[Menu, str]] = []
    points = np.zeros((1, 0), dtype=np.int64)
    for menu, count in Counter(menus).items():
        columns += [(menu, name) for name, _, _ in menu]
        points = _efficient(_joined(points, _copies(menu, count)), columns)
    return Front(menus, *_totals(points, columns), points, tuple(columns))


def menu_of(unit: Unit) -> Menu:
    """A unit's strategies without those that another beats in both respects."""
    menu: list[tuple[str, float, float]] = []
    for name, s in sorted(unit.strategies.items(), key=lambda item: (item[1].recompute, item[1].activation)):
        if not menu or s.activation < menu[-1][1]:
            menu.append((name, float(s.activation), float(s.recompute)))
    return tuple(menu)


@cache
def _copies(menu: Menu, count: int) -> NDArray[np.int64]:
    """Efficient points of `count` units with the same menu, as numbers of units per strategy."""
    columns = [(menu, name) for name, _, _ in menu]
    single = np.eye(len(menu), dtype=np.int64)
    if count == 1:
        return single
    fewer = _copies(menu, count - 1)
    return _efficient((fewer[:, None, :] + single[None, :, :]).reshape(-1, len(menu)), columns)


def _joined(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every point of `left` with every point of `right`."""
    return np.hstack([np.repeat(left, len(right), axis=0), np.tile(right, (len(left), 1))])


def _efficient(points: NDArray[np.int64], columns: Sequence[tuple[Menu, str]]) -> NDArray[np.int64]:
    """The points that no other beats, in order of recompute time."""
    kept, recompute, _ = _totals(points, columns)
    order = np.lexsort((kept, recompute))
    before = np.concatenate(([np.inf], np.minimum.accumulate(kept[order])[:-1]))
    order = order[kept[order] < before]
    if len(order) > RESOLUTION:
        steps = np.floor((kept[order] - kept[order[-1]]) / (kept[order[0]] - kept[order[-1]]) * RESOLUTION)
        order = order[np.unique(steps, return_index=True)[1][::-1]]
    chosen: NDArray[np.int64] = points[order]
    return chosen


def _totals(points: NDArray[np.int64], columns: Sequence[tuple[Menu, str]]) -> tuple[Floats, Floats, Floats]:
    """(bytes kept, recompute time, workspace) of each point."""
    entries = [next(entry for entry in menu if entry[0] == name) for menu, name in columns]
    kept = np.array([entry[1] for entry in entries])
    recompute = np.array([entry[2] for entry in entries])
    dropped = np.array([menu[0][1] - entry[1] for (menu, _), entry in zip(columns, entries, strict=True)])
    return points @ kept, points @ recompute, np.max(np.where(points > 0, dropped, 0.0), axis=1, initial=0.0)
