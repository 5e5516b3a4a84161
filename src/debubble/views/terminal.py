"""Terminal tables of a scene, per device, stage and kind of operation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from debubble.costs.devices.parallel_layout import Layout
from debubble.formatting import percent, size_words, time_words
from debubble.views.palette import KIND_COLORS, KIND_WORDS
from debubble.views.rows import Rows
from debubble.views.scene import Scene
from debubble.views.summary import DeviceFigures, device_figures, kind_figures, notable_causes, stage_figures


def headline(scene: Scene) -> str:
    """Step time, idle share and peak memory in one line."""
    parts = _parts(scene)
    return (
        f"{time_words(scene.step_time, seconds=scene.seconds)} per step{f' ({parts})' if parts else ''},"
        f" {_shares(scene)}, peak memory {size_words(max(scene.peak_memory))}"
    )


def headline_parts(scene: Scene) -> str:
    """The parts of the step, and its idle and ideal shares."""
    return ", ".join(filter(None, [_parts(scene), _shares(scene)]))


def _shares(scene: Scene) -> str:
    timeline = scene.timeline
    return f"{100 * timeline.bubble_fraction:.1f}% idle, {100 * timeline.ideal_fraction:.1f}% of the ideal"


def _parts(scene: Scene) -> str:
    """The times of the pipeline and of the rest of the step; empty if there is no rest."""
    around = scene.step_time - scene.pipeline_time
    if scene.step_time == scene.timeline.makespan:
        return ""
    parts = [f"the pipeline {time_words(scene.timeline.makespan, seconds=scene.seconds)}"]
    if scene.post_validation:
        parts.append(f"its longest span {time_words(scene.timeline.span, seconds=scene.seconds)}")
    if around:
        label = "before and after it" if scene.phases else "gradients and optimizer after it"
        parts.append(f"{label} {time_words(around, seconds=scene.seconds)}")
    return ", ".join(parts)


def remark_lines(scene: Scene) -> list[Text]:
    """The remarks as yellow text, a line each; empty without remarks."""
    return [Text("\n".join(scene.remarks) + "\n", style="yellow")] if scene.remarks else []


def device_table(scene: Scene) -> Table:
    """A table of what each device does in the pipeline's time, and its peak memory."""
    devices = device_figures(scene)
    makespan = scene.timeline.makespan
    causes = notable_causes(devices, makespan)
    recomputing = any(d.recompute for d in devices)
    limits = {size_words(d.memory_limit) for d in devices if d.memory_limit is not None}
    title = "Share of the pipeline's time, per device" + (f"; memory limit {limits.pop()}" if len(limits) == 1 else "")
    columns = ["device", "busy", *(["recompute"] if recomputing else []), *causes, "peak"]
    table, digits = _share_table(title, columns)
    for d, name in zip(devices, _device_names(scene), strict=True):
        table.add_row(
            name,
            percent(d.busy, makespan, digits=digits),
            *([percent(d.recompute, makespan, digits=digits)] if recomputing else []),
            *(percent(d.bubbles[cause], makespan, digits=digits) if d.bubbles[cause] else "" for cause in causes),
            _peak(d, share=len(columns) <= 8),
        )
    return table


def _device_names(scene: Scene) -> list[str]:
    """The devices' numbers; in mixed clusters with the slowest device type of each."""
    numbers = [str(d) for d in range(scene.devices)]
    if scene.why is None or scene.why.cluster.is_homogeneous:
        return numbers
    layout = Layout.from_options(scene.why.cluster, scene.why.plan.options, scene.devices)
    return [f"{number} {type_.name}" for number, type_ in zip(numbers, layout.slowest_ranks, strict=True)]


def bubble_table(scene: Scene) -> Table:
    """A table of each device's idle time: Obscura's forward bubbles, its backward bubbles, and the rest."""
    columns = ("device", "forward bubbles", "backward bubbles", "before and after")
    table = titled_table("Idle share of the pipeline's time, per device", columns)
    for d in device_figures(scene):
        outside = sum(d.bubbles.values()) - d.forward_bubbles - d.backward_bubbles
        times = (d.forward_bubbles, d.backward_bubbles, outside)
        table.add_row(str(d.device), *(percent(time, scene.timeline.makespan) for time in times))
    return table


def stage_table(scene: Scene) -> Table:
    """A table of each stage's share of the pipeline's time; the stages of a device sum to all of it."""
    stages = stage_figures(scene)
    makespan = scene.timeline.makespan
    causes = notable_causes(stages, makespan)
    columns = ["stage", "device", "compute", "recompute", *causes]
    table, digits = _share_table("Share of the pipeline's time, per stage", columns)
    for s in stages:
        times = (s.compute, s.recompute, *(s.bubbles[c] for c in causes))
        table.add_row(str(s.stage), str(s.device), *(percent(t, makespan, digits=digits) if t else "" for t in times))
    return table


def _share_table(title: str, columns: Sequence[str]) -> tuple[Table, int]:
    """A table whose headers fit into 80 characters, and the number of decimals that fit its shares."""
    words = {} if len(columns) <= 7 else _TWO_LINES if len(columns) <= 9 else _TWO_LINES | _SHORT_HEADERS
    table = titled_table(title, [words.get(column, column) for column in columns], no_wrap=True)
    return table, 1 if len(columns) <= 9 else 0


_TWO_LINES = {
    "recompute": "re-\ncompute", "warm-up": "warm-\nup", "cool-down": "cool-\ndown", "dependency": "depend-\nency",
    "imbalance": "imbal-\nance", "transfer": "trans-\nfer", "overhead": "over-\nhead",
    "optimizer on the host": "optim.\non host",
}  # fmt: skip
"""Two-line headers of tables with more than seven columns, which fit them into 80 characters."""

_SHORT_HEADERS = {"device": "dev.", "recompute": "re-\ncomp.", "optimizer on the host": "host\noptim."}
"""Shorter headers of tables with more than nine columns."""


def kind_table(scene: Scene) -> Table:
    """A table of the number and time of operations of each kind."""
    table = titled_table("Operations", ("operation", "count", "mean", "total"), texts=("operation",))
    for kind, k in kind_figures(scene).items():
        name = Text.assemble(("■ ", KIND_COLORS[kind]), KIND_WORDS[kind])
        words = (time_words(t, seconds=scene.seconds) for t in (k.mean, k.total))
        table.add_row(name, str(k.count), *words)
    return table


def titled_table(
    title: str, columns: Iterable[str], *, texts: Collection[str] = (), no_wrap: bool | Collection[str] = False
) -> Table:
    """An empty table in the common style; columns hold numbers except `texts`.

    `no_wrap` lists the columns that are not wrapped; True: all.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
    for column in columns:
        keep = no_wrap if isinstance(no_wrap, bool) else column in no_wrap
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=keep)
    return table


def rich_table(rows: Rows) -> Table:
    """The terminal's table of these rows."""
    table = titled_table(rows.title, rows.columns, texts=rows.texts, no_wrap=rows.no_wrap)
    for row in rows.rows:
        table.add_row(*row)
    if rows.caption:
        table.caption, table.caption_justify = rows.caption, "left"
    return table


def _peak(device: DeviceFigures, *, share: bool) -> Text:
    """The peak, colored by its share of the limit, and that share if asked for."""
    limit = device.memory_limit
    words = size_words(device.peak_memory)
    if not limit:
        return Text(words)
    used = float(device.peak_memory / limit)
    style = "red" if used > 1 else "yellow" if used > 0.95 else "green"
    return Text(f"{words} ({100 * used:.0f}%)" if share else words, style=style)
