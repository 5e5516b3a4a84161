"""Obscura: recomputation hidden in bubbles, activation swapping, and partition adjustment.

Source: Huang et al., Obscura, USENIX ATC 2025.

1F1B is used unchanged where it fits.  Otherwise the planner identifies the stages to adjust, enumerates the joint
problem (equation (4)) on the even and on the balanced partition, and simulates the configurations in the order of
their estimates; those whose lower bound is no better than the best step time so far are skipped.  From the best one,
Algorithm 1 (section 7) moves units off the adjusted stages.  The paper's alternatives (strawman, recomputation on
demand, OHP-CMB, DAPPLE+) are candidates too, so the result is never slower than any of them.

In Algorithm 1, C_adj and C_non are the largest 3 f_s + r_s of the adjusted and of the other stages.  As printed, it
returns the partition before its last move (docs/notes/obscura.md); here its full trace is simulated and the best
partition is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.ir import DeadlockError, InfeasibleError, Number, Schedule
from debubble.papers.obscura.configurations import FittedConfiguration, candidates, fits
from debubble.papers.obscura.schedule import deep_warm_ups, strawman
from debubble.papers.obscura.step_model import identify, step_time, warm_ups
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.partitioning.fixed_partition import Stages, UnitStages
from debubble.planners.partitioning.pareto import StageRecomputation
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.simulator import simulate

Counts = tuple[int, ...]
"""Units per stage."""

MAX_OPERATIONS = 12_000
"""Maximum number of forwards and backwards simulated to compare configurations, and again to compare partitions."""

BOUND_RATIO = 0.999
"""A configuration is simulated only if its lower bound is below this fraction of the best step time so far."""


@dataclass(frozen=True)
class SimulatedSolution:
    """A solution with its simulated makespan."""

    makespan: Number
    solution: Solution
    candidate: FittedConfiguration | None = None


@planner("obscura", paper="Obscura, ATC 2025", peers=True)
def obscura(problem: Problem) -> Solution:
    """Hide recomputation and swapping in the bubbles of the stages that lack memory."""
    stages = Stages.even(problem)
    untouched = _faster_of(None, stages.solution(_one_f_one_b(problem), stages.named("none")))
    if untouched is not None:
        return replace(untouched.solution, remark="1F1B fits, and is left alone")
    best = fastest(candidate for start in _start_partitions(stages) for candidate in candidates(start))
    for bound, build in alternatives(stages):
        if best is None or bound < best.makespan:
            best = _faster_of(best, build())
    if best is None:
        raise _infeasible_error(stages)
    if best.candidate is not None:
        best = fastest(adjusted_partitions(best.candidate), best)
    assert best is not None
    return replace(best.solution, remark=_remark(best))


def _remark(best: SimulatedSolution) -> str:
    """The plan's remark: its choice in the paper's symbols, the hidden recomputation, and the step model's error."""
    share = _hidden_share(best)
    hidden = "nothing recomputes" if share is None else f"{100 * share:.0f}% of the recomputation is hidden"
    if best.candidate is None:
        return f"its fastest is {best.solution.schedule.name}, one of the paper's alternatives; {hidden}"
    c = best.candidate.configuration
    k = c.adjusted - 1
    adjusted = f"it adjusts stage{'s 0 to' if k else ''} {k} (k = {k})" if c.adjusted else "it adjusts no stage"
    swapped = f"lambda_k = {c.blocks}, beta = {c.fraction}" if c.blocks else "nothing swapped"
    cheap = [str(s) for s, choice in enumerate(best.candidate.choices) if s >= c.adjusted and choice.recompute]
    unadjusted = f", others that recompute: {', '.join(cheap)}" if cheap else ""
    error = round(100 * (best.candidate.estimate / float(best.makespan) - 1), 1) + 0.0
    return f"{adjusted}, x = {c.migrated}, {swapped}{unadjusted}; {hidden}; its step model is off by {error:.1f}%"


def _hidden_share(best: SimulatedSolution) -> float | None:
    """The fraction of the largest stage's recomputation that does not lengthen the step; None without any."""
    schedule, costs = best.solution.schedule, best.solution.costs
    recompute_time = max(simulate(schedule, costs).recompute)
    if not recompute_time:
        return None
    without = simulate(schedule, costs.replace(recompute=0)).makespan
    return max(0.0, 1.0 - float((best.makespan - without) / recompute_time))


def fastest(tried: Iterable[FittedConfiguration], best: SimulatedSolution | None = None) -> SimulatedSolution | None:
    """The fastest of `best` and the candidates, which are simulated in the order of their estimates."""
    operations = 0
    for candidate in sorted(tried, key=lambda c: c.estimate):
        if best is not None and (candidate.bound >= BOUND_RATIO * best.makespan or operations >= MAX_OPERATIONS):
            continue
        best = _faster_of(best, candidate.solution(), candidate)
        operations += 2 * candidate.stages.problem.devices * candidate.stages.problem.micro_batches
    return best


