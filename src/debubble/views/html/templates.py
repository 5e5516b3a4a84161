"""Templates of the pages."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from debubble.views.palette import THEMES


def without_breaks(text: str) -> Markup:
    """The text, with options of the command line that no line breaks."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r'<span class="option">\g<0></span>', str(escape(text))))


def render(template: str, **entries: Any) -> bytes:
    """A page with these entries, in the colours of both themes."""
    environment = Environment(
        loader=PackageLoader("debubble.views"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["unbroken"] = without_breaks
    return environment.get_template(template).render(themes=THEMES, **entries).encode()
