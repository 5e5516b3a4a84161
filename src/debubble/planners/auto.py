"""`auto`: the plan with the shortest step, gradients and optimizer included, of all registered planners.

It gives every planner the same problem and keeps the fastest verified answer, so it is never worse than any of them;
what the others answered, or why they could not, stays with the plan.  Planners that search get the whole effort each,
side by side in processes of their own if that is worth it, while the others answer here.  `joint` has the last word:
it goes on from the order of the fastest two answers, whoever gave them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from debubble.ir import CandidateSummary, CutOffError, DebubbleError
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.process_pool import Answer, by_completion, side_by_side
from debubble.planners.progress import Progress, tell
from debubble.planners.registry import Result, planner, planners, verified
from debubble.targets.orders import OwnOrders


@planner("auto", paper="debubble's own", searches=True)
def auto(problem: Problem) -> Solution:
    """Ask every planner and keep the fastest plan that fits."""
    return fastest_of(problem, planners_for(problem))


def planners_for(problem: Problem) -> list[str]:
    """The planners that may answer: all, or, for a target with orders of its own, those that plan such orders."""
    own = problem.levers is not None and isinstance(problem.levers.orders, OwnOrders)
    return [name for name in planners if name != "auto" and (name in OF_OWN_ORDERS or not own)]


OF_OWN_ORDERS = (
    "adapipe", "dapple", "dapple+", "megatron-even", "megatron-kwai", "merak", "pipedream", "portfolio", "scope",
)  # fmt: skip
"""Planners whose answers are 1F1B or interleaved 1F1B without offload."""


def fastest_of(problem: Problem, names: Sequence[str]) -> Solution:
    """Ask these planners and keep the fastest plan that fits, with a summary of every answer.

    Raises:
        InfeasibleError: if none of them has one, the reason that misses the limit by least.
    """
    answers = {**_ask_all(problem, names)}
    results = _results(answers)
    if not results:
        raise closest([answer for answer in answers.values() if isinstance(answer, DebubbleError)])
    if "joint" in names and results[0].gap > 0:
        # It loads the compiler.
        from debubble.planners.joint.search import go_on

        begin = time.perf_counter()
        further = go_on(problem, [result.solution for result in results])
        if further is not None:
            result = verified("joint", problem, further, time.perf_counter() - begin)
            if result.score < results[0].score:
                answers["joint"] = result
                results = _results(answers)
    best = results[0]
    return Solution(
        schedule=best.solution.schedule,
        costs=best.solution.costs,
        partition=best.solution.partition,
        lower_bound=max(result.pipeline_bound for result in results),
        candidates=tuple(
            sorted(
                (_summary(name, answer) for name, answer in answers.items()),
                key=lambda c: (c.step_time is None, c.robustness.expected if c.robustness else c.step_time),
            )
        ),
    )


def _results(answers: Mapping[str, Result | DebubbleError]) -> list[Result]:
    """The answers that fit, the fastest first."""
    return sorted((a for a in answers.values() if isinstance(a, Result)), key=lambda result: result.score)


def _ask_all(problem: Problem, names: Sequence[str]) -> Mapping[str, Result | DebubbleError]:
    """Every planner's verified answer, or why it has none, in the order of the names; those that search last."""
    others = {name: planners[name] for name in names}
    answers: dict[str, Result | DebubbleError] = {}

    def take(name: str, ask: Callable[[], Result]) -> None:
        answers[name] = _answer(ask)
        results = [answer for answer in answers.values() if isinstance(answer, Result)]
        best = min(results, key=lambda result: result.score, default=None)
        tell(
            Progress(
                stage="Planning", done=len(answers), total=len(others), counted="planners",
                best=None if best is None else best.planner, step_time=None if best is None else float(best.time),
            )
        )  # fmt: skip

    with side_by_side({name: (name, problem) for name, entry in others.items() if entry.searches}) as futures:
        for name, entry in others.items():
            if not entry.searches:
                take(name, partial(entry, problem))
        for name in by_completion(futures):
            take(name, partial(_verified, name, problem, futures[name]))
    order = [*(name for name, entry in others.items() if not entry.searches), *futures]
    return {name: answers[name] for name in order}


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
