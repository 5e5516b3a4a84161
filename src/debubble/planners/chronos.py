"""ChronosPipe ALL: Chronos-Pipe, with as much of the rest as the memory limit asks for.

Source: Lin et al., ChronosPipe; the paper combines the parts by hand and names no planner, so the search is ours.

It chooses the number of chunks, what recomputes (whole shallow chunks, part of the next, cheap operators in the rest),
whose optimizer states live on the host, whose activations go there, and how many micro-batches reduce their gradients
together.  For each combination, the least recomputation that fits is found by bisection on a short run, which has the
same steady phase; those that promise to be fastest are then simulated whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from debubble.ir import DebubbleError, InfeasibleError, Number
from debubble.planners.chronos_settings import STEPS_PER_CHUNK, Setting, build, settings
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.simulator import simulate

FINALISTS = 6


@dataclass(frozen=True)
class _Fit:
    """A setting with the recomputation that it needs, in quarters of chunks, and what a whole run may take."""

    setting: Setting
    steps: int
    expected: Number


@planner("chronos", paper="ChronosPipe")
def chronos(problem: Problem) -> Solution:
    """The fastest ChronosPipe that fits: chunks, recomputation, offloaded states and activations, and groups."""
    deadline = time.perf_counter() + problem.effort
    fits: list[_Fit] = []
    reason: DebubbleError | None = None
    for setting in settings(problem):
        if fits and time.perf_counter() > deadline:
            break
        if any(fit.steps == 0 and fit.setting.saves_no_more_than(setting) for fit in fits):
            continue
        try:
            fits.append(_least_recomputation(problem, setting))
        except InfeasibleError as error:
            reason = error
    fits.sort(key=lambda fit: fit.expected)
    best: tuple[Number, Solution] | None = None
    for rank, fit in enumerate(fits):
        if best is not None and rank >= FINALISTS:
            break
        solution = build(problem, fit.setting, steps=fit.steps, micro_batches=problem.micro_batches)
        try:
            makespan = simulate(solution.schedule, solution.costs).makespan
        except InfeasibleError as error:
            reason = error
            continue
        if best is None or makespan < best[0]:
            best = makespan, solution
    if best is None:
        raise InfeasibleError(f"ChronosPipe fits in no form: {reason}")
    return best[1]


def _least_recomputation(problem: Problem, setting: Setting) -> _Fit:
    """Raises InfeasibleError if not even full recomputation fits."""
    short = min(problem.micro_batches, (2 * problem.devices + 4) * setting.group)

    def expected(steps: int) -> Number:
        solution = build(problem, setting, steps=steps, micro_batches=short)
        timeline = simulate(solution.schedule, solution.costs)
        return timeline.makespan + (problem.micro_batches - short) * max(timeline.busy) / short

    low, high = 0, STEPS_PER_CHUNK * setting.chunks
    try:
        return _Fit(setting, 0, expected(0))
    except InfeasibleError:
        least = expected(high)
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            least, high = expected(middle), middle
        except InfeasibleError:
            low = middle
    return _Fit(setting, high, least)
