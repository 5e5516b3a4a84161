"""`debubble show`: plans as tables and pictures, compared with a trace if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli.app import app
from debubble.cli.names import Size, Theme
from debubble.cli.output import Json, check_pictures, console, log, print_answer, with_delayed_message
from debubble.ir import InputError
from debubble.plans import Plan

if TYPE_CHECKING:
    from debubble.views import Scene


@app.command(rich_help_panel="Look")
@with_delayed_message("Drawing")
def show(
    plans: Annotated[list[Path], typer.Argument(help="A plan file, or two to compare.", metavar="PLAN [OTHER]")],
    trace: Annotated[Path | None, typer.Option(help="A trace to draw under the plan, on the same scale.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report: one interactive page, one file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a vector picture.")] = None,
    pdf: Annotated[Path | None, typer.Option(help="Write a vector picture for papers.")] = None,
    theme: Theme = "light",
    size: Size = "slide",
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    view: Annotated[
        list[str] | None,
        typer.Option("--view", metavar="NAME=FILE", help="Write any view by its name, such as one of another package."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Add tables of devices, stages and planners.")] = False,
    json: Json = False,
) -> None:
    """Show what a plan does when, its memory, and what slows it."""
    from debubble.files import check_writable, write_whole
    from debubble.ir import Trace
    from debubble.views import Scene, views
    from debubble.views.picture import picture
    from debubble.views.scene_table import render_scenes

    if len(plans) > 2 or (len(plans) == 2 and trace is not None):
        raise InputError("Show one plan, with --trace if it was measured, or two plans.")
    check_writable(perfetto)
    check_pictures(html=html, png=png, svg=svg, pdf=pdf)
    loaded = [Plan.load(plan) for plan in plans]
    scenes: Sequence[Scene] = [
        replace(Scene.predicted(plan, limited=False), file=str(path)) for path, plan in zip(plans, loaded, strict=True)
    ]
    if trace is not None:
        scenes = Scene.pair(loaded[0], Trace.load(trace))
    files = [("html", html), ("perfetto", perfetto), *map(_named_file, view or ())]
    pictures = [("png", png), ("svg", svg), ("pdf", pdf)]
    contents = {path: views[name](scenes) for name, path in files if path is not None}
    contents |= {path: picture(scenes, form, theme=theme, size=size) for form, path in pictures if path is not None}
    for path, content in contents.items():
        write_whole(path, content)
        log().print(f"Wrote {path}.")
    if json:
        second = [_figures(scene) for scene in scenes[1:]]
        other = {"other": second[0]} if len(plans) == 2 else {}
        print_answer(**_figures(scenes[0]), measured=None if trace is None else second[0], **other)
    else:
        console().print(render_scenes(scenes, details=details, width=console().width))


def _figures(scene: Scene) -> dict[str, Any]:
    """The JSON figures of a scene and of its plan."""
    from debubble.cli.plan_answer import explanation_dict, plan_dict
    from debubble.views.summary import as_dict

    plan = {} if scene.plan is None else {"plan": plan_dict(scene.plan, scene)}
    return {**as_dict(scene), **explanation_dict(scene), **plan}


def _named_file(text: str) -> tuple[str, Path]:
    """Parse a --view option into name and file."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise InputError(f"--view {text}: write NAME=FILE.")
    return name, Path(file)
