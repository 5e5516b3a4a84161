"""`auto`: runs several planners and returns the plan with the shortest step, gradients and optimizer included.

It runs `joint`, `portfolio`, `adapipe` (`optpipe` instead for fixed stages, also `scope` for frameworks) and the
planners of plug-ins, or with `Problem.compare` every planner, those of papers and baselines included.  All get the same
problem, and the fastest verified answer is chosen; the plan lists the answers or errors of the others.

Planners that do not search come first, so that there is a plan at once.  Then `joint` drafts plans, and the others
search in separate processes if that pays off; `portfolio` runs only if the fastest answer is close to its bound, which
means that memory suffices.  Last, `joint` refines the operation order of the fastest answer with the full budget.  A
plain answer, without recomputation, offload and CPU optimizer, replaces the fastest one if its step is at most 1%
longer, or, on CPUs, which are their own hosts, if it fits.  Without a pipeline a plain answer that accumulates
gradients, which every framework runs, may take 2% longer.
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
from debubble.planners.process_pool import Task, TaskAnswer, ask_concurrently, by_completion
from debubble.planners.registry import Result, planner, planners, verify
from debubble.targets.orders import COMPUTE, OwnOrders, accumulated, without_transfers

SINGLE_PLANNER_EFFORT = 0.5
"""Up to this effort `joint` runs completely instead of drafting plans, and `portfolio` is never skipped."""


@planner("auto", paper="debubble's own", searches=True, slices=True)
def auto(problem: Problem) -> Iterator[Solution]:
    """Ask joint, portfolio, adapipe and registered plug-ins, and keep the fastest plan that fits."""
    yield from fastest_of(problem, planners_for(problem))


def planners_for(problem: Problem) -> list[str]:
    """The planners that `auto` runs; for a target with its own orders, only those that plan such orders."""
    if problem.slices > 1:
        return [name for name in planners if planners[name].slices and name != "auto"]
    usual: tuple[str, ...] = MODEL_PLANNERS if isinstance(problem.workload, ModelUnits) else STAGE_PLANNERS
    if problem.levers is not None:
        usual = TARGET_PLANNERS
    asked = [name for name in planners if name != "auto" and (problem.compare or name in usual or _is_plugin(name))]
    fixed_orders = problem.levers is not None and isinstance(problem.levers.orders, OwnOrders)
    return [name for name in asked if planners[name].plain] if fixed_orders else asked


MODEL_PLANNERS = ("joint", "portfolio", "adapipe")
"""The planners that `auto` runs for model units without `Problem.compare`."""
TARGET_PLANNERS = (*MODEL_PLANNERS, "scope")
"""The planners for frameworks, whose fixed orders leave partition and recomputation open, as SCOPE does."""
STAGE_PLANNERS = ("joint", "portfolio", "optpipe")
"""The planners for fixed stages; there `joint` only refines the order of the fastest answer."""
LIBRARY_PLANNER, MAX_LIBRARY_GAP, FAILED_SEARCH_GAP = "portfolio", 0.04, 0.5
"""The planner of library schedules, and the gaps of the fastest plan between which it is skipped: memory is short then,
and uniform recomputation is slower.  It always runs for small steps and with little effort, and above the second gap,
where the search has failed."""
MIN_HOST_STEP_GAIN = 0.001
"""Fraction of the step that CPU optimizer steps must save to be kept; those of adapters alone save nothing."""


def has_compared_planners(names: Collection[str]) -> bool:
    """Whether these include built-in planners that `auto` only runs with `Problem.compare`."""
    usual = {*TARGET_PLANNERS, *STAGE_PLANNERS}
    return any(name in planners and name not in usual and not _is_plugin(name) for name in names)


def _is_plugin(name: str) -> bool:
    """Whether the planner is from a plug-in."""
    return planners[name].function.__module__.partition(".")[0] != "debubble"


def fastest_of(problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Run these planners and yield the fastest plan that fits, with a summary of every answer.

    Args:
        problem: The problem.
        names: The planners.

    Yields:
        Plans, each faster than those before it, or the same with the answers of more planners.

    Raises:
        InfeasibleError: If no planner has a plan, with the error that is closest to the limit.
    """
    answers = Answers(problem, names)
    try:
        yield from _answered(answers, problem, names)
    except KeyboardInterrupt:
        if not answers.results:
            raise
        answers.interrupt()
    if not answers.results:
        raise closest(answers.refusals)
    yield answers.solution()


