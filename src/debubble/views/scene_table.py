"""The terminal's view of scenes, and the comparison of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from debubble.formatting import size_words, time_words
from debubble.models import Model
from debubble.views.plan_table import render
from debubble.views.rows import Rows
from debubble.views.scene import Scene, planned_words, subject
from debubble.views.summary import why_not_faster
from debubble.views.terminal import bubble_table, device_table, headline, kind_table, remark_lines, rich_table

Words = Callable[[float], str]


def side_by_side(scenes: Sequence[Scene]) -> Rows | None:
    """A table of two scenes' figures and their ratios; None unless there are two scenes."""
    if len(scenes) != 2:
        return None
    first, second = scenes
    names = ("predicted", "measured") if second.measured else ("A", "B")
    return Rows(
        title="Side by side",
        columns=("", *names, f"{names[1]} / {names[0]}"),
        rows=[
            (name, words(a), words(b), f"{b / a:.3f}" if a else "-") for name, a, b, words in _figures(first, second)
        ],
        texts=frozenset({""}),
        caption=_caption(first, second),
    )


def _figures(first: Scene, second: Scene) -> Iterator[tuple[str, float, float, Words]]:
    def time(value: float) -> str:
        return time_words(value, seconds=first.seconds and second.seconds)

    def share(value: float) -> str:
        return f"{100 * value:.1f}%"

    yield "step", float(first.step_time), float(second.step_time), time
    one, two = first.why, second.why
    if one is not None and two is not None:
        yield "tokens per step", one.tokens, two.tokens, lambda count: f"{count:,.0f}"
        yield (
            "tokens/s per GPU", one.tokens_per_second_per_device, two.tokens_per_second_per_device,
            lambda pace: f"{pace:,.0f}",
        )  # fmt: skip
        if one.mfu is not None and two.mfu is not None:
            yield "MFU", one.mfu, two.mfu, share
    yield "pipeline", float(first.pipeline_time), float(second.pipeline_time), time
    yield "idle in the pipeline", first.timeline.bubble_fraction, second.timeline.bubble_fraction, share
    yield "peak memory", float(max(first.peak_memory)), float(max(second.peak_memory)), size_words
    if one is not None and two is not None:
        seconds = [{cause.cause: cause.seconds for cause in why.causes} for why in (one, two)]
        for cause in dict.fromkeys((*seconds[0], *seconds[1])):
            a, b = (by_cause.get(cause, 0.0) for by_cause in seconds)
            if max(a / one.step_time, b / two.step_time) >= MIN_SHARE:
                yield f"  {cause}", a, b, time


MIN_SHARE = 0.001
"""Smallest fraction of a step for which a cause has a row."""


def _caption(first: Scene, second: Scene) -> str:
    if second.measured:
        return f"The step took {float(second.step_time / first.step_time):.2f} times as long as predicted."
    said = []
    for name, scene in (("A", first), ("B", second)):
        plan, file = scene.plan, "" if scene.file is None else f" ({scene.file})"
        if plan is None:
            said.append(f"{name} is {scene.title}")
            continue
        degrees = "" if plan.model is None else f", {plan.degrees}"
        said.append(f"{name}{file} is {subject(plan)}{degrees}, {planned_words(plan)}")
    return f"{'; '.join(said)}.  {_warning(first, second)}".rstrip()


def _warning(first: Scene, second: Scene) -> str:
    """A sentence on why two plans' steps cannot be compared; empty if they can."""
    if first.plan is None or second.plan is None:
        return ""
    one, two = first.why, second.why
    modeled = [why.model for why in (one, two) if why is not None]
    if len(modeled) == 1 or (modeled and not _equal_cost(*modeled)):
        return "Their models differ, so that neither steps nor tokens per second say which plan is better."
    if one is not None and two is not None:
        return "" if one.tokens == two.tokens else "Their batches differ: compare tokens per second, and not steps."
    if first.plan.micro_batches != second.plan.micro_batches:
        return "Their micro-batches differ in number: compare times per micro-batch, and not steps."
    return ""


def _equal_cost(model: Model, other: Model) -> bool:
    """Tell whether two models have equal layers and nearly equal parameters, as with padded vocabularies."""
    same_layers = (model.layers, model.hidden) == (other.layers, other.hidden)
    return same_layers and abs(model.parameters / other.parameters - 1) < MAX_PARAMETER_DIFFERENCE


MAX_PARAMETER_DIFFERENCE = 0.01
"""Relative difference of parameters up to which models of equal layers count as the same."""


def render_scenes(scenes: Sequence[Scene], *, details: bool = False, width: int = 80) -> RenderableType:
    """Render scenes for the terminal, after the comparison if there are two.

    Args:
        scenes: One scene, or two to compare.
        details: Whether tables of devices, stages and planners follow the answer of a plan.
        width: Characters of a line.
    """
    compared = side_by_side(scenes)
    parts: list[RenderableType] = []
    if compared is not None:
        # A table's caption would be as narrow as the table.
        parts = [rich_table(replace(compared, caption="")), Text(f"{compared.caption}\n")]
    for scene, letter in zip(scenes, letters(scenes), strict=True):
        if scene.plan is None:
            parts.append(_render_scene(scene))
        else:
            tables = details or scene.why is None
            parts.append(render(scene.plan, scene, letter=letter, details=tables, width=width))
    return Group(*parts)


def render_compared(scenes: Sequence[Scene], misfits: Mapping[str, str], *, caption: str) -> RenderableType:
    """Render a table of schedules, and why others do not fit."""
    rows = Rows(
        title="Schedules",
        columns=("schedule", "step", "bubble", "peak memory", "stages"),
        rows=[
            (
                scene.title, time_words(float(scene.step_time), seconds=scene.seconds),
                f"{100 * scene.timeline.bubble_fraction:.1f}%", size_words(float(max(scene.peak_memory))),
                f"{scene.timeline.program.schedule.placement.stages}",
            )
            for scene in scenes
        ],
        texts=frozenset({"schedule"}),
        caption=caption,
    )  # fmt: skip
    return Group(rich_table(rows), *(Text(f"{name}: {reason}") for name, reason in misfits.items()))


def letters(scenes: Sequence[Scene]) -> list[str]:
    """The labels of two compared plans or schedules; empty labels for other scenes."""
    compared = len(scenes) == 2 and not scenes[1].measured
    return ["A: ", "B: "] if compared else [""] * len(scenes)


def _render_scene(scene: Scene) -> RenderableType:
    """Render a timeline without a plan."""
    return Group(
        Text(scene.title, style="bold"),
        Text(f"{headline(scene)}\n{why_not_faster(scene)}\n"),
        *remark_lines(scene),
        device_table(scene),
        bubble_table(scene),
        kind_table(scene),
    )
