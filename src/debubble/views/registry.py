"""The registry of views: functions, decorated with `@view`, that turn scenes into a file's content."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from debubble.registry import Registry
from debubble.views.scene import Scene

View = Callable[[Sequence[Scene]], bytes]
"""Draws scenes below each other on one time scale and returns the file's content."""

views: Registry[View] = Registry("debubble.views", kind="view")


def view(name: str) -> Callable[[View], View]:
    """Register a view under its name, which `debubble show --view NAME=FILE` takes."""

    def register(draw: View) -> View:
        return views.add(name, draw)

    return register
