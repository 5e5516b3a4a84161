"""The drawings of the papers' figures: timelines, bars, lines and grids of cells, as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from debubble.simulator import Timeline
from debubble.views import Scene, views
from debubble.views.picture import encode_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3d7ab8", "#e08a3c", "#4f9e6b", "#b5517a", "#8a6fb0", "#8c8c4a", "#5b6573", "#c9a227")
PAPER = "#1f2733"
LIMIT = "#c0392b"
MAX_UPRIGHT_LABELS = 12
"""Bar charts with more groups than this print the group names vertically."""
LEGEND_WIDTH = 140
"""Characters per row of a legend."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Timelines:
    """Timelines one below the other, with the memory of each device."""

    scenes: Sequence[Scene]

    @staticmethod
    def from_timelines(timelines: Mapping[str, Timeline]) -> Timelines:
        """The drawing of simulated timelines by title."""
        return Timelines([Scene(timeline, title=title) for title, timeline in timelines.items()])


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A grouped or stacked bar chart.

    Attributes:
        title: Title of the chart.
        groups: Names of the groups along the axis.
        series: Name -> one value per group; None: no bar.
        unit: Unit of the values.
        stacked: Whether the series are stacked.
        paper: The paper's values, drawn as marks over the series of the same name.
        limit: A value drawn as a horizontal line.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Values]
    unit: str
    stacked: bool = False
    paper: Mapping[str, Values] | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line chart; `paper` has the paper's values, drawn as open marks of the same color."""

    title: str
    across: str
    x: Sequence[float]
    series: Mapping[str, Values]
    unit: str
    paper: Mapping[str, Values] | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A square grid whose cells are colored by their kind."""

    title: str
    labels: Sequence[str]
    cells: Sequence[Sequence[str]]
    colors: Mapping[str, str]


Drawing = Timelines | Bars | Lines | Cells


def svg(drawing: Drawing) -> bytes:
    """Render a drawing as an SVG file; the same drawing gives the same bytes."""
    if isinstance(drawing, Timelines):
        return views["svg"](drawing.scenes)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_size(drawing), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(drawing.title, 90), loc="left", fontsize=11, fontweight="bold")
    if isinstance(drawing, Cells):
        _draw_cells(axes, drawing)
    else:
        _draw_bars(axes, drawing) if isinstance(drawing, Bars) else _draw_lines(axes, drawing)
        if drawing.limit is not None:
            label = f"{drawing.limit:g} {drawing.unit}"
            axes.axhline(drawing.limit, color=LIMIT, linewidth=1, linestyle=(0, (5, 4)), label=label)
        axes.set_ylabel(drawing.unit)
        if isinstance(drawing, Bars):
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.spines[["top", "right"]].set_visible(False)
        _, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = min(len(labels), 4, max(1, LEGEND_WIDTH // (max(map(len, labels)) + 8)))
            figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return encode_figure(figure, "svg")


def _size(drawing: Bars | Lines | Cells) -> tuple[float, float]:
    if isinstance(drawing, Cells):
        side = 1.5 + 0.22 * len(drawing.labels)
        return side + 2.0, side
    return 9.0, 4.0


def _draw_bars(axes: Axes, drawing: Bars) -> None:
    count = len(drawing.groups)
    width = 0.8 if drawing.stacked else 0.8 / max(len(drawing.series), 1)
    below = [0.0] * count
    for number, (name, values) in enumerate(drawing.series.items()):
        xs = [x if drawing.stacked else x - 0.4 + (number + 0.5) * width for x in range(count)]
        heights = [0.0 if value is None else value for value in values]
        color = COLORS[number % len(COLORS)]
        axes.bar(xs, heights, width * 0.94, bottom=below if drawing.stacked else None, color=color, label=name)
        published = (drawing.paper or {}).get(name, [None] * count)
        marked = [(x, value) for x, value in zip(xs, published, strict=True) if value is not None]
        if marked:
            axes.plot(*zip(*marked, strict=True), "_", color=PAPER, markersize=9, markeredgewidth=2)
        if drawing.stacked:
            below = [under + height for under, height in zip(below, heights, strict=True)]
    if drawing.paper:
        axes.plot([], [], "_", color=PAPER, markersize=9, markeredgewidth=2, label="the paper")
    if count > MAX_UPRIGHT_LABELS:
        axes.set_xticks(range(count), list(drawing.groups), fontsize=7, rotation=90)
        return
    labels = [textwrap.fill(group, max(8, 110 // count), break_long_words=False) for group in drawing.groups]
    axes.set_xticks(range(count), labels, fontsize=8)


def _draw_lines(axes: Axes, drawing: Lines) -> None:
    for number, (name, values) in enumerate(drawing.series.items()):
        color = COLORS[number % len(COLORS)]
        axes.plot(*_points(drawing.x, values), "o-", color=color, label=name, markersize=4)
        if drawing.paper and name in drawing.paper:
            points = _points(drawing.x, drawing.paper[name])
            axes.plot(*points, "s", markerfacecolor="none", color=color, markersize=8, label=f"{name}, the paper")
    axes.set_xlabel(drawing.across)
    axes.set_xticks(list(drawing.x), [f"{x:g}" for x in drawing.x])


def _points(x: Sequence[float], values: Values) -> tuple[list[float], list[float]]:
    """The places where there is a value, and the values."""
    points = [(position, value) for position, value in zip(x, values, strict=True) if value is not None]
    return [position for position, _ in points], [value for _, value in points]


def _draw_cells(axes: Axes, drawing: Cells) -> None:
    from matplotlib.patches import Patch, Rectangle

    count = len(drawing.labels)
    for row, kinds in enumerate(drawing.cells):
        for column, kind in enumerate(kinds):
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=drawing.colors[kind], edgecolor="white"))
    axes.set_xlim(0, count)
    axes.set_ylim(count, 0)
    axes.set_aspect("equal")
    ticks = [index + 0.5 for index in range(count)]
    axes.set_xticks(ticks, list(drawing.labels), fontsize=7)
    axes.set_yticks(ticks, list(drawing.labels), fontsize=7)
    handles = [Patch(facecolor=color, label=kind) for kind, color in drawing.colors.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8, frameon=False)
