"""The terminal's view of scenes: each with all its figures, and two next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from debubble.formatting import size_words, time_words
from debubble.models import Model
from debubble.views.plan_table import model_lines, stages_and_planners, step_tables
from debubble.views.rows import Rows
from debubble.views.scene import Scene, planner_of, subject
from debubble.views.summary import bound_words, why_not_faster
from debubble.views.terminal import bubble_table, device_table, headline, kind_table, remark_lines, rich_table

Words = Callable[[float], str]


def side_by_side(scenes: Sequence[Scene]) -> Rows | None:
    """A row per figure, with the ratio of the second scene's to the first's; None unless there are two scenes."""
    if len(scenes) != 2:
        return None
    first, second = scenes
    names = ("predicted", "measured") if second.plan is None else ("A", "B")
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
    yield "bubble", first.timeline.bubble_fraction, second.timeline.bubble_fraction, share
    yield "peak memory", float(max(first.peak_memory)), float(max(second.peak_memory)), size_words


def _caption(first: Scene, second: Scene) -> str:
    if first.plan is None or second.plan is None:
        return f"The step took {second.step_time / first.step_time:.2f} times as long as predicted."
    plans = {"A": first.plan, "B": second.plan}
    said = "; ".join(
        f"{name} is {subject(plan)}, {plan.schedule.name} by {planner_of(plan)}" for name, plan in plans.items()
    )
    return f"{said}.  {_warning(first, second)}"


def _warning(first: Scene, second: Scene) -> str:
    """A sentence where two plans' steps cannot be compared."""
    assert first.plan is not None
    assert second.plan is not None
    one, two = first.why, second.why
    if (one is None) != (two is None) or (one is not None and two is not None and not _uniform(one.model, two.model)):
        return "Their models differ, so that neither steps nor tokens per second say which plan is better."
    if one is not None and two is not None:
        return "" if one.tokens == two.tokens else "Their batches differ: compare tokens per second, and not steps."
    if first.plan.micro_batches != second.plan.micro_batches:
        return "Their micro-batches differ in number: compare times per micro-batch, and not steps."
    return ""


def _uniform(model: Model, other: Model) -> bool:
    """Tell whether two models cost the same but for the padding of a vocabulary, whatever else their configs say."""
    same_layers = (model.layers, model.hidden) == (other.layers, other.hidden)
    return same_layers and abs(model.parameters / other.parameters - 1) < PADDING


PADDING = 0.01
"""Share of the parameters by which models may differ that are taken for the same."""


def render_scenes(scenes: Sequence[Scene], *, details: bool = False) -> RenderableType:
    """Predicted or measured timelines; the comparison of two comes first.

    Args:
        scenes: One, or two to compare.
        details: Whether the stages and every planner's answer follow the tables of a plan.
    """
    compared = side_by_side(scenes)
    return Group(
        *([] if compared is None else [rich_table(compared)]),
        *(_render_scene(scene, letter, details=details) for scene, letter in zip(scenes, letters(scenes), strict=True)),
    )


def render_compared(scenes: Sequence[Scene], misfits: Mapping[str, str], *, caption: str) -> RenderableType:
    """A row for every schedule, in the order in which they were named, and why others do not fit."""
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
    """The labels before the names of two plans that are compared; nothing before others."""
    compared = len(scenes) == 2 and all(scene.plan is not None for scene in scenes)
    return ["A: ", "B: "] if compared else [""] * len(scenes)


def _render_scene(scene: Scene, letter: str, *, details: bool) -> RenderableType:
    plan = scene.plan
    said = [] if plan is None else [*model_lines(plan, scene), bound_words(plan, scene)]
    model = "" if plan is None or plan.model is None else f"{subject(plan)}; "
    return Group(
        Text(f"{letter}{model}{scene.title}", style="bold"),
        Text("\n".join([headline(scene), *said, why_not_faster(scene)]) + "\n"),
        *remark_lines(scene),
        *step_tables(scene),
        device_table(scene),
        bubble_table(scene),
        kind_table(scene),
        *(stages_and_planners(plan, scene) if details and plan is not None else []),
    )
