"""The browser workbench: searches run as `debubble plan` processes, and schedules are simulated at once."""

from debubble.serve.server import Workbench

__all__ = ["Workbench"]