def _answered(answers: Answers, problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Run the planners, refine the order of the fastest answer, and try plainer variants of it."""
    for name in names:
        if not planners[name].searches:
            yield from answers.take(name, partial(planners[name], answers.problem()))
    yield from _searched(answers, [name for name in names if planners[name].searches])
    best = next(iter(answers.results), None)
    if best is not None and answers.deadline_passed:
        return
    # A target has fixed orders, and gradient accumulation on one device has only one order.
    accumulates = problem.devices == 1 and best is not None and best.plain and prefers_plain(problem)
    if best is not None and "joint" in names and best.gap > 0 and problem.levers is None and not accumulates:
        # Imported here as it loads the compiler.
        from debubble.planners.joint.orders import last_search

        last = answers.problem()
        yield from answers.stream("joint", last, partial(last_search, last, best.solution, drafted=_drafts(problem)))
    best = next(iter(answers.results), None)
    if best is not None and best.solution.schedule.host_steps:
        on_devices = partial(without_host_steps, problem, best.solution)
        yield from answers.stream(best.planner, problem, on_devices, tolerance=1 + MIN_HOST_STEP_GAIN)
        best = next(iter(answers.results), None)
    if best is not None and prefers_plain(problem):
        tried = [best]
        if problem.robust and answers.quickest is not None and answers.quickest is not best:
            # Disturbances may only affect the transfers of the quickest answer.
            tried.append(answers.quickest)
        for answer in tried:
            plainer = partial(without_levers, problem, answer.solution)
            yield from answers.stream(answer.planner, problem, plainer, tolerance=tolerance_of(problem))
    if problem.robust and best is not None:
        answers.compare_undisturbed()
        yield answers.solution()


def without_host_steps(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """The answer without CPU optimizer steps; callers keep it if it fits and the steps save next to nothing."""
    if answer.partition is None:
        return
    schedule = answer.schedule.without_host_steps()
    costs = problem.units.stage_costs(answer.partition, schedule.placement)
    entries = {name: getattr(costs, name) for name in ("static", "gradient_offload", "host_step", "parameter_load")}
    yield replace(answer, schedule=schedule, costs=answer.costs.replace(**entries), candidates=(), timeline=None)


def without_levers(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """The answer without offload, recomputation and CPU optimizer; callers keep it if it fits and is about as fast.

    Without a pipeline it accumulates gradients, as every framework does.
    """
    schedule = answer.schedule.without_host_steps()
    other_kinds = {op.kind for op in schedule.operations} - {*COMPUTE, Kind.R, Kind.O, Kind.L}
    if other_kinds or answer.partition is None or schedule.peers:
        return
    units, lengths = problem.units, [len(stage) for stage in answer.partition]
    plain = replace(without_transfers(schedule), fused_recompute=frozenset())
    if plain.devices == 1:
        plain = accumulated(plain)
    if plain == answer.schedule:
        return
    partition = Partition.cut(units, lengths)
    costs = units.stage_costs(partition, schedule.placement)
    yield replace(answer, schedule=plain, costs=costs, partition=partition, candidates=(), timeline=None)


def _searched(answers: Answers, names: Sequence[str]) -> Iterator[Solution]:
    """Run planners that search: `joint`, and then the others concurrently."""
    remaining, problem = list(names), answers.problem()
    if "joint" in names and isinstance(problem.workload, ModelUnits):
        # `joint` refines the order of the fastest answer later.
        find = joint_draft if _drafts(problem) else planners["joint"].solutions
        yield from answers.stream("joint", problem, partial(find, problem))
        remaining.remove("joint")
        if LIBRARY_PLANNER in remaining and _skips_library(answers, problem):
            remaining.remove(LIBRARY_PLANNER)
            answers.leave_out(LIBRARY_PLANNER)
    if answers.results and answers.deadline_passed:
        answers.cut_off(remaining)
        return
    yield from _concurrently(answers, {name: (name, answers.problem()) for name in remaining})


def _drafts(problem: Problem) -> bool:
    """Whether `joint` drafts plans, so that the order of the fastest answer is refined later."""
    return problem.levers is None and problem.effort > SINGLE_PLANNER_EFFORT


def _skips_library(answers: Answers, problem: Problem) -> bool:
    """Whether library schedules would be slower than the answers, or no time remains for them."""
    if problem.compare or problem.levers is not None or not answers.results:
        return False
    asked = problem.effort <= SINGLE_PLANNER_EFFORT or problem.devices * problem.micro_batches <= SMALL_STEP_PAIRS
    short = MAX_LIBRARY_GAP < answers.results[0].gap < FAILED_SEARCH_GAP
    return answers.deadline_passed or (short and not asked)


def _concurrently(answers: Answers, tasks: Mapping[str, Task]) -> Iterator[Solution]:
    """Run tasks concurrently, in separate processes where that pays off."""
    with ask_concurrently(tasks) as pending:
        for name in by_completion(pending):
            yield from answers.take(name, partial(_verify, name, tasks[name][1], pending[name]))


def _verify(name: str, problem: Problem, answer: TaskAnswer) -> Result:
    solution, seconds = answer.result()
    return verify(name, problem, solution, seconds)
