"""The rounds of the joint search: points are drawn, annealed in ever fewer placements, and put into order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import (
    CutOffError,
    DebubbleError,
    InfeasibleError,
    Number,
    Placement,
)
from debubble.planners.joint.chain import PointChain, compile_kernels, may_compile, price_of_point
from debubble.planners.joint.exact import exact_plans
from debubble.planners.joint.levers import Levers, exceeds_devices, is_short
from debubble.planners.joint.orders import (
    BRIEF,
    WIDE_GAP,
    affordable,
    evaluated,
    gap_of,
    has_wide_gap,
    improved_order,
    improved_orders,
    price_of_simulation,
    side_by_side,
    step_time,
)
from debubble.planners.joint.refinement import refine
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.search.effort import CORES, Deadline, Effort

NOT_COMPILED = (
    "Its kernels are not compiled yet, which takes a minute once on a machine: plan without --deadline, or with a"
    " longer one."
)
CHUNKS = (1, 2, 3, 4, 5, 6)
"""Stages per device."""
CHUNKS_WITH_HOSTS, FEW_DEVICES = (2, 4, 6, 8, 12), 4
"""Stages per device where hosts have to step, and the most devices of such problems: hosts begin with the first stages
that are done, and small ones are done soon."""
CHUNKS_OF_SHORT = (2, 3, 4, 5, 6, 8)
"""Stages per device on more devices where states would take nearly all of their memory: 0.9% faster in the mean of 27
runs of six settings."""
STARTS_PER_PLACEMENT = 3
"""Chains that begin in every placement; more where there are few placements."""
STARTS_ON_DEVICES, MUCH_FASTER = 10, 0.93
"""Chains that are added where hosts may step but need not, and draw plans with all states on devices, which leave
little for activations: few changes do not lead from one kind to the other.  They are annealed if the best is this much
faster."""
DRAW_SHARE = 0.1
"""The part of the effort in which they draw their first points at random."""
FEWEST_STARTS, MOST_STARTS, MIN_POINTS = 10, 30, 500
"""The least and the most chains that are annealed, and the points that each of them tries at least if there are more.
They find soon most of what they find, and differ more by where they begin than by how long they continue."""
FINAL_TEMPERATURE = 0.0005
"""Temperature at which a chain ends, a part of the step's time."""


class Round(NamedTuple):
    """A round of annealing.

    Attributes:
        share: Of the effort.
        divisor: Of the number of chains.
        warm: The first temperature.
        least: The least chains that are left.
    """

    share: float
    divisor: int
    warm: float
    least: int = 4


FIRST_ROUND, ROUNDS = Round(0.16, 1, 0.005), (Round(0.1, 3, 0.004), Round(0.09, 8, 0.003))
ROUNDS_OF_WIDE_GAPS = (Round(0.4, 3, 0.004, least=2), Round(0.34, 8, 0.003, least=2))
"""The rounds that then follow the first."""
FURTHER_ROUND, MOST_FURTHER, FURTHER_GAIN = Round(0.5, 16, 0.006, least=2), 4, 0.004
"""The round that follows where the gap stays wide, with effort of its own, how often at most, and the share of the step
that each must gain for another one."""
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


def search(problem: Problem, units: Units, *, draft: bool) -> Iterator[Solution]:
    """Draw, anneal and order.

    Args:
        problem: What is asked.
        units: The model's units.
        draft: Whether the last order search is left to the caller, who does it with effort of its own.

    Returns:
        Plans that were simulated under the limit, each faster than those before it.

    Raises:
        InfeasibleError: If no plan of those that were tried fits.
    """
    effort = problem.begun()
    for best in _draft(problem, units, effort, alone=draft):
        yield best
    if not draft:
        for better in improved_order(problem, best, effort):
            best = better
            yield best
    if effort.cut_off:
        yield replace(best, cut_off=True)


