"""Obscura's figures, tables and claims beside ours."""

from debubble.reproduce.obscura import paper

__all__ = ["paper"]
