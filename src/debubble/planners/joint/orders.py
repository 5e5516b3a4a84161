"""The order search of `joint`: better orders for plans of the chains, and at length for the fastest answer of all."""

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
from debubble.search.effort import CORES, SIMULATION, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

WIDE_GAP, WIDE_PAIRS = 0.18, 100
"""The gap above which better points are worth more than better orders, as memory is short, and the pairs of a device
and a micro-batch from which on that is so: on fewer, orders decide (gemma3-12b on 4 devices is 3% slower without)."""
WIDE_SHARE = 0.5
"""The part of the last search's effort that is spent where the gap is so wide."""


class Cooling(NamedTuple):
    """The cooling of an order search with enough moves.

    Attributes:
        moves: Moves per pair of a stage and a micro-batch from which on it cools so.
        temperatures: First temperatures, of the chains in turn, in mean operation times.
        shares: Shares of the search at which coolings begin.
    """

    moves: int
    temperatures: Sequence[float]
    shares: Sequence[float]


MILD = Cooling(0, MILD_TEMPERATURES, COOLINGS)
BRIEF = (Cooling(3500, (0.5,), COOLINGS), MILD)
"""The coolings of brief searches: mild ones keep what a start is worth, and a slow one begins hot."""
AT_LENGTH = (Cooling(900, (0.5, 0.15), (0.0, 1.0)), Cooling(270, (0.15,), (0.0, 1.0)), MILD)
"""The coolings of long searches, those for most moves first: one, as long as can be, where there are moves for it."""
LAST_SLOW_SHARE, LAST_MILD_SHARE = 1.5, 1.05
"""The parts of the effort in which the order of the fastest answer of all planners is searched: where there are moves
for the slowest of these coolings, whose length counts, and where there are fewer."""
MIN_SIMULATIONS = 0.1
"""The effort from which an order is searched, in simulations of its plan."""
VARIANT_TOLERANCE = 1.02
"""Times the fastest order that another may take to begin with if it leaves its search more to change."""
STEP = 0.002
"""Share of the time by which an order must be faster to be reported before its search ends."""
SIMULATIONS = 4
"""Simulations of a plan before and after the search of its order."""
T = TypeVar("T")


def has_wide_gap(problem: Problem, step: Number) -> bool:
    """Tell whether a step is so far above its bound that better points are worth more than better orders."""
    return problem.devices * problem.micro_batches >= WIDE_PAIRS and gap_of(problem, step) > WIDE_GAP


def gap_of(problem: Problem, step: Number) -> float:
    """The share by which a step is above what is proven."""
    return 1 - float(proven_step_bound(problem).time) / float(step)


def side_by_side(searches: Sequence[Callable[[Effort], T]], effort: Effort, seconds: float) -> list[T]:
    """Run searches on all cores, each with an equal share of what the reference machine does in so many seconds."""
    share = min(seconds, effort.left) * min(CORES / len(searches), 1)
    with ThreadPoolExecutor(available_cores()) as pool:
        running = [pool.submit(search, Effort(share, deadline=effort.deadline)) for search in searches]
        try:
            results = [search.result() for search in running]
        except BaseException:
            # A Ctrl-C, say: the searches that run end soon.
            effort.deadline.expire()
            raise
    effort.spend(seconds)
    return results


def price_of_simulation(solution: Solution) -> float:
    """Seconds of the reference machine to simulate a solution."""
    return SIMULATION * solution.schedule.stages * solution.schedule.micro_batches


def step_time(problem: Problem, solution: Solution) -> Number:
    """The time of the step; raises a DebubbleError if the solution does not fit."""
    timeline = solution.simulate()
    if isinstance(problem.workload, ModelUnits) and solution.partition is not None:
        check_host_memory(problem.workload.units, solution.partition, timeline)
    return problem.step_time(timeline)


def evaluated(problem: Problem, solution: Solution) -> float:
    """The time of the step, as the order search evaluates it; infinite if it does not fit."""
    schedule = solution.schedule.without_host_steps()
    orders = OrderProblem.of(schedule, solution.costs, objective=problem.objective)
    time = _evaluated_order(replace(orders, host_steps=solution.schedule.host_steps), schedule)
    return time + (0 if problem.tail is None else float(problem.tail.of_schedule(solution.schedule, solution.costs)))


