"""Templates of the pages."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from debubble.views.palette import THEMES


def render(template: str, **entries: Any) -> bytes:
    """A page with these entries, in the colours of both themes."""
    environment = Environment(
        loader=PackageLoader("debubble.views"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(themes=THEMES, **entries).encode()
