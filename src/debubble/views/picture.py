"""PNG, SVG and PDF pictures of each device's compute, transfers and memory."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from debubble.errors import InputError
from debubble.formatting import size_words
from debubble.ir import Kind, Lane
from debubble.simulator import Cause
from debubble.views.palette import KIND_COLORS, KIND_WORDS, PHASE_COLOR, THEMES, Theme, ink_on, shade
from debubble.views.registry import views
from debubble.views.scene import Scene, planned_words, subject
from debubble.views.summary import present_causes, present_kinds
from debubble.views.terminal import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of a picture: inches, and font sizes in points."""

    width: float
    row: float
    """Height of a device's row, memory included."""
    head: float
    """Height of each scene's title and axis."""
    title: float
    text: float
    number: float
    """Font size of the micro-batch numbers in bars."""
    legend_columns: int


SIZES = {
    "slide": Size(width=14.0, row=0.62, head=0.95, title=11, text=9, number=7.5, legend_columns=9),
    "page": Size(width=7.0, row=0.42, head=0.75, title=8, text=7, number=5.5, legend_columns=6),
    "column": Size(width=3.4, row=0.36, head=0.7, title=7, text=6, number=4.5, legend_columns=3),
}
"""`page` is as wide as a two-column page, `column` as one of its columns."""

COMPUTE, TRANSFER, MEMORY = (0.04, 0.46), (0.52, 0.12), (0.66, 0.3)
"""(top, height) of a device's compute, of all its transfers and of its memory, as fractions of its row."""


def picture(scenes: Sequence[Scene], form: str, *, theme: str = "light", size: str = "slide") -> bytes:
    """Draw a picture file.

    Args:
        scenes: The scenes, drawn below each other on one time scale.
        form: `png`, `svg` or `pdf`.
        theme: `light` or `dark`.
        size: `slide`, `page` or `column`.

    Raises:
        InputError: If there is no such theme or size.
    """
    check_style(theme=theme, size=size)
    return encode_figure(figure(scenes, theme=THEMES[theme], size=SIZES[size]), form)


def check_style(*, theme: str, size: str) -> None:
    """Raise InputError if there is no such theme or size."""
    for kind, name, known in (("theme", theme, THEMES), ("size", size, SIZES)):
        if name not in known:
            raise InputError(f"There is no {kind} '{name}' of pictures; there are: {', '.join(known)}.")


for _form in ("png", "svg", "pdf"):
    views.add(_form, partial(picture, form=_form))


