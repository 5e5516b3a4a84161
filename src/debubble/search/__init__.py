"""Search for the order of operations that takes the least time under the memory limit."""

from debubble.search.annealing.search import search
from debubble.search.optimize import optimize
from debubble.search.problem import Incumbent, Objective, OrderProblem

__all__ = ["Incumbent", "Objective", "OrderProblem", "optimize", "search"]
