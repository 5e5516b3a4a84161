"""ChronosPipe ALL: Chronos-Pipe, with as much of the rest as the memory limit asks for.

Source: Lin et al., ChronosPipe; the paper combines the parts by hand and names no planner, so the search is ours.

It chooses the number of chunks, what recomputes, whose optimizer states live on the host, whose activations go there,
and how many micro-batches reduce their gradients together.  What recomputes follows the paper's principle in general
form: first what takes the least time per byte and time that the byte would live, so shallow chunks before deep ones,
and cheap operators before whole layers.  For each combination, how much of that order is needed is found by bisection
on a short run, which has the same steady phase; those that promise to be fastest are then simulated whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from debubble.ir import CutOffError, DebubbleError, InfeasibleError, Number
from debubble.ir.lowering.admission import Admission
from debubble.ir.lowering.op_costs import OpCosts
from debubble.planners.chronos.settings import Increment, Setting, build, increments, settings
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.search.effort import CHECKED, SIMULATION, Effort
from debubble.simulator import simulate

FINALISTS = 6
SEARCH = 0.7
"""Share of the effort after which no further combination is tried."""


@dataclass(frozen=True)
class _Fit:
    """A setting with the recomputation that it needs, and what a whole run may take."""

    setting: Setting
    taken: Sequence[Increment]
    expected: Number


@planner("chronos", paper="ChronosPipe", searches=True)
def chronos(problem: Problem) -> Solution:
    """The fastest ChronosPipe that fits: chunks, recomputation, offloaded states and activations, and groups."""
    effort = problem.begun()
    fits: list[_Fit] = []
    reason: DebubbleError | None = None
    for setting in settings(problem):
        if effort.brake.bites or (fits and effort.spent > SEARCH * problem.effort):
            break
        if any(not fit.taken and fit.setting.saves_no_more_than(setting) for fit in fits):
            continue
        try:
            fits.append(_least_recomputation(problem, setting, effort))
        except InfeasibleError as error:
            reason = error
    fits.sort(key=lambda fit: fit.expected)
    best: tuple[Number, Solution] | None = None
    for rank, fit in enumerate(fits):
        if best is not None and (rank >= FINALISTS or effort.over):
            break
        taken = _needed(problem, fit, effort)
        solution = build(problem, fit.setting, taken, micro_batches=problem.micro_batches)
        effort.spend(SIMULATION * solution.schedule.stages * problem.micro_batches)
        try:
            took = problem.step_time(simulate(solution.schedule, solution.costs))
        except InfeasibleError as error:
            reason = error
            continue
        if best is None or took < best[0]:
            best = took, solution
    if best is None:
        if effort.cut_off:
            raise CutOffError("No combination of ChronosPipe's parts had been found to fit at the deadline.")
        raise InfeasibleError(f"ChronosPipe fits in no form: {reason}")
    return replace(best[1], cut_off=effort.cut_off)


def _least_recomputation(problem: Problem, setting: Setting, effort: Effort) -> _Fit:
    """Raises InfeasibleError if not even full recomputation fits."""
    taken: Sequence[Increment] = ()
    try:
        solution = _checked(problem, setting, taken, effort)
    except InfeasibleError:
        order = increments(problem, setting)
        taken, solution = order, _checked(problem, setting, order, effort)
        low, high = 0, len(order)
        while low + 1 < high:
            middle = (low + high) // 2
            try:
                solution = _checked(problem, setting, order[:middle], effort)
                taken, high = order[:middle], middle
            except InfeasibleError:
                low = middle
    timeline = simulate(solution.schedule, solution.costs)
    short = solution.schedule.micro_batches
    effort.spend(SIMULATION * solution.schedule.stages * short)
    further = (problem.micro_batches - short) * max(timeline.busy) / short
    return _Fit(setting, taken, problem.step_time(timeline) + further)


def _needed(problem: Problem, fit: _Fit, effort: Effort) -> Sequence[Increment]:
    """What was taken without what the dearer increments after it have made superfluous."""
    taken = list(fit.taken)
    for increment in sorted(set(taken), key=lambda i: -i.price):
        while increment in taken:
            fewer = taken.copy()
            fewer.remove(increment)
            try:
                _checked(problem, fit.setting, fewer, effort)
            except InfeasibleError:
                break
            taken = fewer
    return taken


def _checked(problem: Problem, setting: Setting, taken: Sequence[Increment], effort: Effort) -> Solution:
    """A run just long enough for the steady phase.  Raises InfeasibleError if it does not fit."""
    short = min(problem.micro_batches, (2 * problem.devices + 4) * setting.group)
    effort.spend(CHECKED * problem.devices * setting.chunks * short)
    solution = build(problem, setting, taken, micro_batches=short)
    _check_memory(solution)
    return solution


def _check_memory(solution: Solution) -> None:
    """Raises OutOfMemoryError as lowering would, without its cost."""
    schedule, costs = solution.schedule, solution.costs
    if costs.memory_limit is not None:
        tables = OpCosts.of(schedule, costs).tables()
        for device in range(schedule.devices):
            limit = costs.limit_of(device)
            assert limit is not None
            Admission(schedule, costs, device, tables, costs.static_of(device), limit).check()
