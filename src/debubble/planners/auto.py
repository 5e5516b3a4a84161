"""`auto`: the plan with the shortest step, gradients and optimizer included, of the planners that it asks.

It asks `joint`, `portfolio`, `adapipe` (of given stages `optpipe`, for frameworks also `scope`) and what other
distributions register, or with `Problem.compare` every planner: the papers' and the baselines are asked by name
otherwise.  All are given the same problem, and the fastest verified answer is kept; what the others answered, or why
they could not, stays with the plan.

Planners that do not search answer first, so that there is a plan at once.  `joint` then drafts plans, and the others
search in processes of their own where that is worth one; `portfolio` only where the fastest answer is close to its
bound, as memory suffices.  Last, `joint` searches the order of the fastest answer at length, whoever gave it.  An
answer that neither recomputes, offloads nor steps on hosts, whoever gave it, replaces the fastest one if its step is at
most 1% longer; on CPUs, where hosts have the devices' own cores and memory, if it fits.  Without a pipeline such an
answer that accumulates gradients, as every framework does, may take 2% longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from debubble.costs.partition import Partition
from debubble.ir import Kind
from debubble.planners.answers import Answers, prefers_plain, tolerance_of
from debubble.planners.joint.planner import joint_draft
from debubble.planners.portfolio.planner import SMALL_STEP_PAIRS
from debubble.planners.problem import ModelUnits, Problem, Solution, closest
from debubble.planners.process_pool import Task, TaskAnswer, by_completion, side_by_side
from debubble.planners.registry import Result, planner, planners, verify
from debubble.targets.orders import COMPUTE, OwnOrders, accumulated, without_transfers

SINGLE_PLANNER_EFFORT = 0.5
"""Effort up to which `joint` searches the order of its own fastest plan too, and all others are asked."""


@planner("auto", paper="debubble's own", searches=True, slices=True)
def auto(problem: Problem) -> Iterator[Solution]:
    """Ask joint, portfolio, adapipe and registered plug-ins, and keep the fastest plan that fits."""
    yield from fastest_of(problem, planners_for(problem))


def planners_for(problem: Problem) -> list[str]:
    """The planners that `auto` asks; for a target with orders of its own, those alone that plan such orders."""
    if problem.slices > 1:
        return [name for name in planners if planners[name].slices and name != "auto"]
    usual: tuple[str, ...] = ASKED if isinstance(problem.workload, ModelUnits) else ASKED_OF_STAGES
    if problem.levers is not None:
        usual = ASKED_FOR_TARGETS
    asked = [name for name in planners if name != "auto" and (problem.compare or name in usual or _is_plugin(name))]
    own = problem.levers is not None and isinstance(problem.levers.orders, OwnOrders)
    return [name for name in asked if planners[name].plain] if own else asked


ASKED = ("joint", "portfolio", "adapipe")
"""The planners that `auto` asks about model units without `Problem.compare`."""
ASKED_FOR_TARGETS = (*ASKED, "scope")
"""The planners asked for a framework, whose orders leave partition and recomputation to choose, as SCOPE does."""
ASKED_OF_STAGES = ("joint", "portfolio", "optpipe")
"""The planners asked about given stages, of which `joint` searches the order of the fastest answer alone."""


OF_THE_LIBRARY, LIBRARY_GAP = "portfolio", 0.04
"""The planner of the library's schedules, and the gap of the fastest plan above which `auto` does not ask it: memory is
short there, and stages that recompute alike are behind.  In small steps and with little effort it is asked all the
same."""


HOST_STEPS_GAIN = 0.001
"""Share of a step that hosts' optimizer steps must save: those of adapters alone save none."""


def asks_others(names: Collection[str]) -> bool:
    """Tell whether debubble's planners are among these that `auto` does not ask without `Problem.compare`."""
    usual = {*ASKED, *ASKED_FOR_TARGETS, *ASKED_OF_STAGES}
    return any(name in planners and name not in usual and not _is_plugin(name) for name in names)


def _is_plugin(name: str) -> bool:
    """Tell whether another distribution has registered the planner."""
    return planners[name].function.__module__.partition(".")[0] != "debubble"


