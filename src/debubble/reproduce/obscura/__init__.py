"""Obscura's tables and figures beside ours."""

from debubble.reproduce.obscura.report import obscura

__all__ = [
    "obscura",
]
