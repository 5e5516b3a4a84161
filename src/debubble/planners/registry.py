"""The planners' registry.

A planner is a function from Problem to Solution, decorated with `@planner`; it raises InfeasibleError, with the
reason as a sentence, if it finds nothing that fits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass

from debubble.ir import Number
from debubble.planners.problem import Problem, Solution
from debubble.registry import Registry
from debubble.simulator import Timeline, simulate


@dataclass(frozen=True, kw_only=True)
class Result:
    """A planner's answer, verified: lowered under the limit and simulated."""

    planner: str
    solution: Solution
    timeline: Timeline
    solve_seconds: float

    @property
    def makespan(self) -> Number:
        return self.timeline.makespan

    @property
    def lower_bound(self) -> Number:
        return min(self.solution.lower_bound, self.makespan)

    @property
    def gap(self) -> float:
        return float((self.makespan - self.lower_bound) / self.makespan)


@dataclass(frozen=True)
class PlannerEntry:
    """One published planner."""

    name: str
    find: Callable[[Problem], Solution]
    paper: str

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.find) or "").splitlines()[0]

    def __call__(self, problem: Problem) -> Result:
        """Plan, and verify the answer by simulating it.  Raises InfeasibleError if nothing fits."""
        start = time.perf_counter()
        solution = self.find(problem)
        timeline = simulate(solution.schedule, solution.costs)
        return Result(
            planner=self.name, solution=solution, timeline=timeline, solve_seconds=time.perf_counter() - start
        )


planners: Registry[PlannerEntry] = Registry("debubble.planners", what="planner")


def planner(name: str, *, paper: str) -> Callable[[Callable[[Problem], Solution]], Callable[[Problem], Solution]]:
    """Register a planner under its name, with its source."""

    def register(find: Callable[[Problem], Solution]) -> Callable[[Problem], Solution]:
        planners.add(name, PlannerEntry(name, find, paper))
        return find

    return register
