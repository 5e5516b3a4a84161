"""The rounds of the joint search: points are drawn, annealed in ever fewer placements, and put into order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from debubble.costs.host_memory import check_host_memory
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import (
    CutOffError,
    DebubbleError,
    InfeasibleError,
    Kind,
    Number,
    Op,
    OutOfMemoryError,
    Placement,
    Schedule,
    StageCosts,
)
from debubble.ir.lowering.admission import check_memory
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import BACKWARDS
from debubble.planners.bounds import proven_step_bound
from debubble.planners.joint.chain import PointChain, compile_kernels, may_compile, price_of_point
from debubble.planners.joint.exact import exact_plans
from debubble.planners.joint.levers import Levers, exceeds_devices
from debubble.planners.joint.refinement import refine
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.search.annealing.arrays import arrays_of, encode
from debubble.search.annealing.evaluate import evaluate
from debubble.search.annealing.layout import FROM_A_PLAN
from debubble.search.annealing.search import COOLINGS, MILD_TEMPERATURES, compile_kernel, improve
from debubble.search.annealing.search import may_compile as may_compile_orders
from debubble.search.bounds import lower_bound
from debubble.search.effort import SIMULATION, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

NOT_COMPILED = (
    "Its kernels are not compiled yet, which takes a minute once on a machine: plan without --deadline, or with a"
    " longer one."
)
CHUNKS = (1, 2, 3, 4, 5, 6)
"""Stages per device."""
CHUNKS_WITH_HOSTS, FEW_DEVICES = (2, 4, 6, 8, 12), 4
"""Stages per device where hosts have to step, and the most devices of such problems: hosts begin with the first stages
that are done, and small ones are done soon."""
STARTS_PER_PLACEMENT = 3
"""Chains that begin in every placement; more where there are few placements."""
STARTS_ON_DEVICES, MUCH_FASTER = 10, 0.93
"""Where hosts may step but need not, so many chains more draw plans with all states on devices, which leave little for
activations: few changes do not lead from one kind to the other.  They are annealed if the best is this much faster."""
DRAW_SHARE = 0.1
"""The part of the effort in which they draw their first points at random."""
FEWEST_STARTS, MOST_STARTS, MIN_POINTS = 10, 30, 500
"""How many chains are annealed at least and at most, and the points that each of them tries at least if there are more.
They find soon most of what they find, and differ more by where they begin than by how long they continue."""
FINAL_TEMPERATURE = 0.0005
"""Temperature at which a chain ends, a part of the step's time."""


class Round(NamedTuple):
    """A round of annealing.

    Attributes:
        share: Of the effort.
        divisor: Of the number of chains; at least MIN_CHAINS are left.
        warm: The first temperature.
    """

    share: float
    divisor: int
    warm: float


FIRST_ROUND, ROUNDS = Round(0.16, 1, 0.005), (Round(0.1, 3, 0.004), Round(0.09, 8, 0.003))
WIDE_GAP = 0.18
"""The gap of the best chain after the first round above which the others are longer, and orders searched more briefly:
where memory is short, what is missing is less in the order."""
ROUNDS_OF_WIDE_GAPS = (Round(0.4, 3, 0.004), Round(0.34, 8, 0.003))
"""The rounds that then follow the first."""
WIDE_SHARE = 0.5
"""The part of the last search's effort that is then spent."""
MIN_CHAINS = 4
MAX_SIMULATED = 6
"""Plans that are simulated."""
MIN_ORDERED, BRIEF_SHARE = 4, 0.3
"""Plans whose order is searched, more where the effort suffices for slow searches, and the share of the effort that is
left for that; the order of the best of them is searched at length.  Without it setting E of docs/joint.md is 2.7%
slower."""
EXACT, EXACT_PART, EXACT_SHARE = 0.5, 0.8, 0.5
"""The least seconds of the exact search of small problems, a part of the effort if that is more, and the part of what
is left of the effort that it has in addition."""
REFINEMENT_SHARE = 0.05
"""The part of the effort in which single units of each of these plans recompute less."""


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
CORES = 2
"""Chains in parallel: the reference machine has so many cores."""
VARIANT_TOLERANCE = 1.02
"""How much slower an order may be to begin with that leaves its search more to change."""
STEP = 0.002
"""Share of the time by which an order must be faster to be reported before its search ends."""
SIMULATIONS = 4
"""Simulations of a plan before and after the search of its order."""


