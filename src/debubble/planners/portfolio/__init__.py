"""Portfolio planner: library schedules and list schedules on several partitions, ranked by simulation."""

from debubble.planners.portfolio.planner import portfolio

__all__ = ["portfolio"]
