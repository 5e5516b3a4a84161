"""Every order of the library, and list schedules, on several partitions, chosen by simulation."""

from debubble.planners.portfolio.planner import portfolio

__all__ = ["portfolio"]
