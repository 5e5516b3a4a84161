"""The page of a sweep: the step by value as a curve, and a slider over the plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from debubble.formatting import percent, size_words, time_words
from debubble.planners.plan_step import gap_of, seconds_per_step
from debubble.planners.sweep import Sweep, SweepPoint
from debubble.views.html.templates import render
from debubble.views.rows import Rows
from debubble.views.scene import Scene, subject

WIDTH, HEIGHT, LEFT, BELOW = 860, 220, 70, 34
"""Pixels of the curve, and of the room for its axes."""


def sweep_page(sweep: Sweep, pictures: list[str]) -> bytes:
    """Write the page.

    Args:
        sweep: The plans.
        pictures: A small picture of each, in the order of the points; empty where nothing fits.
    """
    first = next((point.plan for point in sweep.points if point.plan is not None), None)
    return render(
        "sweep.html",
        title=f"By {sweep.over.replace('_', ' ')}",
        subject="Nothing fits" if first is None else subject(first),
        over=sweep.over.replace("_", " "),
        points=[
            {"value": str(point.value), "words": _words(point), "picture": picture}
            for point, picture in zip(sweep.points, pictures, strict=True)
        ],
        start=next((place for place, point in enumerate(sweep.points) if point.plan is not None), 0),
        curve=_curve(sweep),
        rows=sweep_rows(sweep),
    )


def sweep_rows(sweep: Sweep) -> Rows:
    """The table of a sweep: one row a value."""
    searched = any(point.plan is not None and point.plan.degree_search is not None for point in sweep.points)
    degrees = ("degrees",) if searched else ()
    return Rows(
        title=f"Step by {sweep.over.replace('_', ' ')}",
        columns=(sweep.over.replace("_", " "), "step", "tokens/s", "gap", "peak", "planner", "schedule", *degrees),
        rows=[_row(point, searched=searched) for point in sweep.points],
        texts=frozenset({sweep.over.replace("_", " "), "planner", "schedule", *degrees}),
    )


def _row(point: SweepPoint, *, searched: bool) -> tuple[str, ...]:
    if point.plan is None:
        return (str(point.value), "does not fit", *[""] * (5 + searched))
    scene = Scene.predicted(point.plan)
    assert scene.why is not None
    return (
        str(point.value), time_words(scene.step_time, seconds=True), f"{scene.why.tokens_per_second:,.0f}",
        percent(gap_of(point.plan, scene.step_time), 1), size_words(max(scene.peak_memory)),
        point.plan.planner, point.plan.schedule.name, *([str(point.plan.degrees)] if searched else []),
    )  # fmt: skip


def _words(point: SweepPoint) -> str:
    if point.plan is None:
        return point.reason
    return f"{time_words(seconds_per_step(point.plan), seconds=True)} per step"


def _curve(sweep: Sweep) -> dict[str, Any]:
    """Marks of the plans, and the labels of the axes, in pixels."""
    steps = [None if point.plan is None else seconds_per_step(point.plan) for point in sweep.points]
    most = max((step for step in steps if step is not None), default=1.0)
    wide = (WIDTH - LEFT) / len(steps)
    marks = [
        {"x": LEFT + wide * (place + 0.5), "y": None if step is None else (HEIGHT - BELOW) * (1 - 0.9 * step / most)}
        for place, step in enumerate(steps)
    ]
    line = " ".join(f"{mark['x']:.1f},{mark['y']:.1f}" for mark in marks if mark["y"] is not None)
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "marks": marks, "line": line,
        "ticks": list(_ticks(most)),
    }  # fmt: skip


def _ticks(most: float) -> Iterator[dict[str, Any]]:
    for share in (0.0, 0.5, 1.0):
        yield {
            "y": (HEIGHT - BELOW) * (1 - 0.9 * share),
            "words": time_words(share * most, seconds=True) if share else "0",
        }
