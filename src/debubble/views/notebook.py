"""Notebook output: a small picture of a plan, timeline or schedule, and the full report."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from pathlib import Path

from debubble.argument_types import with_checked_types
from debubble.errors import InputError
from debubble.files import write_whole
from debubble.formatting import size_words
from debubble.ir import Kind, Lane, Schedule, StageCosts
from debubble.planners.sweep import Sweep
from debubble.plans import Plan
from debubble.simulator import Timeline, simulate
from debubble.views.html import html
from debubble.views.html.sweep import sweep_page
from debubble.views.palette import KIND_COLORS, KIND_WORDS, LIGHT, ink_on, shade
from debubble.views.scene import Scene
from debubble.views.summary import bound_words, pace_words, present_causes, present_kinds
from debubble.views.terminal import headline

WIDTH, PHONE_WIDTH, ROW = 760, 212, 20
"""Usual width of the picture without its margins, that on a phone, and height of a device's row, in pixels."""
LEFT_MARGIN, RIGHT_MARGIN = 60, 80
"""Margins for the devices' names and peak memory, in pixels."""
PHONE_SCREEN = 700
"""Width of a screen, in pixels, up to which labels that do not fit on a phone are left out, as on all pages."""

MAX_BARS = 4000
"""Number of operations that the picture draws, the earliest first; more make a cell slow."""


@dataclass(frozen=True)
class Report:
    """An HTML page that notebooks show and `save` writes."""

    content: bytes

    def save(self, path: str | Path) -> None:
        """Write the page atomically."""
        write_whole(Path(path), self.content)

    def __repr__(self) -> str:
        return f"Report({len(self.content):,} bytes; save it as an HTML file, or show it in a notebook)"

    def _repr_html_(self) -> str:
        page = base64.b64encode(self.content).decode()
        return f'<iframe src="data:text/html;base64,{page}" width="100%" height="900" style="border: 0"></iframe>'


@with_checked_types()
def show(*sources: Plan | Timeline | Sweep) -> Report:
    """Draw the report of a plan or a timeline, of two next to each other, or of a sweep.

    Args:
        sources: What to show.

    Raises:
        InputError: If there is nothing to show, or a sweep is not alone.

    Returns:
        The page, which a notebook shows.

    Example:
        >>> plan = db.plan(db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), planner="dapple")
        >>> b"Does it fit?" in db.show(plan).content
        True
    """
    if not sources:
        raise InputError("There is nothing to show: give a plan, a timeline or a sweep.")
    if len(sources) > 1 and any(isinstance(source, Sweep) for source in sources):
        raise InputError("A sweep is shown alone: give it without plans and timelines.")
    if len(sources) == 1 and isinstance(sources[0], Sweep):
        pictures = ["" if point.plan is None else inline_html(point.plan) for point in sources[0].points]
        return Report(sweep_page(sources[0], pictures))
    return Report(html([_scene(source) for source in sources if not isinstance(source, Sweep)]))


def _scene(source: Plan | Timeline) -> Scene:
    if isinstance(source, Plan):
        return Scene.predicted(source)
    return Scene(source, title=f"Simulated: {source.program.schedule.name}")


@with_checked_types()
def inline_html(source: Plan | Timeline | Schedule) -> str:
    """A headline and a small picture, for the output of a notebook's cell.

    Args:
        source: What to draw; a schedule alone is drawn with all times 1.
    """
    if isinstance(source, Schedule):
        timeline = simulate(source, StageCosts.of(stages=source.stages, offload=1))
        scene = Scene(timeline, title=f"{source.name}, drawn with all times 1")
    else:
        scene = _scene(source)
    words = [f"{headline(scene)}."]
    if isinstance(source, Plan):
        words += [] if scene.why is None else [f"{pace_words(scene.why)}.", scene.why.binding]
        words.append(bound_words(source, scene))
    lines = "".join(f"<p style='margin: 2px 0'>{escape(line)}</p>" for line in [*words, *scene.remarks])
    return f"<div><b>{escape(scene.title)}</b>{lines}{_picture(scene)}</div>"