def fastest_of(problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Ask these planners and keep the fastest plan that fits, with a summary of every answer.

    Args:
        problem: What is asked.
        names: The planners.

    Returns:
        Plans, each faster than those before it, or the same with the answers of more planners.

    Raises:
        InfeasibleError: If none of the planners has a plan, with the reason that misses the limit by least.
    """
    answers = Answers(problem, names)
    try:
        yield from _asked(answers, problem, names)
    except KeyboardInterrupt:
        if not answers.results:
            raise
        answers.interrupt()
    if not answers.results:
        raise closest(answers.refusals)
    yield answers.solution()


def _asked(answers: Answers, problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Ask the planners in turn, and search the order of the fastest answer."""
    for name in names:
        if not planners[name].searches:
            yield from answers.take(name, partial(planners[name], answers.problem()))
    yield from _searched(answers, [name for name in names if planners[name].searches])
    best = next(iter(answers.results), None)
    if best is not None and answers.late:
        return
    # A target has orders of its own, and on one device gradients accumulate in one.
    accumulates = problem.devices == 1 and best is not None and best.plain and prefers_plain(problem)
    if best is not None and "joint" in names and best.gap > 0 and problem.levers is None and not accumulates:
        # It loads the compiler.
        from debubble.planners.joint.orders import last_search

        last = answers.problem()
        yield from answers.stream("joint", last, partial(last_search, last, best.solution, drafted=_drafts(problem)))
    best = next(iter(answers.results), None)
    if best is not None and best.solution.schedule.host_steps:
        on_devices = partial(without_host_steps, problem, best.solution)
        yield from answers.stream(best.planner, problem, on_devices, tolerance=1 + HOST_STEPS_GAIN)
        best = next(iter(answers.results), None)
    if best is not None and prefers_plain(problem):
        tried = [best]
        if problem.robust and answers.quickest is not None and answers.quickest is not best:
            # What disturbances spoil of it may be its transfers alone.
            tried.append(answers.quickest)
        for answer in tried:
            plainer = partial(without_levers, problem, answer.solution)
            yield from answers.stream(answer.planner, problem, plainer, tolerance=tolerance_of(problem))
    if problem.robust and best is not None:
        answers.compare_undisturbed()
        yield answers.solution()


def without_host_steps(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """The answer with all states on devices; it is kept where they fit and steps on hosts save next to none."""
    if answer.partition is None:
        return
    schedule = answer.schedule.without_host_steps()
    costs = problem.units.stage_costs(answer.partition, schedule.placement)
    of_hosts = {name: getattr(costs, name) for name in ("static", "gradient_offload", "host_step", "parameter_load")}
    yield replace(answer, schedule=schedule, costs=answer.costs.replace(**of_hosts), candidates=(), timeline=None)


def without_levers(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """The answer without offload, recomputation and steps on hosts; it is kept where it fits and is about as fast.

    Without a pipeline it accumulates gradients as every framework does.
    """
    schedule = answer.schedule.without_host_steps()
    others = {op.kind for op in schedule.operations} - {*COMPUTE, Kind.R, Kind.O, Kind.L}
    if others or answer.partition is None or schedule.peers:
        return
    units, cut = problem.units, [len(stage) for stage in answer.partition]
    plain = replace(without_transfers(schedule), fused_recompute=frozenset())
    if plain.devices == 1:
        plain = accumulated(plain)
    if plain == answer.schedule:
        return
    partition = Partition.cut(units, cut)
    costs = units.stage_costs(partition, schedule.placement)
    yield replace(answer, schedule=plain, costs=costs, partition=partition, candidates=(), timeline=None)


def _searched(answers: Answers, names: Sequence[str]) -> Iterator[Solution]:
    """Ask planners that search: `joint`, and then the others side by side."""
    others, problem = list(names), answers.problem()
    if "joint" in names and isinstance(problem.workload, ModelUnits):
        # What `joint` searches at length is the order of the fastest answer.
        find = joint_draft if _drafts(problem) else planners["joint"].solutions
        yield from answers.stream("joint", problem, partial(find, problem))
        others.remove("joint")
        if OF_THE_LIBRARY in others and _skips_library(answers, problem):
            others.remove(OF_THE_LIBRARY)
            answers.leave_out(OF_THE_LIBRARY)
    if answers.results and answers.late:
        answers.cut_off(others)
        return
    yield from _side_by_side(answers, {name: (name, answers.problem()) for name in others})


def _drafts(problem: Problem) -> bool:
    """Tell whether `joint` drafts plans, and the order of the fastest answer is searched at length."""
    return problem.levers is None and problem.effort > SINGLE_PLANNER_EFFORT


def _skips_library(answers: Answers, problem: Problem) -> bool:
    """Tell whether the schedules of the library would be slower than the answers, or there is no time left for them."""
    if problem.compare or problem.levers is not None or not answers.results:
        return False
    asked = problem.effort <= SINGLE_PLANNER_EFFORT or problem.devices * problem.micro_batches <= SMALL_STEP_PAIRS
    return answers.late or (answers.results[0].gap > LIBRARY_GAP and not asked)


def _side_by_side(answers: Answers, tasks: Mapping[str, Task]) -> Iterator[Solution]:
    """Have tasks answered, in processes of their own where that is worth one."""
    with side_by_side(tasks) as found:
        for name in by_completion(found):
            yield from answers.take(name, partial(_verify, name, tasks[name][1], found[name]))


def _verify(name: str, problem: Problem, answer: TaskAnswer) -> Result:
    solution, seconds = answer.result()
    return verify(name, problem, solution, seconds)