def figure(scenes: Sequence[Scene], *, theme: Theme = THEMES["light"], size: Size = SIZES["slide"]) -> Figure:
    """Draw scenes as a matplotlib figure."""
    from matplotlib.figure import Figure

    heights = [size.row * scene.devices for scene in scenes]
    legend = 0.2 + 0.16 * -(-len(_legend_entries(scenes, theme)) // size.legend_columns) * size.text / 8
    total = sum(heights) + size.head * len(scenes) + legend
    result = Figure(figsize=(size.width, total), facecolor=theme.paper, layout="constrained")
    panels = result.subplots(len(scenes), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    first, last = min(scene.extent[0] for scene in scenes), max(scene.extent[1] for scene in scenes)
    for scene, axes in zip(scenes, panels, strict=True):
        axes.set_xlim(first, last)
        _draw_scene(axes, scene, theme, size, inches_per_time=(size.width - 1.2) / (last - first))
    panels[-1].set_xlabel("seconds" if scenes[-1].seconds else "time", fontsize=size.text, color=theme.muted)
    result.legend(
        handles=_legend_entries(scenes, theme), loc="outside lower center", ncols=size.legend_columns,
        fontsize=size.text - 0.5, frameon=False, labelcolor=theme.ink, columnspacing=1.0, handlelength=1.0,
    )  # fmt: skip
    return result


def _draw_scene(axes: Axes, scene: Scene, theme: Theme, size: Size, *, inches_per_time: float) -> None:
    axes.set_facecolor(theme.paper)
    axes.set_title(
        f"{_title(scene, size)}\n", loc="left", fontsize=size.title, fontweight="bold", color=theme.ink, pad=2
    )
    words = headline(scene)
    if size.width < SIZES["page"].width:
        words = words.partition(",")[0].partition(" (")[0]
    elif size.width < SIZES["slide"].width:
        words = re.sub(r" \(.*?\)", "", words)
    axes.text(
        0, 1.0, words + "\n ", transform=axes.transAxes, fontsize=size.text, va="center", color=theme.muted
    )  # fmt: skip
    axes.set_ylim(scene.devices + 0.02, -0.02)
    middles = [device + COMPUTE[0] + COMPUTE[1] / 2 for device in range(scene.devices)]
    axes.set_yticks(middles, [str(device) for device in range(scene.devices)])
    axes.set_ylabel("device", fontsize=size.text, color=theme.muted)
    axes.tick_params(length=0, labelsize=size.text, colors=theme.muted, labelbottom=True)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.5)
    axes.set_axisbelow(True)
    for device in range(scene.devices):
        _draw_device(axes, scene, device, theme, size, inches_per_time)
        _draw_memory(axes, scene, device, theme, size)


def _title(scene: Scene, size: Size) -> str:
    """The scene's title; for a model's plan with model and cluster, shortened for narrow pictures."""
    plan = scene.plan
    if plan is None or plan.model is None:
        return scene.title
    narrow = size.width < SIZES["page"].width
    return f"{subject(plan)}: {plan.schedule.name if narrow else planned_words(plan)}"


def _draw_device(axes: Axes, scene: Scene, device: int, theme: Theme, size: Size, inches_per_time: float) -> None:
    """Draw a device's compute lane, and below it a thin line for each transfer lane."""
    compute = (device + COMPUTE[0], COMPUTE[1])
    for cause in Cause:
        idle = [(float(b.start), float(b.duration)) for b in scene.bubbles[device] if b.cause is cause]
        axes.broken_barh(idle, compute, color=theme.causes[cause], linewidth=0)
    schedule = scene.timeline.program.schedule
    chunks = schedule.placement.chunks
    lines = _transfer_lines(scene)
    bars: dict[tuple[str, Lane], list[tuple[float, float]]] = {}
    recompute: dict[str, list[tuple[float, float]]] = {}
    for o in scene.timeline.operations:
        if o.device == device and o.end > o.start:
            chunk = scene.chunk_of(o.op.stage)
            start, duration = float(o.start), float(o.duration)
            color = shade(KIND_COLORS[o.op.kind], chunk, chunks=chunks)
            bars.setdefault((color, o.lane), []).append((start, duration))
            if share := scene.recompute_share(o):
                span = (start, share * duration)
                recompute.setdefault(shade(KIND_COLORS[Kind.R], chunk, chunks=chunks), []).append(span)
            label = schedule.label(o.op.micro_batch)
            wide = duration * inches_per_time > (0.04 + 0.075 * len(label)) * size.number / 7.5
            if o.lane is Lane.COMPUTE and wide:
                where = (start + duration / 2, device + COMPUTE[0] + COMPUTE[1] / 2)
                ink = ink_on(color)
                axes.text(*where, label, ha="center", va="center", fontsize=size.number, color=ink, clip_on=True)
    for (color, lane), spans in bars.items():
        # Edges would cover bars that are hardly wider.
        wide = lane is Lane.COMPUTE and min(duration for _, duration in spans) * inches_per_time > 0.05
        top, height = lines.get(lane, COMPUTE)
        edge = 0.4 if wide else 0
        axes.broken_barh(spans, (device + top, height), facecolor=color, edgecolor=theme.paper, linewidth=edge)
    around = [(phase.start, phase.end - phase.start) for phase in scene.phases if phase.device == device]
    axes.broken_barh(around, (device + 0.2, 0.2), facecolor=PHASE_COLOR, linewidth=0)
    for color, spans in recompute.items():
        axes.broken_barh(spans, compute, facecolor=color, linewidth=0)


def _transfer_lines(scene: Scene) -> dict[Lane, tuple[float, float]]:
    """(top, height) of the line of each transfer lane, as fractions of the device's row."""
    used = {o.lane for o in scene.timeline.operations if o.end > o.start and o.lane is not Lane.COMPUTE}
    lanes = [lane for lane in Lane if lane in used]
    top, height = TRANSFER
    pitch = height / max(len(lanes), 1)
    return {lane: (top + index * pitch, 0.85 * pitch) for index, lane in enumerate(lanes)}


def _draw_memory(axes: Axes, scene: Scene, device: int, theme: Theme, size: Size) -> None:
    """Draw a device's memory below its lanes, with peak and limit on the right."""
    top, height = MEMORY
    floor, scale = device + top + height, height / (1.06 * scene.highest or 1)
    points = {float(time): float(level) for time, level in scene.memory[device]}
    points[float(scene.timeline.makespan)] = float(scene.memory[device][-1][1])
    levels = [floor - scale * level for level in points.values()]
    axes.fill_between(list(points), levels, floor, step="post", color=theme.memory, alpha=0.4, linewidth=0)
    peak, limit = scene.peak_memory[device], scene.limits[device]
    words = size_words(peak) if limit is None else f"{size_words(peak)}\nof {size_words(limit)}"
    axes.text(
        1.005, floor - height / 2 - 0.1, words, transform=axes.get_yaxis_transform(), fontsize=size.number, va="center",
        color=theme.muted,
    )  # fmt: skip
    if limit is not None and limit <= scene.highest:
        start, end = 0.0, float(scene.timeline.makespan)
        axes.plot([start, end], [floor - scale * float(limit)] * 2, color=theme.limit, linewidth=0.8, dashes=(5, 4))


def _legend_entries(scenes: Sequence[Scene], theme: Theme) -> list[object]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[object] = [
        Patch(facecolor=KIND_COLORS[kind], label=KIND_WORDS[kind]) for kind in present_kinds(scenes)
    ]
    entries += [
        Patch(facecolor=theme.causes[cause], edgecolor=theme.grid, linewidth=0.5, label=f"idle: {cause.value}")
        for cause in present_causes(scenes)
    ]
    if any(scene.phases for scene in scenes):
        entries.append(Patch(facecolor=PHASE_COLOR, label="around the program"))
    entries.append(Patch(facecolor=theme.memory, alpha=0.4, label="memory"))
    if any(limit is not None and limit <= scene.highest for scene in scenes for limit in scene.limits):
        entries.append(Line2D([], [], color=theme.limit, linewidth=0.8, dashes=(5, 4), label="limit"))
    return entries


def encode_figure(drawing: Figure, form: str) -> bytes:
    """Encode a figure; equal figures give equal bytes."""
    import matplotlib

    file = io.BytesIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "debubble", "pdf.fonttype": 42}
    with matplotlib.rc_context(settings):
        # A date would make files of equal figures differ.
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        drawing.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()