def _evaluated_order(orders: OrderProblem, schedule: Schedule) -> float:
    """The objective of a schedule, as the order search evaluates it; infinite if it does not fit."""
    layout, floats, ints, scale = arrays_of(orders)
    return evaluate(layout, floats, ints, *encode(orders, schedule), math.inf) / scale


def last_search(problem: Problem, answer: Solution, *, drafted: bool) -> Iterator[Solution]:
    """Search the order of the fastest answer of all planners at length; yields what is faster.

    Args:
        problem: The problem.
        answer: The fastest answer.
        drafted: Whether `joint` has drafted plans, which has more of the effort for wide gaps.
    """
    pairs = answer.schedule.stages * answer.schedule.micro_batches
    price = price_of_move(pairs, recompute=True)
    if drafted and has_wide_gap(problem, problem.step_time(answer.simulate())):
        problem = replace(problem, effort=WIDE_SHARE * problem.effort)
    effort = Effort.starting(LAST_SLOW_SHARE * problem.effort, problem.deadline)
    if effort.moves(price) <= AT_LENGTH[0].moves * pairs:
        effort = Effort.starting(LAST_MILD_SHARE * problem.effort, problem.deadline)
    yield from improved_order(problem, answer, effort)


def improved_order(problem: Problem, answer: Solution, effort: Effort) -> Iterator[Solution]:
    """Search the order of an answer at length, whoever gave it.

    Args:
        problem: The problem.
        answer: An answer that fits.
        effort: What it may spend.

    Returns:
        Answers, each faster than those before it.
    """
    if effort.left <= SIMULATIONS * price_of_simulation(answer):
        return
    value = step_time(problem, answer)
    for _, better in _better_orders(problem, value, answer, effort.part(effort.left), CORES, AT_LENGTH):
        yield replace(better, lower_bound=0, candidates=(), cut_off=effort.cut_off)


