"""SCOPE: one ILP for recomputation, imbalance and warm-up bubbles, whole and decomposed."""

from debubble.planners.scope.planner import scope

__all__ = [
    "scope",
]
