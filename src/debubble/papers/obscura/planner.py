"""Obscura: recomputation that hides in the bubbles, swapping, and a partition that fits both.

Source: Huang et al., Obscura, USENIX ATC 2025.

1F1B is left alone where it fits.  Otherwise the stages to adjust are identified, the joint problem (equation (4)) is
enumerated on the even partition and on the balanced one, and the most promising configurations are lowered and
simulated, best estimate first; one whose lower bound is no better than the best step time so far is skipped.  From the
best, Algorithm 1 (section 7) moves units off the adjusted stages.  The paper's alternatives (strawman, recomputation on
demand, OHP-CMB, DAPPLE+) are candidates too, so that none of them is ever faster.

In Algorithm 1, C_adj and C_non are the largest 3 f_s + r_s of the adjusted and of the other stages.  As printed, it
returns the partition before its last move (docs/notes/obscura.md); here all of its trace is simulated, and the best is
kept.
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

OPERATIONS = 12_000
"""Forwards and backwards that are simulated to compare configurations, and then again to compare partitions."""

WORTHWHILE = 0.999
"""A configuration is simulated if its bound is below this share of the best step time so far."""


@dataclass(frozen=True)
class SimulatedSolution:
    """A simulated solution."""

    makespan: Number
    solution: Solution
    candidate: FittedConfiguration | None = None


@planner("obscura", paper="Obscura, ATC 2025", peers=True)
def obscura(problem: Problem) -> Solution:
    """Hide recomputation and swapping in the bubbles of the stages that lack memory."""
    stages = Stages.even(problem)
    untouched = _better(None, stages.solution(_plain(problem), stages.named("none")))
    if untouched is not None:
        return replace(untouched.solution, remark="1F1B fits, and is left alone")
    best = fastest(candidate for start in _starts(stages) for candidate in candidates(start))
    for bound, build in alternatives(stages):
        if best is None or bound < best.makespan:
            best = _better(best, build())
    if best is None:
        raise _infeasible(stages)
    if best.candidate is not None:
        best = fastest(adjusted_partitions(best.candidate), best)
    assert best is not None
    return replace(best.solution, remark=_choice(best))


def _choice(best: SimulatedSolution) -> str:
    """The choice in the paper's symbols, how much recomputation it hides, and how good the estimate was."""
    share = _hidden_share(best)
    hidden = "nothing recomputes" if share is None else f"{100 * share:.0f}% of the recomputation is hidden"
    if best.candidate is None:
        return f"its fastest is {best.solution.schedule.name}, one of the paper's alternatives; {hidden}"
    c = best.candidate.configuration
    k = c.adjusted - 1
    adjusted = f"it adjusts stage{'s 0 to' if k else ''} {k} (k = {k})" if c.adjusted else "it adjusts no stage"
    swapped = f"lambda_k = {c.blocks}, beta = {c.fraction}" if c.blocks else "nothing swapped"
    cheap = [str(s) for s, choice in enumerate(best.candidate.choices) if s >= c.adjusted and choice.recompute]
    others = f", others that recompute: {', '.join(cheap)}" if cheap else ""
    off = round(100 * (best.candidate.estimate / float(best.makespan) - 1), 1) + 0.0
    return f"{adjusted}, x = {c.migrated}, {swapped}{others}; {hidden}; its step model is off by {off:.1f}%"


def _hidden_share(best: SimulatedSolution) -> float | None:
    """The share of recomputation, on the stage with most of it, that does not lengthen the step; None without any."""
    schedule, costs = best.solution.schedule, best.solution.costs
    most = max(simulate(schedule, costs).recompute)
    if not most:
        return None
    without = simulate(schedule, costs.replace(recompute=0)).makespan
    return max(0.0, 1.0 - float((best.makespan - without) / most))


def fastest(tried: Iterable[FittedConfiguration], best: SimulatedSolution | None = None) -> SimulatedSolution | None:
    """The fastest of the candidates, and of what was found before, by simulating the most promising ones."""
    operations = 0
    for candidate in sorted(tried, key=lambda c: c.estimate):
        if best is not None and (candidate.bound >= WORTHWHILE * best.makespan or operations >= OPERATIONS):
            continue
        best = _better(best, candidate.solution(), candidate)
        operations += 2 * candidate.stages.problem.devices * candidate.stages.problem.micro_batches
    return best


def alternatives(stages: Stages) -> Iterator[tuple[float, Callable[[], Solution]]]:
    """The paper's own baselines: a lower bound of the step time, and the solution, of each."""
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
    yield bound(mixed, shallow), lambda: stages.solution(_plain(problem), mixed)
    yield bound(full, shallow), lambda: stages.solution(_plain(problem), full)
    if stages.knows("cmb"):
        cheap = stages.named("cmb")
        yield bound(cheap, shallow), lambda: stages.solution(_plain(problem), cheap)


def adjusted_partitions(start: FittedConfiguration) -> Iterator[FittedConfiguration]:
    """The configuration on the partitions of Algorithm 1, each with the recomputation that it then needs."""
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
    """The partitions after each move, from `counts` units per stage on.

    `times`: 3 f_s + r_s of each stage of a partition, None if it does not fit in memory.
    """
    p = len(counts)
    each = times(counts)
    while each is not None and 0 < adjusted < p:
        slowest, other = max(each[:adjusted]), max(each[adjusted:])
        # Equation (5): T_k - C_adj > T_{k+1}, where T_k is either T_{k+1} + C_adj or C_adj m.
        if slowest * (micro_batches - 1) <= other * (micro_batches + p - 1 - adjusted):
            return
        giver = each.index(slowest)
        if counts[giver] == 1:
            return
        takers = sorted(range(adjusted, p), key=each.__getitem__)
        moves = [tuple(n + (s == taker) - (s == giver) for s, n in enumerate(counts)) for taker in takers]
        step = next(((moved, after) for moved in moves if (after := times(moved)) is not None), None)
        if step is None:
            return
        counts, each = step
        yield counts


def _starts(even: Stages) -> Iterator[Stages]:
    """The paper's even partition, and the one with the least work in its largest stage: heads can be long."""
    yield even
    if isinstance(even, UnitStages):
        balanced = tuple(balanced_counts(even.units, even.problem.devices))
        if balanced != even.lengths:
            yield replace(even, lengths=balanced)


def _better(
    best: SimulatedSolution | None, solution: Solution, candidate: FittedConfiguration | None = None
) -> SimulatedSolution | None:
    """The faster of what was found and a solution, which may turn out not to fit, or to block itself."""
    try:
        makespan = simulate(solution.schedule, solution.costs).makespan
    except (InfeasibleError, DeadlockError):
        return best
    return SimulatedSolution(makespan, solution, candidate) if best is None or makespan < best.makespan else best


def _plain(problem: Problem) -> Schedule:
    return one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)


def _infeasible(stages: Stages) -> InfeasibleError:
    """The reason: what the plan that keeps least lacks."""
    full = stages.solution(_plain(stages.problem), stages.named("full"))
    try:
        simulate(full.schedule, full.costs)
    except InfeasibleError as error:
        return error
    raise AssertionError("DAPPLE+ is a candidate: it fits only if something was found")
