"""Obscura: recomputation in bubbles, the strawman that it starts from, and swapping."""

from debubble.schedules.obscura.dependency_relaxed import dependency_relaxed
from debubble.schedules.obscura.migration import obscura, obscura_minimal
from debubble.schedules.obscura.strawman import strawman

__all__ = [
    "dependency_relaxed",
    "obscura",
    "obscura_minimal",
    "strawman",
]
