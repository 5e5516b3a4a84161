"""Planners, published and debubble's own: functions from a Problem to a Solution, by name in `planners`."""

from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import PlannerEntry, Result, planner, planners
from debubble.registry import index_by_name

__all__ = ["FixedStages", "ModelUnits", "PlannerEntry", "Problem", "Result", "Solution", "planner", "planners"]

index_by_name(__name__)
