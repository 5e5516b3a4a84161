"""`auto`: the plan with the shortest step, gradients and optimizer included, of all registered planners.

It gives every planner the same problem and keeps the fastest verified answer, so it is never worse than any of them;
what the others answered, or why they could not, stays with the plan.  Planners that search get the whole effort each,
side by side in processes of their own, while the others answer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from debubble.ir import CandidateSummary, CutOffError, DebubbleError
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.process_pool import Answer, searching
from debubble.planners.registry import Result, planner, planners, verified


@planner("auto", paper="debubble's own", searches=True)
def auto(problem: Problem) -> Solution:
    """Ask every planner and keep the fastest plan that fits."""
    return fastest_of(problem, [name for name in planners if name != "auto"])


def fastest_of(problem: Problem, names: Sequence[str]) -> Solution:
    """Ask these planners and keep the fastest plan that fits, with a summary of every answer.

    Raises:
        InfeasibleError: if none of them has one, the reason that misses the limit by least.
    """
    answers = dict(_ask_all(problem, names))
    results = [answer for answer in answers.values() if isinstance(answer, Result)]
    if not results:
        raise closest([answer for answer in answers.values() if isinstance(answer, DebubbleError)])
    best = min(results, key=lambda result: result.time)
    return Solution(
        schedule=best.solution.schedule,
        costs=best.solution.costs,
        partition=best.solution.partition,
        lower_bound=max(result.pipeline_bound for result in results),
        candidates=tuple(
            sorted(
                (_summary(name, answer) for name, answer in answers.items()),
                key=lambda c: (c.step_time is None, c.step_time),
            )
        ),
    )


def _ask_all(problem: Problem, names: Sequence[str]) -> Iterator[tuple[str, Result | DebubbleError]]:
    """Every planner's verified answer, or why it has none."""
    others = {name: planners[name] for name in names}
    with searching([name for name, entry in others.items() if entry.searches], problem) as futures:
        for name, entry in others.items():
            if not entry.searches:
                yield name, _answer(partial(entry, problem))
        for name, future in futures.items():
            yield name, _answer(partial(_verified, name, problem, future))


def _verified(name: str, problem: Problem, future: Future[Answer]) -> Result:
    solution, seconds = future.result()
    return verified(name, problem, solution, seconds)


def _answer(ask: Callable[[], Result]) -> Result | DebubbleError:
    try:
        return ask()
    except DebubbleError as error:
        return error


def _summary(name: str, answer: Result | DebubbleError) -> CandidateSummary:
    if isinstance(answer, Result):
        return answer.summary
    return CandidateSummary(
        planner=name, status="cut off" if isinstance(answer, CutOffError) else "rejected", rejected=str(answer)
    )
