"""Views of plans and traces: terminal tables, HTML, PNG, SVG, PDF, Perfetto JSON; plan against measurement."""

from debubble.registry import index_by_name
from debubble.views.registry import View, view, views
from debubble.views.scene import Scene

__all__ = ["Scene", "View", "view", "views"]

index_by_name(__name__)
