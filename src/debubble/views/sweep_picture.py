"""A picture of a sweep: step time by value, with its likely interval."""

from __future__ import annotations

from debubble.ir import Kind
from debubble.planners.analysis.likely_fit import plan_accuracy
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.sweep import Sweep
from debubble.views.palette import KIND_COLORS, THEMES
from debubble.views.picture import SIZES, check_style, encode_figure
from debubble.views.scene import subject
from debubble.views.sweep_axis import axis_labels, axis_places

HEIGHT_TO_WIDTH = 0.45
"""Height of the picture, as a fraction of its width."""
POINTS_OF_INCH = 50
"""Typographic points of the axis per inch of the picture's width; its margins take the rest of 72."""
LETTER_WIDTH = 0.65
"""Largest width of a letter, as a fraction of the size of the text."""


def sweep_picture(sweep: Sweep, form: str, *, theme: str = "light", size: str = "slide") -> bytes:
    """Draw a picture file; values with which nothing fits are labeled instead of drawn.

    Args:
        sweep: The plans.
        form: `png`, `svg` or `pdf`.
        theme: `light` or `dark`.
        size: `slide`, `page` or `column`.

    Raises:
        InputError: If there is no such theme or size.
    """
    from matplotlib.figure import Figure

    check_style(theme=theme, size=size)
    colors, sizes = THEMES[theme], SIZES[size]
    figure = Figure(figsize=(sizes.width, HEIGHT_TO_WIDTH * sizes.width), facecolor=colors.paper, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(colors.paper)
    places = axis_places(sweep)
    planned = [(place, point.plan) for place, point in zip(places, sweep.points, strict=True) if point.plan is not None]
    planned.sort(key=lambda entry: entry[0])
    for place, plan in planned:
        accuracy = plan_accuracy("step", plan)
        if accuracy is not None:
            ends = [end * seconds_per_step(plan) for end in (accuracy.low, accuracy.high)]
            axes.plot([place, place], ends, color=colors.muted, linewidth=1.5)
    steps = [seconds_per_step(plan) for _, plan in planned]
    axes.plot([place for place, _ in planned], steps, "o-", color=KIND_COLORS[Kind.F])
    points = POINTS_OF_INCH * sizes.width
    labels = axis_labels(sweep, [place * points for place in places], letter_width=LETTER_WIDTH * sizes.text)
    axes.set_xticks(places, labels)
    for place, point in zip(places, sweep.points, strict=True):
        if point.plan is None:
            axes.text(
                place, 0.03, "does not fit", rotation=90, ha="center", va="bottom", fontsize=sizes.text,
                color=colors.muted, transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    margin = 0.5 / max(1, len(places) - 1)
    axes.set_xlim(-margin, 1 + margin)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(sweep.over.replace("_", " "), fontsize=sizes.text, color=colors.muted)
    axes.set_ylabel("seconds per step", fontsize=sizes.text, color=colors.muted)
    axes.set_title(_title(sweep), loc="left", fontsize=sizes.title, fontweight="bold", color=colors.ink)
    axes.tick_params(length=0, labelsize=sizes.text, colors=colors.muted)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=colors.grid, linewidth=0.5)
    axes.set_axisbelow(True)
    return encode_figure(figure, form)


def _title(sweep: Sweep) -> str:
    """Model and cluster, or the swept option if it is one of these."""
    first = next((point.plan for point in sweep.points if point.plan is not None), None)
    if first is None:
        return "Nothing fits"
    return f"Step by {sweep.over}" if sweep.over in ("model", "cluster") else subject(first)