def alternatives(stages: Stages) -> Iterator[tuple[float, Callable[[], Solution]]]:
    """The paper's baselines: the lower bound of the step time, and a function that builds the solution."""
    problem = stages.problem
    p, m = problem.devices, problem.micro_batches
    full, none = stages.named("full"), stages.named("none")
    adjusted = identify(stages, none)
    mixed = [full[s] if s < adjusted else none[s] for s in range(p)]
    deep = [min(m, warm_up) for warm_up in deep_warm_ups(p, adjusted)]
    shallow = warm_ups(p, m, adjusted=0, migrated=0)

    def bound(choices: Sequence[StageRecomputation], mu: Sequence[int]) -> float:
        return step_time(stages.costs, [c.recompute for c in choices], micro_batches=m, warm_ups=mu)

    yield (
        bound(mixed, deep),
        lambda: stages.solution(strawman(devices=p, micro_batches=m, adjusted_stages=adjusted), mixed),
    )
    yield bound(mixed, shallow), lambda: stages.solution(_one_f_one_b(problem), mixed)
    yield bound(full, shallow), lambda: stages.solution(_one_f_one_b(problem), full)
    if stages.knows("cmb"):
        cheap = stages.named("cmb")
        yield bound(cheap, shallow), lambda: stages.solution(_one_f_one_b(problem), cheap)


def adjusted_partitions(start: FittedConfiguration) -> Iterator[FittedConfiguration]:
    """The configuration on each partition of Algorithm 1's trace, with the recomputation that it then needs."""
    stages, problem = start.stages, start.stages.problem
    if not isinstance(stages, UnitStages):
        return
    fitted: dict[Counts, tuple[FittedConfiguration, ...]] = {stages.lengths: (start,)}

    def times(counts: Counts) -> list[float] | None:
        if counts not in fitted:
            fitted[counts] = tuple(fits(replace(stages, lengths=counts), start.configuration))
        if not fitted[counts]:
            return None
        candidate = fitted[counts][0]
        costs = candidate.stages.costs
        return [float(costs.work(s)) + choice.recompute for s, choice in enumerate(candidate.choices)]

    for counts in adjustments(
        stages.lengths, adjusted=start.configuration.adjusted, micro_batches=problem.micro_batches, times=times
    ):
        yield from fitted[counts]


def adjustments(
    counts: Counts, *, adjusted: int, micro_batches: int, times: Callable[[Counts], list[float] | None]
) -> Iterator[Counts]:
    """Algorithm 1: the partitions after each move, starting from `counts` units per stage.

    `times` returns 3 f_s + r_s of each stage of a partition, None if it does not fit in memory.
    """
    p = len(counts)
    stage_times = times(counts)
    while stage_times is not None and 0 < adjusted < p:
        slowest, other = max(stage_times[:adjusted]), max(stage_times[adjusted:])
        # Equation (5): T_k - C_adj > T_{k+1}, where T_k is either T_{k+1} + C_adj or C_adj m.
        if slowest * (micro_batches - 1) <= other * (micro_batches + p - 1 - adjusted):
            return
        giver = stage_times.index(slowest)
        if counts[giver] == 1:
            return
        takers = sorted(range(adjusted, p), key=stage_times.__getitem__)
        moves = [tuple(n + (s == taker) - (s == giver) for s, n in enumerate(counts)) for taker in takers]
        step = next(((moved, after) for moved in moves if (after := times(moved)) is not None), None)
        if step is None:
            return
        counts, stage_times = step
        yield counts


def _start_partitions(even: Stages) -> Iterator[Stages]:
    """The paper's even partition, and the balanced one, which accounts for a long head."""
    yield even
    if isinstance(even, UnitStages):
        balanced = tuple(balanced_counts(even.units, even.problem.devices))
        if balanced != even.lengths:
            yield replace(even, lengths=balanced)


def _faster_of(
    best: SimulatedSolution | None, solution: Solution, candidate: FittedConfiguration | None = None
) -> SimulatedSolution | None:
    """The faster of `best` and a solution; a solution that does not fit or deadlocks is ignored."""
    try:
        makespan = simulate(solution.schedule, solution.costs).makespan
    except (InfeasibleError, DeadlockError):
        return best
    return SimulatedSolution(makespan, solution, candidate) if best is None or makespan < best.makespan else best


def _one_f_one_b(problem: Problem) -> Schedule:
    return one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)


def _infeasible_error(stages: Stages) -> InfeasibleError:
    """The error of the plan with the lowest memory, full recomputation under 1F1B."""
    full = stages.solution(_one_f_one_b(stages.problem), stages.named("full"))
    try:
        simulate(full.schedule, full.costs)
    except InfeasibleError as error:
        return error
    raise AssertionError("DAPPLE+ is a candidate: it fits only if something was found")
