"""The order search of `joint`: brief for the plans of its chains, long for the fastest answer of all planners."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from debubble.costs.host_memory import check_host_memory
from debubble.errors import HostMemoryError
from debubble.ir import (
    DebubbleError,
    Kind,
    Number,
    Op,
    OutOfMemoryError,
    Schedule,
    StageCosts,
)
from debubble.ir.lowering.admission import check_memory
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import BACKWARDS
from debubble.planners.bounds.proven import proven_step_bound
from debubble.planners.joint.levers import Levers
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.processes import available_cores
from debubble.search.annealing.arrays import arrays_of, encode
from debubble.search.annealing.evaluate import evaluate
from debubble.search.annealing.layout import FROM_A_PLAN
from debubble.search.annealing.search import COOLINGS, MILD_TEMPERATURES, compile_kernel, improve
from debubble.search.annealing.search import may_compile as may_compile_orders
from debubble.search.bounds import lower_bound
from debubble.search.effort import CORES, SIMULATION_PRICE, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

WIDE_GAP, MIN_WIDE_GAP_PAIRS = 0.18, 100
"""With a gap to the bound above WIDE_GAP memory is short, and better points are worth more than better orders; with
fewer pairs of a device and a micro-batch than this, orders decide (gemma3-12b on 4 devices is 3% slower without)."""
WIDE_GAP_SHARE = 0.5
"""Fraction of the final order search's effort that is spent if the gap is that wide."""


class Cooling(NamedTuple):
    """A cooling schedule of the order search.

    Attributes:
        moves: Minimum number of moves per pair of a stage and a micro-batch for which it is used.
        temperatures: Initial temperatures of the chains, cyclically, in mean operation times.
        shares: Fractions of the search at which a cooling begins.
    """

    moves: int
    temperatures: Sequence[float]
    shares: Sequence[float]


MILD_COOLING = Cooling(0, MILD_TEMPERATURES, COOLINGS)
BRIEF_COOLINGS = (Cooling(3500, (0.5,), COOLINGS), MILD_COOLING)
"""Coolings of brief searches: a slow one from a high temperature, and mild ones that preserve the initial order."""
LONG_COOLINGS = (Cooling(900, (0.5, 0.15), (0.0, 1.0)), Cooling(270, (0.15,), (0.0, 1.0)), MILD_COOLING)
"""Coolings of long searches by decreasing number of moves; with enough moves there is one slow cooling."""
LAST_SLOW_SHARE, LAST_MILD_SHARE = 1.5, 1.05
"""Fractions of the effort for the final order search of the fastest answer of all planners: if it suffices for the
slowest of these coolings, whose result depends on its length, and otherwise."""
MIN_SEARCH_SIMULATIONS = 0.1
"""Minimum effort for an order search, in simulations of its plan."""
VARIANT_TOLERANCE = 1.02
"""An initial order that gives the search more freedom is preferred up to this multiple of the fastest one's time."""
MIN_REPORTED_GAIN = 0.002
"""Fraction of the time by which an order must be faster to be reported before its search ends."""
MIN_LONG_SEARCH_SIMULATIONS = 4
"""Minimum effort for a long order search, in simulations of its plan."""
T = TypeVar("T")


def has_wide_gap(problem: Problem, step: Number) -> bool:
    """Tell whether a step's gap is so wide that better points are worth more than better orders."""
    return problem.devices * problem.micro_batches >= MIN_WIDE_GAP_PAIRS and gap_of(problem, step) > WIDE_GAP


def gap_of(problem: Problem, step: Number) -> float:
    """The gap between a step and its proven lower bound, as a fraction of the step."""
    return 1 - float(proven_step_bound(problem).time) / float(step)


def run_in_parallel(searches: Sequence[Callable[[Effort], T]], effort: Effort, seconds: float) -> list[T]:
    """Run searches on all cores, each with an equal share of these seconds of the reference machine."""
    share = min(seconds, effort.remaining) * min(CORES / len(searches), 1)
    with ThreadPoolExecutor(available_cores()) as pool:
        running = [pool.submit(search, Effort(share, deadline=effort.deadline)) for search in searches]
        try:
            results = [search.result() for search in running]
        except BaseException:
            # For example a Ctrl-C: make the running searches end.
            effort.deadline.expire()
            raise
    effort.spend(seconds)
    return results


def price_of_simulation(solution: Solution) -> float:
    """Seconds of the reference machine to simulate a solution."""
    return SIMULATION_PRICE * solution.schedule.stages * solution.schedule.micro_batches


def step_time(problem: Problem, solution: Solution) -> Number:
    """Simulate the step and return its time; raises a DebubbleError if the solution does not fit."""
    timeline = solution.simulate()
    if isinstance(problem.workload, ModelUnits) and solution.partition is not None:
        check_host_memory(problem.workload.units, solution.partition, timeline)
    return problem.step_time(timeline)


