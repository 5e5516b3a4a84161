"""The interactive timeline: one self-contained file that works offline.

The figures are put into the page as JSON; `templates/timeline.js` draws them on one canvas per scene.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from debubble.formatting import percent, size_words
from debubble.ir import Kind, Lane, Number
from debubble.simulator import Cause
from debubble.views.palette import CAUSE_COLORS, KIND_COLORS, KIND_WORDS, PHASE_COLOR, shade
from debubble.views.registry import view
from debubble.views.scene import Curve, Scene
from debubble.views.summary import (
    device_summaries,
    occurring,
    present_causes,
    present_kinds,
    stage_summaries,
    why_not_faster,
)
from debubble.views.terminal import headline

_KINDS = list(Kind)
_CAUSES = list(Cause)


@view("html")
def html(scenes: Sequence[Scene]) -> bytes:
    """Open it in any browser: compute, transfers and memory per device, with hover, zoom and pan."""
    environment = Environment(
        loader=PackageLoader("debubble.views"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("timeline.html").render(
        title=" · ".join(scene.title for scene in scenes),
        data=_embedded(_data(scenes)),
        sections=[_section(scene) for scene in scenes],
        kinds=[(KIND_WORDS[k], KIND_COLORS[k]) for k in present_kinds(scenes)],
        causes=[(c.value, CAUSE_COLORS[c]) for c in present_causes(scenes)],
        around=PHASE_COLOR if any(scene.phases for scene in scenes) else None,
    )
    return page.encode()


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element that it stands in."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _section(scene: Scene) -> dict[str, Any]:
    """The headline and tables around a scene's canvas."""
    return {
        "title": scene.title,
        "headline": headline(scene),
        "why": why_not_faster(scene),
        "remarks": scene.remarks,
        "tables": [_device_table(scene), _stage_table(scene)],
    }


def _device_table(scene: Scene) -> dict[str, Any]:
    devices = device_summaries(scene)
    makespan = scene.timeline.makespan
    causes = occurring(devices, makespan)
    rows = [
        [
            str(d.device),
            percent(d.busy, makespan),
            percent(d.recompute, makespan),
            *(percent(d.idle[c], makespan) for c in causes),
            percent(d.forward_bubbles, makespan),
            percent(d.backward_bubbles, makespan),
            size_words(d.peak_memory),
            size_words(d.memory_limit),
        ]
        for d in devices
    ]
    bubbles = ["forward bubbles", "backward bubbles"]
    columns = ["device", "busy", "recompute", *(c.value for c in causes), *bubbles, "peak memory", "limit"]
    return {"title": "Share of the step, per device", "columns": columns, "rows": rows}


def _stage_table(scene: Scene) -> dict[str, Any]:
    makespan = scene.timeline.makespan
    stages = stage_summaries(scene)
    causes = occurring(stages, makespan)
    rows = [
        [
            str(s.stage),
            str(s.device),
            str(s.chunk),
            *(percent(t, makespan) for t in (s.compute, s.recompute, *(s.idle[c] for c in causes), s.sending)),
        ]
        for s in stages
    ]
    columns = ["stage", "device", "chunk", "compute", "recompute", *(c.value for c in causes), "sending"]
    return {"title": "Share of the step, per stage", "columns": columns, "rows": rows}


def _data(scenes: Sequence[Scene]) -> dict[str, Any]:
    chunks = max(scene.timeline.program.schedule.placement.chunks for scene in scenes)
    return {
        "kinds": [
            {
                "letter": kind.value,
                "words": KIND_WORDS[kind],
                "colors": [shade(KIND_COLORS[kind], chunk, chunks=chunks) for chunk in range(chunks)],
            }
            for kind in _KINDS
        ],
        "causes": [{"words": cause.value, "color": CAUSE_COLORS[cause]} for cause in _CAUSES],
        "around": PHASE_COLOR,
        "first": _short(min(scene.extent[0] for scene in scenes)),
        "last": _short(max(scene.extent[1] for scene in scenes)),
        "scenes": [_scene(scene) for scene in scenes],
    }


def _scene(scene: Scene) -> dict[str, Any]:
    operations: list[dict[Lane, list[list[float]]]] = [{} for _ in range(scene.devices)]
    critical = {operation.op for operation in scene.critical_path}
    for o in sorted(scene.timeline.operations, key=lambda o: (o.start, o.end)):
        if o.end > o.start:
            kind, stage, j = o.op
            bar: list[float] = [_short(o.start), _short(o.end), _KINDS.index(kind), stage, j, scene.chunk_of(stage)]
            operations[o.device].setdefault(o.lane, []).append(
                [*bar, int(o.op in critical), _short(scene.recompute_share(o))]
            )
    return {
        "title": scene.title.partition(":")[0].lower(),
        "seconds": scene.seconds,
        "makespan": _short(scene.timeline.makespan),
        "highest": scene.highest,
        "devices": [
            {
                "lanes": [[lane.value, operations[device][lane]] for lane in Lane if lane in operations[device]],
                "bubbles": [
                    [_short(b.start), _short(b.end), _CAUSES.index(b.cause), b.awaited.name if b.awaited else ""]
                    for b in scene.bubbles[device]
                ],
                "around": [[_short(p.start), _short(p.end), p.what] for p in scene.phases if p.device == device],
                "memory": [[time, level] for time, level in _settled(scene.memory[device]).items()],
                "limit": None if scene.limits[device] is None else float(scene.limits[device] or 0),
            }
            for device in range(scene.devices)
        ],
    }


def _settled(curve: Curve) -> dict[float, float]:
    """Time -> bytes, once everything of that instant has happened."""
    return {_short(time): _short(level) for time, level in curve}


def _short(number: Number) -> float:
    """Nine digits: less than a pixel at any zoom, and half the file."""
    return float(f"{float(number):.9g}")