def improved_orders(
    problem: Problem,
    simulated: Sequence[tuple[Number, Solution]],
    effort: Effort,
    seconds: float,
    coolings: Sequence[Cooling],
) -> list[tuple[Number, Solution]]:
    """Search better orders of some solutions next to the times of their steps, with a part of the effort."""
    workers = max(1, CORES // len(simulated))
    searches = [partial(_improve_order, problem, value, solution, workers, coolings) for value, solution in simulated]
    return [better for better in side_by_side(searches, effort, seconds) if better is not None]


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
    """Search better orders of a solution, whose step takes `value`, with so many chains; yields those faster."""
    if effort.left < MIN_SIMULATIONS * price_of_simulation(solution) or not may_compile_orders(effort.deadline):
        return
    hosted = solution.schedule.host_steps
    start = solution.schedule.without_host_steps()
    solution = _with_deeper_level(problem, solution)
    # The order search does not know gradient reduction, nor messages that block, nor peers.
    with suppress(DebubbleError):
        split = start.with_split_backwards()
        variants = [
            (replace(OrderProblem.of(each, solution.costs, objective=problem.objective), host_steps=hosted), each)
            for each in (start, split, _recomputing_apart(split, solution.costs))
        ]
        values = [_evaluated_order(*variant) for variant in variants]
        # The later variants leave the search more to change.
        last = max(i for i, time in enumerate(values) if time <= VARIANT_TOLERANCE * min(values))
        searched, begun = variants[last]
        time = searched.value(begun)
        best = Incumbent(schedule=begun, value=time, bound=lower_bound(searched), source="start")
        effort.deadline.extend_for_kernels(compile_kernel(searched, best))
        cooling = _cooling(searched, effort, coolings)
        stream = improve(
            searched, best, effort=effort, seed=problem.seed, workers=workers, hot=cooling.temperatures,
            coolings=cooling.shares, shares=FROM_A_PLAN,
        )  # fmt: skip
        for better in _in_steps(best, stream):
            timeline = searched.timeline(better.schedule)
            ordered = timeline.program.schedule
            if solution.costs.gathers:
                # The program's lists have gathers of weights, which no schedule has.
                ordered = better.schedule.with_host_steps(hosted)
            found = replace(solution, schedule=ordered, timeline=timeline)
            if not found.schedule.deeper:
                found = _without_deeper_level(found)
            try:
                time = step_time(problem, found)
            except HostMemoryError:
                # The order search does not know the hosts' limits.
                continue
            if time < value:
                value = time
                yield time, found


def _in_steps(first: Incumbent, stream: Iterable[Incumbent]) -> Iterator[Incumbent]:
    """The first incumbent, those that are faster by STEP than the one before, and the last."""
    yield first
    value, last = float(first.value), None
    for last in stream:
        if last.value < (1 - STEP) * value:
            value = float(last.value)
            yield last
            last = None
    if last is not None:
        yield last


def _price_of_slow_search(pairs: int) -> float:
    """Seconds of the reference machine for a brief search of an order that begins hot."""
    return (BRIEF[0].moves + 1) * pairs * price_of_move(pairs, recompute=True)


def _with_deeper_level(problem: Problem, solution: Solution) -> Solution:
    """The solution, whose costs know how its stages may recompute deeper, for some of their micro-batches."""
    if solution.deeper is not None or solution.partition is None or problem.levers is not None:
        return solution
    placement = solution.schedule.placement
    deeper = Levers(problem, problem.units, placement).deeper(solution.partition)
    return replace(solution, costs=problem.units.with_deeper_level(solution.costs, deeper, placement), deeper=deeper)


def _without_deeper_level(solution: Solution) -> Solution:
    """The solution of a schedule that recomputes every stage by one level."""
    costs, timeline = solution.costs.replace(recompute_deeper=None, activation_deeper=None), solution.timeline
    if timeline is not None:
        timeline = replace(timeline, program=replace(timeline.program, costs=costs))
    return replace(solution, costs=costs, deeper=None, timeline=timeline)


def affordable(simulated: Sequence[tuple[Number, Solution]], effort: Effort) -> int:
    """The number of these plans whose orders can all be searched slowly with the effort that is left."""
    pairs = max(solution.schedule.stages * solution.schedule.micro_batches for _, solution in simulated)
    return int(CORES * effort.left / _price_of_slow_search(pairs))


def _cooling(orders: OrderProblem, effort: Effort, coolings: Sequence[Cooling]) -> Cooling:
    """The first of the coolings for which the effort suffices; the last one is for any."""
    pairs = orders.stages * orders.micro_batches
    price = price_of_move(pairs, recompute=orders.recompute)
    moves = effort.moves(price)
    return next((cooling for cooling in coolings if moves > cooling.moves * pairs), coolings[-1])


def _recomputing_apart(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The schedule with an R before backwards that recompute, which need not wait for the gradient.

    The search may then recompute a stage's micro-batches or not, one by one.  An R brings back a whole stage, a
    backward one unit after the other: stages for which memory lacks stay as they are.
    """
    fused: frozenset[int] = frozenset()
    while True:
        apart = _recomputing_apart_except(schedule, fused)
        tables = OpCosts.from_schedule(apart, costs).tables()
        try:
            for device in range(apart.devices):
                check_memory(apart, costs, device, tables)
        except OutOfMemoryError as error:
            stages = apart.placement.stages_of[error.device]
            tried = [stage for stage in stages if stage in schedule.fused_recompute - fused]
            if not tried:
                return schedule
            fused |= {max(tried, key=costs.dropped_bytes)}
        else:
            return apart


def _recomputing_apart_except(schedule: Schedule, fused: frozenset[int]) -> Schedule:
    """The schedule with an R before every backward that recomputes, except those of some stages."""
    apart = schedule.explicit_recompute
    again = schedule.fused_recompute - fused

    def parts(op: Op) -> tuple[Op, ...]:
        split = op.kind in BACKWARDS and op.stage in again and op[1:] not in apart
        return (op._replace(kind=Kind.R), op) if split else (op,)

    orders = tuple(tuple(part for op in order for part in parts(op)) for order in schedule.orders)
    return replace(schedule, orders=orders, fused_recompute=fused)
