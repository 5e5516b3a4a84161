"""The report: one self-contained page that works offline.

`report.py` says what the page says of each scene, `timeline.py` gives the figures that the scripts of the templates
draw on canvases, one for each scene on one time scale.  `infeasible.py` is the report where nothing fits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from debubble.views.html.report import section
from debubble.views.html.templates import render
from debubble.views.html.timeline import figures
from debubble.views.palette import KIND_COLORS, KIND_WORDS, PART_COLORS, PHASE_COLOR
from debubble.views.registry import view
from debubble.views.scene import Scene
from debubble.views.scene_table import letters, side_by_side
from debubble.views.summary import present_causes, present_kinds


@view("html")
def html(scenes: Sequence[Scene]) -> bytes:
    """Write the report: the answer in words, the plan, its memory and its timeline, to open in any browser."""
    data = figures(scenes)
    return render(
        "page.html",
        title=" · ".join(dict.fromkeys(scene.title for scene in scenes)),
        data=_script_json(data),
        sections=[section(scene, letter) for scene, letter in zip(scenes, letters(scenes), strict=True)],
        compared=side_by_side(scenes),
        parts=[(part, PART_COLORS[part]) for part in dict.fromkeys(p for s in data["scenes"] for p in s["parts"])],
        kinds=[(KIND_WORDS[k], KIND_COLORS[k]) for k in present_kinds(scenes)],
        causes=[cause.value for cause in present_causes(scenes)],
        around=PHASE_COLOR if any(scene.phases for scene in scenes) else None,
        differs=data["differs"],
    )


def _script_json(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element that it stands in."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