def _picture(scene: Scene) -> str:
    """Draw the compute lanes as SVG of the cell's width, with idle time by cause and each device's peak memory."""
    first, last = scene.extent
    chunks = scene.timeline.program.schedule.placement.chunks
    scale = WIDTH / (last - first)
    shapes, schedule = [], scene.timeline.program.schedule
    for device in range(scene.devices):
        y = device * ROW
        shapes.append(f'<text x="-{LEFT_MARGIN}" y="{y + 14}">device {device}</text>')
        shapes.append(f'<text x="100%" dx="6" y="{y + 14}">{size_words(scene.peak_memory[device])}</text>')
        for bubble in scene.bubbles[device]:
            words = f"idle: {bubble.cause.value}"
            x, wide = (float(bubble.start) - first) * scale, float(bubble.duration) * scale
            shapes.append(_bar(x, y, wide, LIGHT.causes[bubble.cause], words))
    computed = [o for o in scene.timeline.operations if o.lane is Lane.COMPUTE and o.duration]
    drawn = sorted(computed, key=lambda o: o.start)[:MAX_BARS]
    for o in drawn:
        color = shade(KIND_COLORS[o.op.kind], scene.chunk_of(o.op.stage), chunks=chunks)
        x, wide, y = (float(o.start) - first) * scale, float(o.duration) * scale, o.device * ROW
        shapes.append(_bar(x, y, wide, color, o.name))
        label = schedule.label(o.op.micro_batch)
        needed = 5 + 6.5 * len(label)
        if wide > needed:
            only_wide = "" if wide * PHONE_WIDTH / WIDTH > needed else ' class="wide-only"'
            shapes.append(
                f'<text x="{_percent(x + wide / 2)}" y="{y + 13}" text-anchor="middle"'
                f' fill="{ink_on(color)}"{only_wide}>{label}</text>'
            )
    left_out = len(computed) - len(drawn)
    note = f"<p style='margin: 2px 0'>{left_out:,} later operations are left out: show() has all.</p>" * bool(left_out)
    return (
        f"<style>@media (max-width: {PHONE_SCREEN}px) {{ .wide-only {{ display: none; }} }}</style>"
        f'<div style="padding: 0 {RIGHT_MARGIN}px 0 {LEFT_MARGIN}px; max-width: {2 * WIDTH}px">'
        f'<svg width="100%" height="{scene.devices * ROW}" style="display: block; overflow: visible"'
        ' font-family="sans-serif" font-size="11" fill="currentColor" role="img"'
        f' aria-label="{escape(headline(scene))}">{"".join(shapes)}</svg></div>{_legend(scene)}{note}'
    )


def _legend(scene: Scene) -> str:
    """The colors of the kinds of operations and of the causes of idle time."""
    drawn_kinds = [kind for kind in present_kinds([scene]) if kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.S)]
    entries = [(KIND_COLORS[kind], KIND_WORDS[kind]) for kind in drawn_kinds]
    entries += [(LIGHT.causes[cause], f"idle: {cause.value}") for cause in present_causes([scene])]
    square = "display: inline-block; width: 10px; height: 10px; margin-right: 4px; background:"
    words = "".join(f'<span><i style="{square} {color}"></i>{words}</span>' for color, words in entries)
    style = f"display: flex; flex-wrap: wrap; gap: 2px 14px; padding-left: {LEFT_MARGIN}px; font: 11px sans-serif"
    return f'<div style="{style}">{words}</div>'


def _bar(x: float, y: float, width: float, color: str, words: str) -> str:
    wide = max(width - 0.8 * (width > 3), 0.3)
    place = f'x="{_percent(x)}" y="{y + 1}" width="{_percent(wide)}" height="{ROW - 3}"'
    return f'<rect {place} fill="{color}"><title>{words}</title></rect>'


def _percent(x: float) -> str:
    """A length of the picture at its usual width as a share of its width."""
    return f"{100 * x / WIDTH:.2f}%"
