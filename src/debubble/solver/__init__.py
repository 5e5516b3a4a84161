"""What searching for an order of operations shares: exact evaluation, bounds, list scheduling, local search, CP-SAT,
the MILP, periodic patterns and the schedule cache."""

from debubble.solver.optimize import optimize
from debubble.solver.problem import Incumbent, Objective, OrderProblem
from debubble.solver.search import search

__all__ = ["Incumbent", "Objective", "OrderProblem", "optimize", "search"]
