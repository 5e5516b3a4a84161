"""What searching for an order of operations shares: exact evaluation, bounds, list scheduling, local search, CP-SAT,
the MILP, periodic patterns and the schedule cache."""

from debubble.search.annealing.search import search
from debubble.search.optimize import optimize
from debubble.search.problem import Incumbent, Objective, OrderProblem

__all__ = ["Incumbent", "Objective", "OrderProblem", "optimize", "search"]
