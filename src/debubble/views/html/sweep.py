"""The page of a sweep: a curve of step time by value, and a slider over the plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from debubble.formatting import listed, mfu_words, size_words, time_words
from debubble.planners.analysis.likely_fit import plan_accuracy
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.sweep import Sweep, SweepPoint
from debubble.plans import Plan
from debubble.views.html.templates import render
from debubble.views.plan_levers import lever_words
from debubble.views.rows import Rows
from debubble.views.scene import Scene, subject
from debubble.views.sweep_axis import axis_labels, axis_places

WIDTH, PHONE_WIDTH = 790, 290
"""Least widths of the curve without its left axis, in pixels, on screens and on phones."""
HEIGHT, LEFT_MARGIN, BOTTOM_MARGIN = 220, 60, 34
"""Height of the curve and margins for its axes, in pixels."""
LETTER_WIDTH = 7
"""Largest width of a letter of the axis, in pixels."""
MAX_MARGIN = 25
"""Largest distance of the first and last mark from the curve's ends, in percent of its width."""


def sweep_page(sweep: Sweep, pictures: list[str]) -> bytes:
    """Write the page of a sweep.

    Args:
        sweep: The plans.
        pictures: A small picture of each point's plan; empty if nothing fits.
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
        curve=sweep_curve(sweep),
        rows=sweep_rows(sweep),
    )


def sweep_rows(sweep: Sweep) -> Rows:
    """The table of a sweep, with a row per value."""
    over = sweep.over.replace("_", " ")
    return Rows(
        title=f"Step by {over}",
        columns=(over, "step", "likely", "tokens/s", "MFU", "peak"),
        rows=[_row(point) for point in sweep.points],
        texts=frozenset({over}),
        no_wrap=frozenset({over, "step", "likely"}),
        caption=_caption(sweep),
    )


def _row(point: SweepPoint) -> tuple[str, ...]:
    if point.plan is None:
        return (str(point.value), "does not fit", *[""] * 4)
    scene = Scene.predicted(point.plan)
    assert scene.why is not None
    return (
        str(point.value), time_words(scene.step_time, seconds=True), _likely(point.plan, float(scene.step_time)),
        f"{scene.why.tokens_per_second:,.0f}", mfu_words(scene.why.mfu), size_words(max(scene.peak_memory)),
    )  # fmt: skip


def _likely(plan: Plan, seconds: float) -> str:
    """The likely interval of the step time; empty if costs were measured."""
    accuracy = plan_accuracy("step", plan)
    if accuracy is None:
        return ""
    low, high = (time_words(end * seconds, seconds=True) for end in (accuracy.low, accuracy.high))
    return f"{low} to {high}"


def _caption(sweep: Sweep) -> str:
    """Sentences on the intervals, and on devices of which there are few or no published runs."""
    plans = [point.plan for point in sweep.points if point.plan is not None]
    known = [(plan, a) for plan in plans if (a := plan_accuracy("step", plan)) is not None]
    few = dict.fromkeys(str(plan.cluster.slowest.name) for plan, a in known if plan.cluster and not a.of_hardware)
    on = f" Few or none of them ran on {listed([*few])}." if few else ""
    return f"Likely: where nine in ten published runs of such a kind lie.{on}" if known else ""


def sweep_words(point: SweepPoint) -> str:
    """The degrees of a point's plan, its recomputation, offload and frameworks; or why nothing fits."""
    if point.plan is None:
        return point.reason
    origin = "" if point.found_with is None else f" (the plan of {point.found_with}, as none that is faster was found)"
    why = Scene.predicted(point.plan).why
    assert why is not None
    return "; ".join([f"{point.plan.degrees}, {point.plan.schedule.name}{origin}", *lever_words(point.plan, why)])


def _words(point: SweepPoint) -> str:
    step = "" if point.plan is None else f"{time_words(seconds_per_step(point.plan), seconds=True)} per step with "
    return step + sweep_words(point)


def sweep_curve(sweep: Sweep) -> dict[str, Any]:
    """Marks, line and axis labels of the curve: across in percent of its width, down in pixels."""
    steps = [None if point.plan is None else seconds_per_step(point.plan) for point in sweep.points]
    longest = max((step for step in steps if step is not None), default=1.0)
    places = axis_places(sweep)
    ends = [len(str(sweep.points[places.index(end)].value)) for end in (min(places), max(places))]
    margin = min(MAX_MARGIN, max(50 / len(steps), 50 * LETTER_WIDTH * max(ends) / PHONE_WIDTH))
    xs = [margin + (100 - 2 * margin) * place for place in places]
    ys = [None if step is None else (HEIGHT - BOTTOM_MARGIN) * (1 - 0.9 * step / longest) for step in steps]
    wide, narrow = (
        axis_labels(sweep, [x * width / 100 for x in xs], letter_width=LETTER_WIDTH) for width in (WIDTH, PHONE_WIDTH)
    )
    marks = [
        {"x": round(x, 2), "y": y, "label": label, "on_phones": label == short}
        for x, y, label, short in zip(xs, ys, wide, narrow, strict=True)
    ]
    line = " ".join(f"{x:.2f},{y:.1f}" for x, y in sorted(zip(xs, ys, strict=True)) if y is not None)
    return {
        "height": HEIGHT, "left": LEFT_MARGIN, "marks": marks, "line": line, "ticks": list(_ticks(longest)),
    }  # fmt: skip


def _ticks(longest: float) -> Iterator[dict[str, Any]]:
    for share in (0.0, 0.5, 1.0):
        yield {
            "y": (HEIGHT - BOTTOM_MARGIN) * (1 - 0.9 * share),
            "words": time_words(share * longest, seconds=True) if share else "0",
        }
