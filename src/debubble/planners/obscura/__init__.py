"""Obscura: the search over recomputation and migration by its step model."""

from debubble.planners.obscura.planner import obscura

__all__ = ["obscura"]
