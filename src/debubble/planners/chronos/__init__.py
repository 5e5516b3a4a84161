"""ChronosPipe: the search over its settings."""

from debubble.planners.chronos.planner import chronos

__all__ = ["chronos"]
