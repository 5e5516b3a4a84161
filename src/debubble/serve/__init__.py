"""The workbench in the browser: searches as processes of `debubble plan`, and instant simulations of one schedule."""

from debubble.serve.server import Workbench

__all__ = ["Workbench"]