def evaluate_solution(problem: Problem, solution: Solution) -> float:
    """The step time by the order search's evaluation; infinite if the solution does not fit."""
    schedule = solution.schedule.without_host_steps()
    orders = OrderProblem.from_schedule(schedule, solution.costs, objective=problem.objective)
    time = _evaluate_order(replace(orders, host_steps=solution.schedule.host_steps), schedule)
    return time + (0 if problem.tail is None else float(problem.tail.of_schedule(solution.schedule, solution.costs)))


def _evaluate_order(orders: OrderProblem, schedule: Schedule) -> float:
    """The objective of a schedule by the order search's evaluation; infinite if it does not fit."""
    layout, floats, ints, scale = arrays_of(orders)
    return evaluate(layout, floats, ints, *encode(orders, schedule), math.inf) / scale


def last_search(problem: Problem, answer: Solution, *, drafted: bool) -> Iterator[Solution]:
    """Run the final, long order search for the fastest answer of all planners; yields faster answers.

    Args:
        problem: The problem.
        answer: The fastest answer.
        drafted: Whether `joint` has drafted plans; with wide gaps it has used a larger part of the effort.
    """
    pairs = answer.schedule.stages * answer.schedule.micro_batches
    price = price_of_move(pairs, recompute=True)
    if drafted and has_wide_gap(problem, problem.step_time(answer.simulate())):
        problem = replace(problem, effort=WIDE_GAP_SHARE * problem.effort)
    effort = Effort.starting(LAST_SLOW_SHARE * problem.effort, problem.deadline)
    if effort.moves(price) <= LONG_COOLINGS[0].moves * pairs:
        effort = Effort.starting(LAST_MILD_SHARE * problem.effort, problem.deadline)
    yield from improved_order(problem, answer, effort)


def improved_order(problem: Problem, answer: Solution, effort: Effort) -> Iterator[Solution]:
    """Run a long order search for the answer of any planner.

    Args:
        problem: The problem.
        answer: An answer that fits.
        effort: The effort available.

    Returns:
        Answers, each faster than the previous one.
    """
    if effort.remaining <= MIN_LONG_SEARCH_SIMULATIONS * price_of_simulation(answer):
        return
    value = step_time(problem, answer)
    for _, better in _better_orders(problem, value, answer, effort.split_off(effort.remaining), CORES, LONG_COOLINGS):
        yield replace(better, lower_bound=0, candidates=(), cut_off=effort.cut_off)


