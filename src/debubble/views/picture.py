"""PNG and SVG pictures: a Gantt chart with the memory curves under it, one above the other per scene."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from debubble.formatting import size_words
from debubble.ir import Kind, Lane
from debubble.simulator import Cause
from debubble.views.palette import KIND_COLORS, KIND_WORDS, LIGHT, PHASE_COLOR, ink_on, shade
from debubble.views.registry import view
from debubble.views.scene import Scene
from debubble.views.summary import present_causes, present_kinds
from debubble.views.terminal import headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 14.0
"""Inches.  Everything else follows."""

_ROW = 0.34
"""Height of one device, inches."""

_MEMORY = 1.25
_HEAD = 0.95
"""Heights of the memory panel, and of a scene's title and axis, inches."""


@view("png")
def png(scenes: Sequence[Scene]) -> bytes:
    """A picture for slides and reports."""
    return _saved(figure(scenes), "png")


@view("svg")
def svg(scenes: Sequence[Scene]) -> bytes:
    """A vector picture, with text as text."""
    return _saved(figure(scenes), "svg")


def figure(scenes: Sequence[Scene]) -> Figure:
    """The picture as a matplotlib figure, to change or to embed."""
    from matplotlib.figure import Figure

    heights = [height for scene in scenes for height in (_ROW * scene.devices, _MEMORY)]
    total = sum(heights) + _HEAD * len(scenes) + 0.8
    result = Figure(figsize=(WIDTH, total), facecolor="white", layout="constrained")
    axes = result.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    first = min(scene.extent[0] for scene in scenes)
    last = max(scene.extent[1] for scene in scenes)
    for scene, gantt, memory in zip(scenes, axes[::2], axes[1::2], strict=True):
        gantt.set_xlim(first, last)
        _draw_gantt(gantt, scene, inches_per_time=(WIDTH - 1.2) / (last - first))
        _draw_memory(memory, scene)
    axes[-1].set_xlabel("seconds" if scenes[-1].seconds else "time")
    _legend(result, scenes)
    return result


def _draw_gantt(axes: Axes, scene: Scene, *, inches_per_time: float) -> None:
    axes.set_title(f"{scene.title}\n", loc="left", fontsize=11, fontweight="bold", pad=0)
    axes.text(0, 1.0, headline(scene) + "\n ", transform=axes.transAxes, fontsize=9, va="center", color="#4c5666")
    axes.set_ylim(scene.devices - 0.42, -0.58)
    axes.set_yticks(range(scene.devices), [str(device) for device in range(scene.devices)])
    axes.set_ylabel("device")
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)
    for device in range(scene.devices):
        _draw_device(axes, scene, device, inches_per_time)


def _draw_device(axes: Axes, scene: Scene, device: int, inches_per_time: float) -> None:
    """Compute above, all transfers in a thin line below."""
    for cause in Cause:
        idle = [(float(b.start), float(b.duration)) for b in scene.bubbles[device] if b.cause is cause]
        axes.broken_barh(idle, (device - 0.4, 0.66), color=LIGHT.causes[cause], linewidth=0)
    chunks = scene.timeline.program.schedule.placement.chunks
    bars: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    recompute: dict[str, list[tuple[float, float]]] = {}
    for o in scene.timeline.operations:
        if o.device == device and o.end > o.start:
            chunk = scene.chunk_of(o.op.stage)
            start, duration, computes = float(o.start), float(o.duration), o.lane is Lane.COMPUTE
            color = shade(KIND_COLORS[o.op.kind], chunk, chunks=chunks)
            bars.setdefault((color, computes), []).append((start, duration))
            if share := scene.recompute_share(o):
                part = (start, share * duration)
                recompute.setdefault(shade(KIND_COLORS[Kind.R], chunk, chunks=chunks), []).append(part)
            label = str(o.op.micro_batch)
            if computes and duration * inches_per_time > 0.04 + 0.075 * len(label):
                ink = ink_on(color)
                where = (start + duration / 2, device - 0.06)
                axes.text(*where, label, ha="center", va="center", fontsize=7.5, color=ink, clip_on=True)
    for (color, computes), spans in bars.items():
        height = (device - 0.4, 0.66) if computes else (device + 0.3, 0.13)
        # Bars that are hardly wider than their edges would drown in white.
        wide = computes and min(duration for _, duration in spans) * inches_per_time > 0.05
        axes.broken_barh(spans, height, facecolor=color, edgecolor="white", linewidth=0.4 if wide else 0)
    around = [(phase.start, phase.end - phase.start) for phase in scene.phases if phase.device == device]
    axes.broken_barh(around, (device - 0.2, 0.26), facecolor=PHASE_COLOR, linewidth=0)
    for color, spans in recompute.items():
        axes.broken_barh(spans, (device - 0.4, 0.66), facecolor=color, linewidth=0)


def _draw_memory(axes: Axes, scene: Scene) -> None:
    """One step curve per device, from dark (first) to light (last), and the limits."""
    most = max(float(peak) for peak in scene.peak_memory)
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20) if most >= 2**20 else ("", 1)
    for device, curve in enumerate(scene.memory):
        points = dict((float(time), float(level) / scale) for time, level in curve)
        points[float(scene.timeline.makespan)] = float(curve[-1][1]) / scale
        color = shade("#2b5c8f", device, chunks=max(scene.devices, 2))
        axes.step(list(points), list(points.values()), where="post", color=color, linewidth=1)
    limits = sorted({float(limit) for limit in scene.limits if limit is not None})
    for limit in limits:
        axes.axhline(limit / scale, color=LIGHT.limit, linewidth=1, linestyle=(0, (5, 4)))
    if limits and limits[-1] > scene.highest:
        words = f"limit {size_words(limits[-1])}"
        axes.text(0.995, 0.96, words, transform=axes.transAxes, ha="right", va="top", color=LIGHT.limit, fontsize=8)
    axes.set_ylim(0, 1.12 * scene.highest / scale or 1)
    axes.set_ylabel(f"memory{f' ({unit})' if unit else ''}", fontsize=9)
    axes.tick_params(labelbottom=True, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#eef0f4")


def _legend(result: Figure, scenes: Sequence[Scene]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KIND_COLORS[kind], label=KIND_WORDS[kind]) for kind in present_kinds(scenes)]
    handles += [
        Patch(facecolor=LIGHT.causes[cause], edgecolor="#c3cad6", linewidth=0.5, label=f"idle: {cause.value}")
        for cause in present_causes(scenes)
    ]
    if any(scene.phases for scene in scenes):
        handles.append(Patch(facecolor=PHASE_COLOR, label="around the program"))
    columns = len(handles) if len(handles) <= 9 else (len(handles) + 1) // 2
    result.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _saved(drawn: Figure, form: str) -> bytes:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "debubble"}):
        # Without a date the same plan gives the same file.
        metadata = {"Date": None} if form == "svg" else {}
        drawn.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()
