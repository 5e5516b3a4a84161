"""Timeline or trace -> terminal table, HTML, PNG, SVG, Perfetto JSON; plan against measured."""

from debubble.registry import index_by_name
from debubble.views.registry import View, view, views
from debubble.views.scene import Scene

__all__ = ["Scene", "View", "view", "views"]

index_by_name(__name__)