def search(problem: Problem, units: Units) -> Iterator[Solution]:
    """Draw, anneal and order.

    Args:
        problem: What is asked.
        units: The model's units.

    Returns:
        Plans that were simulated under the limit, each faster than those before it.

    Raises:
        InfeasibleError: If no plan of those that were tried fits.
    """
    effort = problem.begun()
    for best in _draft(problem, units, effort):
        yield best
    for better in improved_order(problem, best, effort):
        best = better
        yield best
    if effort.cut_off:
        yield replace(best, cut_off=True)


def draft(problem: Problem, units: Units) -> Iterator[Solution]:
    """The plans of `search` before its last order search; a third of the effort is left then."""
    effort = problem.begun()
    for best in _draft(problem, units, effort):
        yield best
    if effort.cut_off:
        yield replace(best, cut_off=True)


def _draft(problem: Problem, units: Units, effort: Effort) -> Iterator[Solution]:
    """Draw, anneal, refine, and search orders briefly, which leaves a third of the effort.

    Raises InfeasibleError if no plan of those that were tried fits.
    """
    if not may_compile(effort.deadline):
        raise CutOffError(NOT_COMPILED)
    levers = [Levers(problem, units, placement) for placement in _placements(problem, units)]
    points = CORES * FIRST_ROUND.share * problem.effort / max(map(price_of_point, levers))
    count = max(FEWEST_STARTS, min(MOST_STARTS, int(points / MIN_POINTS)))
    starts = max(STARTS_PER_PLACEMENT, count // len(levers))
    chains = [PointChain(each, starts * problem.seed + start) for each in levers for start in range(starts)]
    effort.deadline.extend_for_kernels(compile_kernels(chains[0].levers))
    _side_by_side([chain.draw for chain in chains], effort, DRAW_SHARE * problem.effort)
    chains = sorted(chains, key=lambda chain: chain.least)
    if units.hostable:
        chains = _with_states_on_devices(problem, levers, chains, effort)
    best: Number = math.inf
    with suppress(InfeasibleError):
        # One simulation, to have a plan at once, is not counted.
        best, solution = _simulated(problem, chains, Effort(math.inf, deadline=effort.deadline), plans=1)[0]
        yield solution
    chains = _annealed(problem, chains, count, FIRST_ROUND, effort)
    for each in ROUNDS_OF_WIDE_GAPS if _has_wide_gap(problem, chains[0].least) else ROUNDS:
        chains = _annealed(problem, chains, count, each, effort)
    if best < math.inf and effort.deadline.passed:
        return
    try:
        simulated = _simulated(problem, chains, effort, plans=MAX_SIMULATED)
    except InfeasibleError:
        exact = _exact_plans(problem, units, [], effort)
        if not exact:
            raise
        yield exact[-1][1]
        return
    if simulated[0][0] < best:
        best, solution = simulated[0]
        yield solution
    if effort.deadline.passed:
        return
    simulated = simulated[: max(MIN_ORDERED, _affordable(simulated, effort))]
    refining = [partial(_refined, problem, *entry) for entry in simulated]
    refined = _side_by_side(refining, effort, REFINEMENT_SHARE * problem.effort)
    improved = _improved_orders(problem, refined, effort, BRIEF_SHARE * effort.left, BRIEF)
    exact = _exact_plans(problem, units, [*refined, *improved], effort)
    value, solution = min([*refined, *improved, *exact], key=lambda entry: entry[0])
    if value < best:
        yield solution


def _annealed(
    problem: Problem, chains: Sequence[PointChain], count: int, round_: Round, effort: Effort
) -> list[PointChain]:
    """The chains, the best first, after a round of annealing of the first of them."""
    left = chains[: max(count // round_.divisor, MIN_CHAINS)]
    searches = [partial(each.run, warm=round_.warm, cold=FINAL_TEMPERATURE) for each in left]
    _side_by_side(searches, effort, round_.share * problem.effort)
    return sorted(chains, key=lambda chain: chain.least)


def _has_wide_gap(problem: Problem, step: Number) -> bool:
    """Tell whether a step is so far above its bound that better points are worth more than better orders."""
    return float(proven_step_bound(problem).time) < (1 - WIDE_GAP) * float(step)


def _with_states_on_devices(
    problem: Problem, levers: Sequence[Levers], chains: list[PointChain], effort: Effort
) -> list[PointChain]:
    """Chains in turn with others whose first points keep all states on devices, if these are much faster."""
    fitting = [each for each in levers if not each.overfull]
    starts = -(-STARTS_ON_DEVICES // max(len(fitting), 1))
    others = [
        PointChain(each, starts * problem.seed + start, hosts=False) for each in fitting for start in range(starts)
    ]
    if not others:
        return chains
    _side_by_side([chain.draw for chain in others], effort, DRAW_SHARE * problem.effort * len(others) / len(chains))
    others.sort(key=lambda chain: chain.least)
    if others[0].least > MUCH_FASTER * chains[0].least:
        return chains
    return [chain for pair in zip_longest(others, chains) for chain in pair if chain is not None]


def _exact_plans(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], effort: Effort
) -> list[tuple[Number, Solution]]:
    """The exact search's plans, with effort of its own: few problems need all of it."""
    own = max(EXACT, EXACT_PART * problem.effort)
    limit = Effort(own + EXACT_SHARE * effort.left, deadline=effort.deadline)
    return exact_plans(problem, units, plans, limit)


T = TypeVar("T")


def _side_by_side(searches: Sequence[Callable[[Effort], T]], effort: Effort, seconds: float) -> list[T]:
    """Run searches on all cores, each with an equal share of what the cores can do in so many seconds."""
    share = min(seconds, effort.left) * min(CORES / len(searches), 1)
    with ThreadPoolExecutor(CORES) as pool:
        running = [pool.submit(search, Effort(share, deadline=effort.deadline)) for search in searches]
        try:
            results = [search.result() for search in running]
        except BaseException:
            # A Ctrl-C, say: the searches that run end soon.
            effort.deadline.expire()
            raise
    effort.spend(seconds)
    return results


def _placements(problem: Problem, units: Units) -> list[Placement]:
    """The placements that are tried: for each number of chunks, looped and in V."""
    chunks: Sequence[int] = CHUNKS
    if problem.chunks is not None:
        chunks = (problem.chunks,)
    elif problem.devices <= min(FEW_DEVICES, len(units.units) // CHUNKS_WITH_HOSTS[-1]):
        chunks = CHUNKS_WITH_HOSTS if exceeds_devices(problem, units) else CHUNKS
    return [
        make(problem.devices, v)
        for v in chunks
        if problem.devices * v <= len(units.units)
        for make in ((Placement.looped,) if 1 in (v, problem.devices) else (Placement.v_shape, Placement.looped))
    ]


def _simulated(
    problem: Problem, chains: Sequence[PointChain], effort: Effort, *, plans: int
) -> list[tuple[Number, Solution]]:
    """So many plans of chains that fit and are cut differently, by the time of their step, the fastest first."""
    solutions: list[tuple[Number, Solution]] = []
    reason: DebubbleError | None = None
    partitions: set[tuple[Placement, Partition | None]] = set()
    for chain in (chain for chain in chains if chain.complete):
        partition = chain.levers.placement, chain.levers.partition(chain.best)
        if len(partitions) == plans or (solutions and effort.over):
            break
        if partition in partitions:
            continue
        partitions.add(partition)
        solution = chain.levers.solution(chain.best)
        effort.spend(_price_of_simulation(solution))
        try:
            solutions.append((_step_time(problem, solution), solution))
        except DebubbleError as error:
            reason = error
    if not solutions:
        raise InfeasibleError(
            "No plan of those that were tried fits the memory limit."
            if reason is None
            else f"No plan of those that were tried fits the memory limit: {reason}"
        )
    return sorted(solutions, key=lambda entry: entry[0])


def _price_of_simulation(solution: Solution) -> float:
    """Seconds of the reference machine to simulate a solution."""
    return SIMULATION * solution.schedule.stages * solution.schedule.micro_batches


def _step_time(problem: Problem, solution: Solution) -> Number:
    """The time of the step; raises a DebubbleError if the solution does not fit."""
    timeline = solution.simulate()
    if isinstance(problem.workload, ModelUnits) and solution.partition is not None:
        check_host_memory(problem.workload.units, solution.partition, timeline)
    return problem.step_time(timeline)


def _refined(problem: Problem, value: Number, solution: Solution, effort: Effort) -> tuple[Number, Solution]:
    """A solution whose single units recompute less, and its step; as it is where that is not faster in this order."""
    assert isinstance(problem.workload, ModelUnits)
    try:
        found = refine(problem.workload.units, partial(_evaluated, problem), solution, effort)
        effort.spend(_price_of_simulation(found))
        time = value if found is solution else _step_time(problem, found)
    except DebubbleError:
        # Messages that wait for their receivers are simulated alone.
        return value, solution
    return (time, found) if time < value else (value, solution)


def _evaluated(problem: Problem, solution: Solution) -> float:
    """The time of the step, as the order search evaluates it; infinite if it does not fit."""
    schedule = solution.schedule.without_host_steps()
    orders = OrderProblem.of(schedule, solution.costs, objective=problem.objective)
    time = _evaluated_order(replace(orders, host_steps=solution.schedule.host_steps), schedule)
    return time + (0 if problem.tail is None else float(problem.tail.of(solution.schedule, solution.costs)))


def _evaluated_order(orders: OrderProblem, schedule: Schedule) -> float:
    """The objective of a schedule, as the order search evaluates it; infinite if it does not fit."""
    layout, floats, ints, scale = arrays_of(orders)
    return evaluate(layout, floats, ints, *encode(orders, schedule), math.inf) / scale


def last_search(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """Search the order of the fastest answer of all planners at length; yields what is faster."""
    pairs = answer.schedule.stages * answer.schedule.micro_batches
    price = price_of_move(pairs, recompute=True)
    if _has_wide_gap(problem, problem.step_time(answer.simulate())):
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
    if effort.left <= SIMULATIONS * _price_of_simulation(answer):
        return
    value = _step_time(problem, answer)
    for _, better in _better_orders(problem, value, answer, effort.part(effort.left), CORES, AT_LENGTH):
        yield replace(better, lower_bound=0, candidates=(), cut_off=effort.cut_off)


def _improved_orders(
    problem: Problem,
    simulated: Sequence[tuple[Number, Solution]],
    effort: Effort,
    seconds: float,
    coolings: Sequence[Cooling],
) -> list[tuple[Number, Solution]]:
    """Search better orders of some solutions next to the times of their steps, with a part of the effort."""
    workers = max(1, CORES // len(simulated))
    searches = [partial(_improve_order, problem, value, solution, workers, coolings) for value, solution in simulated]
    return [better for better in _side_by_side(searches, effort, seconds) if better is not None]


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
    if effort.left < MIN_SIMULATIONS * _price_of_simulation(solution) or not may_compile_orders(effort.deadline):
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
            found = replace(solution, schedule=better.schedule.with_host_steps(hosted))
            if not found.schedule.deeper:
                found = _without_deeper_level(found)
            time = _step_time(problem, found)
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
    costs = solution.costs.replace(recompute_deeper=None, activation_deeper=None)
    return replace(solution, costs=costs, deeper=None)


def _affordable(simulated: Sequence[tuple[Number, Solution]], effort: Effort) -> int:
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
        tables = OpCosts.of(apart, costs).tables()
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
