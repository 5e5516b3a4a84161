"""Rendering of the pages' templates."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from debubble.views.palette import THEMES


def without_breaks(text: str) -> Markup:
    """The text as HTML that never breaks a line inside a command-line option."""
    options = re.sub(r"--[a-z][a-z-]*", r'<span class="option">\g<0></span>', str(escape(with_unbroken_units(text))))
    return Markup(options)


UNITS = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|B|s|ms|µs|days|hours|tokens|TFLOP)\b)")
"""The space between a number and its unit."""


def with_unbroken_units(value: object) -> object:
    """Bind numbers to their units in plain text; HTML and other values are returned unchanged."""
    return UNITS.sub("\N{NO-BREAK SPACE}", value) if isinstance(value, str) and not isinstance(value, Markup) else value


def render(template: str, **entries: Any) -> bytes:
    """Render a template with these entries and the colors of both themes."""
    environment = Environment(
        loader=PackageLoader("debubble.views"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=with_unbroken_units,
    )  # fmt: skip
    environment.filters["unbroken"] = without_breaks
    return environment.get_template(template).render(themes=THEMES, **entries).encode()
