"""The documentation site: `make docs` builds it into build/docs and treats every warning as an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

project = "debubble"
author = "The debubble authors"
version = release = installed("debubble")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4  # `page.md#a-heading` links, as on GitHub

html_theme = "furo"
html_title = "debubble"
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"


def interactive_schedules(app: Any, doctree: Any) -> None:
    """Replace each schedule's picture by the interactive timeline."""
    for image in list(doctree.findall(nodes.image)):
        name = Path(image["uri"]).stem.removeprefix("schedule-")
        if app.env.docname == "schedules" and "schedule-" in image["uri"]:
            frame = (
                f'<iframe src="gallery/{name}.html" title="{name}" loading="lazy" width="100%" height="640"></iframe>'
            )
            image.parent.replace(image, nodes.raw("", frame, format="html"))


def write_gallery(app: Any, error: Exception | None) -> None:
    """Write a page per schedule."""
    from schedule_page import example

    import debubble as db
    from debubble.views import views

    if error is None and app.builder.name == "html":
        folder = Path(app.outdir) / "gallery"
        folder.mkdir(exist_ok=True)
        for name in db.schedules:
            (folder / f"{name}.html").write_bytes(views["html"]([example(name)]))


def setup(app: Any) -> None:
    """Connect the site's hooks."""
    app.connect("doctree-read", interactive_schedules)
    app.connect("build-finished", write_gallery)
