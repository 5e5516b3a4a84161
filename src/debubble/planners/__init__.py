"""One file per published planner, plus `auto`: Problem in, Solution out."""

from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import PlannerEntry, Result, planner, planners
from debubble.registry import index_by_name

__all__ = ["FixedStages", "ModelUnits", "PlannerEntry", "Problem", "Result", "Solution", "planner", "planners"]

index_by_name(__name__)
