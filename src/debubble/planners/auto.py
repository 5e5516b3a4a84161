"""`auto`: the fastest plan of all registered planners.

It gives every planner the same problem and keeps the fastest verified answer, so it is never worse than any of them;
what the others answered, or why they could not, stays with the plan.
"""

from __future__ import annotations

import time

from debubble.ir import CandidateSummary, DebubbleError, InfeasibleError
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import Result, planner, planners


@planner("auto", paper="debubble's own")
def auto(problem: Problem) -> Solution:
    """Ask every planner and keep the fastest plan that fits."""
    results: list[Result] = []
    candidates: list[CandidateSummary] = []
    for name, entry in planners.items():
        if name == "auto":
            continue
        start = time.perf_counter()
        try:
            result = entry(problem)
        except DebubbleError as error:
            spent = time.perf_counter() - start
            candidates.append(CandidateSummary(planner=name, solve_seconds=spent, rejected=str(error)))
            continue
        results.append(result)
        candidates.append(result.summary)
    if not results:
        raise InfeasibleError(_why(candidates))
    best = min(results, key=lambda result: result.makespan)
    candidates.sort(key=lambda c: (c.makespan is None, c.makespan))
    return Solution(
        schedule=best.solution.schedule,
        costs=best.solution.costs,
        partition=best.solution.partition,
        lower_bound=max(result.lower_bound for result in results),
        candidates=tuple(candidates),
    )


def _why(candidates: list[CandidateSummary]) -> str:
    """The reason of the planner that can save most memory; the shortest sentence if several speak of memory."""
    reasons = [c.rejected for c in candidates if c.rejected]
    return f"No plan fits. {min(reasons, key=len) if reasons else ''}".strip()
