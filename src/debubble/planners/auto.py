"""`auto`: the plan with the shortest step, gradients and optimizer included, of the planners that it asks.

It asks `joint`, `portfolio`, `adapipe` (of given stages `optpipe`, for frameworks also `scope`) and what other
distributions register, or with `Problem.compare` every planner: the papers' and the baselines are asked by name
otherwise.  All are given the same problem, and the fastest verified answer is kept; what the others answered, or why
they could not, stays with the plan.
Planners that search do so side by side in processes of their own if that is worth it, while the others answer here.
`joint` has the whole effort, the others a part, and the whole only if they then come close to the fastest answer; where
`joint` has no answer, all have the whole.
`joint` has the last word: it searches the order of the fastest answer at length, whoever gave it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from debubble.errors import PlannerFailedError
from debubble.ir import CandidateSummary, CutOffError, DebubbleError, PluginError
from debubble.ir.plan_entries import Status
from debubble.planners.joint.planner import joint_at_first
from debubble.planners.problem import ModelUnits, Problem, Solution, closest
from debubble.planners.process_pool import WORKER, Answer, Task, by_completion, failure, side_by_side
from debubble.planners.progress import Progress, tell
from debubble.planners.registry import Result, planner, planners, verify
from debubble.targets.orders import OwnOrders

FIRST, CLOSE = 0.1, 1.02
"""The part of the effort with which others than `joint` begin, and how much longer than the fastest answer's step
theirs may take for them to have the whole."""


@planner("auto", paper="debubble's own", searches=True)
def auto(problem: Problem) -> Solution:
    """Ask joint, portfolio, adapipe and registered plug-ins, and keep the fastest plan that fits."""
    return fastest_of(problem, planners_for(problem))


def planners_for(problem: Problem) -> list[str]:
    """The planners that `auto` asks; for a target with orders of its own, those alone that plan such orders."""
    usual: tuple[str, ...] = ASKED if isinstance(problem.workload, ModelUnits) else ASKED_OF_STAGES
    if problem.levers is not None:
        usual = ASKED_FOR_TARGETS
    asked = [name for name in planners if name != "auto" and (problem.compare or name in usual or _is_plugin(name))]
    own = problem.levers is not None and isinstance(problem.levers.orders, OwnOrders)
    return [name for name in asked if name in OF_OWN_ORDERS] if own else asked


ASKED = ("joint", "portfolio", "adapipe")
"""The planners that `auto` asks about model units without `Problem.compare`."""
ASKED_FOR_TARGETS = (*ASKED, "scope")
"""Those that it asks for a framework, whose orders leave partition and recomputation to choose, as SCOPE does."""
ASKED_OF_STAGES = ("joint", "portfolio", "optpipe")
"""Those that it asks about given stages, of which `joint` searches the order of the fastest answer alone."""


def _is_plugin(name: str) -> bool:
    """Tell whether another distribution has registered the planner."""
    return planners[name].find.__module__.partition(".")[0] != "debubble"


OF_OWN_ORDERS = (
    "adapipe", "dapple", "dapple+", "megatron-even", "megatron-kwai", "merak", "pipedream", "portfolio", "scope",
)  # fmt: skip
"""Planners whose answers are 1F1B or interleaved 1F1B without offload."""


def fastest_of(problem: Problem, names: Sequence[str]) -> Solution:
    """Ask these planners and keep the fastest plan that fits, with a summary of every answer.

    Raises InfeasibleError if none of them has one, with the reason that misses the limit by least.
    """
    answers = {**_ask_all(problem, names)}
    results = _results(answers)
    if not results:
        raise closest([answer for answer in answers.values() if isinstance(answer, DebubbleError)])
    # A target has orders of its own.
    if "joint" in names and results[0].gap > 0 and problem.levers is None:
        # It loads the compiler.
        from debubble.planners.joint.search import search_last

        begin = time.perf_counter()
        further = search_last(problem, results[0].solution)
        if further is not None:
            result = verify("joint", problem, further, time.perf_counter() - begin)
            if result.score < results[0].score:
                answers["joint"] = result
                results = _results(answers)
    best = results[0]
    return replace(
        best.solution,
        lower_bound=max(result.pipeline_bound for result in results),
        candidates=tuple(
            sorted(
                (_summary(name, answer) for name, answer in answers.items()),
                key=lambda c: (c.step_time is None, c.robustness.expected if c.robustness else c.step_time),
            )
        ),
        remark=None,
        cut_off=False,
    )


def _results(answers: Mapping[str, Result | DebubbleError]) -> list[Result]:
    """The answers that fit, the fastest first."""
    return sorted((a for a in answers.values() if isinstance(a, Result)), key=lambda result: result.score)


def _ask_all(problem: Problem, names: Sequence[str]) -> Mapping[str, Result | DebubbleError]:
    """Every planner's verified answer, or why it has none, in the order of the names; those that search last.

    Where `joint` searches, it has the whole effort and the others begin with a part; those whose answers then come
    close to the fastest are asked again, with the whole.
    """
    names = sorted(names, key=lambda name: planners[name].searches)
    joins = "joint" in names and isinstance(problem.workload, ModelUnits)
    begin = min(problem.effort, max(WORKER, FIRST * problem.effort))
    if not joins or begin == problem.effort:
        return _ask_side_by_side({name: (name, problem) for name in names})
    part = replace(problem, effort=begin)
    begun = {name: (name, part) for name in names if name != "joint"}
    # The longest search begins first; the order is searched at length when all answers are there.
    joint: Task = ("joint" if problem.levers else joint_at_first, problem)
    answers = _ask_side_by_side({"joint": joint, **begun})
    least = min((result.score for result in _results(answers)), default=math.inf)
    again: list[str] = []
    for name in (name for name in begun if planners[name].searches):
        answer = answers[name]
        if isinstance(answer, Result) and answer.score > CLOSE * least:
            answers[name] = _with_remark(
                answer, f"searched with {begin / problem.effort:.0%} of the effort, as another is well ahead"
            )
        elif isinstance(answer, Result) or not isinstance(answers["joint"], Result):
            again.append(name)
    answers |= _ask_side_by_side({name: (name, problem) for name in again}, answers)
    return {name: answers[name] for name in names}


def _with_remark(result: Result, remark: str) -> Result:
    """The answer with one more remark."""
    said = result.solution.remark
    solution = replace(result.solution, remark=remark if said is None else f"{said}; {remark}")
    return replace(result, solution=solution)


def _ask_side_by_side(
    tasks: Mapping[str, Task], before: Mapping[str, Result | DebubbleError] = MappingProxyType({})
) -> dict[str, Result | DebubbleError]:
    """The verified answer of every planner's task, or why it has none; those that search side by side."""
    answers: dict[str, Result | DebubbleError] = {}

    def take(name: str, ask: Callable[[], Result]) -> None:
        try:
            answers[name] = ask()
        except DebubbleError as error:
            answers[name] = error
        except Exception as error:  # others may have an answer: the plan says that this one failed
            answers[name] = failure(error)
        known = {**before, **answers}
        best = next(iter(_results(known)), None)
        tell(
            Progress(
                stage="Planning with the whole effort" if before else "Planning",
                done=len(answers), total=len(tasks), counted="planners",
                best=None if best is None else best.planner, step_time=None if best is None else float(best.time),
            )
        )  # fmt: skip

    with side_by_side({name: task for name, task in tasks.items() if planners[name].searches}) as futures:
        for name, (_, problem) in tasks.items():
            if name not in futures:
                take(name, partial(planners[name], problem))
        for name in by_completion(futures):
            take(name, partial(_verify, name, tasks[name][1], futures[name]))
    return answers


def _verify(name: str, problem: Problem, future: Future[Answer]) -> Result:
    return verify(name, problem, *future.result())


def _summary(name: str, answer: Result | DebubbleError) -> CandidateSummary:
    if isinstance(answer, Result):
        return answer.summary
    status: Status = "rejected"
    if isinstance(answer, CutOffError):
        status = "cut off"
    elif isinstance(answer, PlannerFailedError | PluginError):
        status = "failed"
    return CandidateSummary(planner=name, status=status, rejected=str(answer))