def improved_orders(
    problem: Problem,
    simulated: Sequence[tuple[Number, Solution]],
    effort: Effort,
    seconds: float,
    coolings: Sequence[Cooling],
) -> list[tuple[Number, Solution]]:
    """Search better orders of several solutions, given with their step times, in parallel."""
    workers = max(1, CORES // len(simulated))
    searches = [partial(_improve_order, problem, value, solution, workers, coolings) for value, solution in simulated]
    return [better for better in run_in_parallel(searches, effort, seconds) if better is not None]


def _improve_order(
    problem: Problem, value: Number, solution: Solution, workers: int, coolings: Sequence[Cooling], effort: Effort
) -> tuple[Number, Solution] | None:
    """The best order that `_better_orders` finds; None if none is faster."""
    best = None
    for better in _better_orders(problem, value, solution, effort, workers, coolings):
        best = better
    return best


def _better_orders(
    problem: Problem, value: Number, solution: Solution, effort: Effort, workers: int, coolings: Sequence[Cooling]
) -> Iterator[tuple[Number, Solution]]:
    """Search better orders of a solution with step time `value` by `workers` chains; yields faster ones."""
    price = MIN_SEARCH_SIMULATIONS * price_of_simulation(solution)
    if effort.remaining < price or not may_compile_orders(effort.deadline):
        return
    hosted = solution.schedule.host_steps
    start = solution.schedule.without_host_steps()
    solution = _with_deeper_level(problem, solution)
    # The order search does not model gradient reduction, blocking messages or transfers between peers.
    with suppress(DebubbleError):
        split = start.with_split_backwards()
        schedules = start, split, _with_explicit_recompute(split, solution.costs)
        problems = [OrderProblem.from_schedule(s, solution.costs, objective=problem.objective) for s in schedules]
        variants = [(replace(p, host_steps=hosted), s) for p, s in zip(problems, schedules, strict=True)]
        values = [_evaluate_order(*variant) for variant in variants]
        # Later variants give the search more freedom.
        last = max(i for i, time in enumerate(values) if time <= VARIANT_TOLERANCE * min(values))
        searched, initial = variants[last]
        time = searched.value(initial)
        best = Incumbent(schedule=initial, value=time, bound=lower_bound(searched), source="start")
        effort.deadline.extend_for_kernels(compile_kernel(searched, best))
        cooling = _cooling(searched, effort, coolings)
        stream = improve(
            searched, best, effort=effort, seed=problem.seed, workers=workers, temperatures=cooling.temperatures,
            coolings=cooling.shares, shares=FROM_A_PLAN,
        )  # fmt: skip
        for better in _reported(best, stream):
            timeline = searched.timeline(better.schedule)
            ordered = timeline.program.schedule
            if solution.costs.gathers:
                # The program's orders include weight gathers, which a schedule does not have.
                ordered = better.schedule.with_host_steps(hosted)
            candidate = replace(solution, schedule=ordered, timeline=timeline)
            if not candidate.schedule.deeper:
                candidate = _without_deeper_level(candidate)
            try:
                time = step_time(problem, candidate)
            except HostMemoryError:
                # The order search does not model host memory.
                continue
            if time < value:
                value = time
                yield time, candidate


def _reported(first: Incumbent, stream: Iterable[Incumbent]) -> Iterator[Incumbent]:
    """The first incumbent, those faster by MIN_REPORTED_GAIN than the previous one, and the last."""
    yield first
    value, last = float(first.value), None
    for last in stream:
        if last.value < (1 - MIN_REPORTED_GAIN) * value:
            value = float(last.value)
            yield last
            last = None
    if last is not None:
        yield last


def _price_of_slow_search(pairs: int) -> float:
    """Seconds of the reference machine for a brief order search from a high temperature."""
    return (BRIEF_COOLINGS[0].moves + 1) * pairs * price_of_move(pairs, recompute=True)


def _with_deeper_level(problem: Problem, solution: Solution) -> Solution:
    """Add a deeper recomputation level to a solution's costs, which some micro-batches may use."""
    if solution.deeper is not None or solution.partition is None or problem.levers is not None:
        return solution
    placement = solution.schedule.placement
    deeper = Levers(problem, problem.units, placement).deeper(solution.partition)
    return replace(solution, costs=problem.units.with_deeper_level(solution.costs, deeper, placement), deeper=deeper)


def _without_deeper_level(solution: Solution) -> Solution:
    """Remove the deeper recomputation level from a solution that does not use it."""
    costs, timeline = solution.costs.replace(recompute_deeper=None, activation_deeper=None), solution.timeline
    if timeline is not None:
        timeline = replace(timeline, program=replace(timeline.program, costs=costs))
    return replace(solution, costs=costs, deeper=None, timeline=timeline)


def affordable(simulated: Sequence[tuple[Number, Solution]], effort: Effort) -> int:
    """The number of these plans for which the remaining effort allows a slow order search."""
    pairs = max(solution.schedule.stages * solution.schedule.micro_batches for _, solution in simulated)
    return int(CORES * effort.remaining / _price_of_slow_search(pairs))


def _cooling(orders: OrderProblem, effort: Effort, coolings: Sequence[Cooling]) -> Cooling:
    """The first cooling for which the effort suffices, else the last one."""
    pairs = orders.stages * orders.micro_batches
    price = price_of_move(pairs, recompute=orders.recompute)
    moves = effort.moves(price)
    return next((cooling for cooling in coolings if moves > cooling.moves * pairs), coolings[-1])


def _with_explicit_recompute(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The schedule with recomputation as a separate R before the backward, which need not wait for the gradient.

    The search can then decide on recomputation per micro-batch.  An R restores a full stage at once, a fused backward
    one unit at a time, so stages whose R exceeds the memory limit stay fused.
    """
    fused: frozenset[int] = frozenset()
    while True:
        explicit = _with_explicit_recompute_except(schedule, fused)
        tables = OpCosts.from_schedule(explicit, costs).tables()
        try:
            for device in range(explicit.devices):
                check_memory(explicit, costs, device, tables)
        except OutOfMemoryError as error:
            stages = explicit.placement.stages_of[error.device]
            fusible = [stage for stage in stages if stage in schedule.fused_recompute - fused]
            if not fusible:
                return schedule
            fused |= {max(fusible, key=costs.dropped_bytes)}
        else:
            return explicit


def _with_explicit_recompute_except(schedule: Schedule, fused: frozenset[int]) -> Schedule:
    """The schedule with an R before every backward that recomputes, except in the `fused` stages."""
    existing = schedule.explicit_recompute
    explicit = schedule.fused_recompute - fused

    def operations(op: Op) -> tuple[Op, ...]:
        split = op.kind in BACKWARDS and op.stage in explicit and op[1:] not in existing
        return (op._replace(kind=Kind.R), op) if split else (op,)

    orders = tuple(tuple(operation for op in order for operation in operations(op)) for order in schedule.orders)
    return replace(schedule, orders=orders, fused_recompute=fused)
