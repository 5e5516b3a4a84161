"""The terminal's view of scenes: each with all its figures, and two beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from debubble.views.figure_table import side_by_side
from debubble.views.plan_table import model_lines, step_tables
from debubble.views.scene import Scene, subject
from debubble.views.summary import bound_words, why_not_faster
from debubble.views.terminal import bubble_table, device_table, headline, kind_table, remark_lines, rich_table


def render_scenes(scenes: Sequence[Scene]) -> RenderableType:
    """Everything about predicted or measured timelines; the comparison of two comes first."""
    compared = side_by_side(scenes)
    shown = [scene for scene in scenes if scene.plan is not None]
    letters = [f"{letter}: " for letter in "AB"] if len(shown) == 2 else [""] * len(scenes)
    return Group(
        *([] if compared is None else [rich_table(compared)]),
        *(_render_scene(scene, letter) for scene, letter in zip(scenes, letters, strict=True)),
    )


def _render_scene(scene: Scene, letter: str) -> RenderableType:
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
    )
