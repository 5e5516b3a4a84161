"""`auto`: the fastest plan of all registered planners.

It gives every planner the same problem and keeps the fastest verified answer, so it is never worse than any of them;
what the others answered, or why they could not, stays with the plan.  Planners that search get the whole effort each,
side by side in processes of their own, while the others answer here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from debubble.ir import CandidateSummary, DebubbleError, InfeasibleError
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import Result, planner, planners, verified
from debubble.planners.workers import Answer, searching


@planner("auto", paper="debubble's own", searches=True)
def auto(problem: Problem) -> Solution:
    """Ask every planner and keep the fastest plan that fits."""
    answers = list(_ask_all(problem))
    results = [answer for answer in answers if isinstance(answer, Result)]
    candidates = [answer.summary if isinstance(answer, Result) else answer for answer in answers]
    if not results:
        raise InfeasibleError(_why(candidates))
    best = min(results, key=lambda result: result.makespan)
    return Solution(
        schedule=best.solution.schedule,
        costs=best.solution.costs,
        partition=best.solution.partition,
        lower_bound=max(result.lower_bound for result in results),
        candidates=tuple(sorted(candidates, key=lambda c: (c.makespan is None, c.makespan))),
    )


def _ask_all(problem: Problem) -> Iterator[Result | CandidateSummary]:
    """Every planner's verified answer, or its rejection."""
    others = {name: entry for name, entry in planners.items() if name != "auto"}
    with searching([name for name, entry in others.items() if entry.searches], problem) as futures:
        for name, entry in others.items():
            if not entry.searches:
                yield _answer(name, partial(entry, problem))
        for name, future in futures.items():
            yield _answer(name, partial(_verified, name, problem, future))


def _verified(name: str, problem: Problem, future: Future[Answer]) -> Result:
    solution, seconds = future.result()
    return verified(name, problem, solution, seconds)


def _answer(name: str, ask: Callable[[], Result]) -> Result | CandidateSummary:
    start = time.perf_counter()
    try:
        return ask()
    except DebubbleError as error:
        return CandidateSummary(planner=name, solve_seconds=time.perf_counter() - start, rejected=str(error))


def _why(candidates: list[CandidateSummary]) -> str:
    """One reason for all: the shortest sentence."""
    reasons = [c.rejected for c in candidates if c.rejected]
    return f"No plan fits. {min(reasons, key=len) if reasons else ''}".strip()
