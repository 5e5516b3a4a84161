"""The HTML report: one self-contained page that works offline.

`report.py` writes the texts and tables of each scene.  `timeline.py` writes the data that the templates' scripts draw,
one canvas per scene on a common time scale.  `infeasible.py` is the page for a job of which nothing fits.
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
    """Write the report: the answer in words, the plan, its memory and its timeline, for any browser."""
    data = figures(scenes)
    return render(
        "page.html",
        title=" · ".join(dict.fromkeys(scene.title for scene in scenes)),
        data=_script_json(data),
        sections=[section(scene, letter) for scene, letter in zip(scenes, letters(scenes), strict=True)],
        compared=side_by_side(scenes),
        parts=[(name, PART_COLORS[name]) for name in dict.fromkeys(p for s in data["scenes"] for p in s["parts"])],
        kinds=[(KIND_WORDS[k], KIND_COLORS[k]) for k in present_kinds(scenes)],
        causes=[cause.value for cause in present_causes(scenes)],
        around=PHASE_COLOR if any(scene.phases for scene in scenes) else None,
        differs=data["differs"],
    )


def _script_json(data: dict[str, Any]) -> Markup:
    """Encode as JSON that cannot close the script element around it."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