def _draft(problem: Problem, units: Units, effort: Effort, *, alone: bool) -> Iterator[Solution]:
    """Draw, anneal, refine, and search orders briefly; ROUNDS leave a third of the effort.

    `alone` tells that no order search follows with this effort: where the gap is wide, rounds may have all of it.
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
    _draw(problem, chains, DRAW_SHARE, effort)
    chains = sorted(chains, key=lambda chain: chain.least)
    if units.hostable:
        chains = _with_states_on_devices(problem, levers, chains, effort)
    best: Number = math.inf
    with suppress(InfeasibleError):
        # One simulation, to have a plan at once, is not counted.
        best, solution = _simulated(problem, chains, Effort(math.inf, deadline=effort.deadline), plans=1)[0]
        yield solution
    chains = _annealed(problem, chains, count, FIRST_ROUND, effort)
    later = ROUNDS_OF_WIDE_GAPS if alone and has_wide_gap(problem, chains[0].least) else ROUNDS
    for each in later:
        chains = _annealed(problem, chains, count, each, effort)
    if alone:
        chains = _annealed_further(problem, chains, count, effort.deadline)
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
    simulated = simulated[: max(MIN_ORDERED, affordable(simulated, effort))]
    refining = [partial(_refined, problem, *entry) for entry in simulated]
    refined = side_by_side(refining, effort, REFINEMENT_SHARE * problem.effort)
    improved = improved_orders(problem, refined, effort, BRIEF_SHARE * effort.left, BRIEF)
    exact = _exact_plans(problem, units, [*refined, *improved], effort)
    value, solution = min([*refined, *improved, *exact], key=lambda entry: entry[0])
    if value < best:
        yield solution


def _annealed(
    problem: Problem, chains: Sequence[PointChain], count: int, round_: Round, effort: Effort
) -> list[PointChain]:
    """The chains, the best first, after a round of annealing of the first of them."""
    left = _varied(chains, max(count // round_.divisor, round_.least))
    searches = [partial(each.run, warm=round_.warm, cold=FINAL_TEMPERATURE) for each in left]
    side_by_side(searches, effort, round_.share * problem.effort)
    return sorted(chains, key=lambda chain: chain.least)


def _draw(problem: Problem, chains: Sequence[PointChain], share: float, effort: Effort) -> None:
    """Draw first points with a share of the effort; where devices are crowded once more, with effort of its own."""
    draws, seconds = [chain.draw for chain in chains], share * problem.effort
    side_by_side(draws, effort, seconds)
    if chains[0].levers.crowded:
        side_by_side(draws, Effort(seconds, deadline=effort.deadline), seconds)


def _annealed_further(problem: Problem, chains: list[PointChain], count: int, deadline: Deadline) -> list[PointChain]:
    """The chains after further rounds, as long as the gap is wide and a round gains enough."""
    for _ in range(MOST_FURTHER):
        before = chains[0].least
        if gap_of(problem, before) <= WIDE_GAP:
            break
        further = Effort(FURTHER_ROUND.share * problem.effort, deadline=deadline)
        chains = _annealed(problem, chains, count, FURTHER_ROUND, further)
        if chains[0].least > (1 - FURTHER_GAIN) * before:
            break
    return chains


def _varied(chains: Sequence[PointChain], count: int) -> list[PointChain]:
    """So many chains, the best first, at most half of them of one placement if there are others."""
    taken: list[PointChain] = []
    others: list[PointChain] = []
    for chain in chains:
        of_placement = sum(each.levers is chain.levers for each in taken)
        (taken if of_placement < max(count // 2, 1) else others).append(chain)
    return [*taken, *others][:count]


def _with_states_on_devices(
    problem: Problem, levers: Sequence[Levers], chains: list[PointChain], effort: Effort
) -> list[PointChain]:
    """Chains in turn with others whose first points keep all states on devices, if these are much faster."""
    fitting = [] if exceeds_devices(problem, levers[0].units) else levers
    starts = -(-STARTS_ON_DEVICES // max(len(fitting), 1))
    others = [
        PointChain(each, starts * problem.seed + start, hosts=False) for each in fitting for start in range(starts)
    ]
    if not others:
        return chains
    _draw(problem, others, DRAW_SHARE * len(others) / len(chains), effort)
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


def _placements(problem: Problem, units: Units) -> list[Placement]:
    """The placements that are tried: for each number of chunks, looped and in V."""
    chunks: Sequence[int] = CHUNKS
    if problem.chunks is not None:
        chunks = (problem.chunks,)
    elif problem.devices <= min(FEW_DEVICES, len(units.units) // CHUNKS_WITH_HOSTS[-1]):
        chunks = CHUNKS_WITH_HOSTS if exceeds_devices(problem, units) else CHUNKS
    elif is_short(problem, units) and problem.devices * CHUNKS_OF_SHORT[0] <= len(units.units):
        chunks = CHUNKS_OF_SHORT
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
        effort.spend(price_of_simulation(solution))
        try:
            solutions.append((step_time(problem, solution), solution))
        except DebubbleError as error:
            reason = error
    if not solutions:
        raise InfeasibleError(
            "No plan of those that were tried fits the memory limit."
            if reason is None
            else f"No plan of those that were tried fits the memory limit: {reason}"
        )
    return sorted(solutions, key=lambda entry: entry[0])


def _refined(problem: Problem, value: Number, solution: Solution, effort: Effort) -> tuple[Number, Solution]:
    """A solution whose single units recompute less, and its step; as it is where that is not faster in this order."""
    assert isinstance(problem.workload, ModelUnits)
    try:
        found = refine(problem.workload.units, partial(evaluated, problem), solution, effort)
        effort.spend(price_of_simulation(found))
        time = value if found is solution else step_time(problem, found)
    except DebubbleError:
        # Messages that wait for their receivers are simulated alone.
        return value, solution
    return (time, found) if time < value else (value, solution)
