"""The rounds of the joint search: draw points, anneal them with fewer chains per round, search the best orders."""

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
    BRIEF_COOLINGS,
    WIDE_GAP,
    affordable,
    evaluate_solution,
    gap_of,
    has_wide_gap,
    improved_order,
    improved_orders,
    price_of_simulation,
    run_in_parallel,
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
CHUNKS_WITH_HOSTS, MAX_DEVICES_WITH_HOSTS = (2, 4, 6, 8, 12), 4
"""Stages per device where optimizer steps have to be offloaded, for up to this many devices: host steps begin when a
stage is done, and short stages are done early."""
CHUNKS_OF_SHORT_MEMORY = (2, 3, 4, 5, 6, 8)
"""Stages per device on more devices if states would take nearly all of their memory: 0.9% faster on average in 27 runs
of six settings."""
MIN_CHAINS_PER_PLACEMENT = 3
"""Minimum of chains per placement; with few placements there are more."""
DEVICE_STATE_CHAINS, MAX_TIME_RATIO = 10, 0.93
"""Chains added if offloading the optimizer is possible but not necessary.  They draw plans with all states on devices,
which annealing hardly reaches from plans with offloaded ones, and are annealed if their best step takes at most this
fraction of the other chains' best."""
DRAW_SHARE = 0.1
"""Fraction of the effort spent on drawing random initial points."""
MIN_CHAINS, MAX_CHAINS, POINTS_PER_CHAIN = 10, 30, 500
"""Limits on the number of chains, and the points per chain from which it is derived in between.  Chains find most
improvements early, and their starts matter more than their length."""
FINAL_TEMPERATURE = 0.0005
"""Temperature at which a chain ends, as a fraction of the step time."""


class Round(NamedTuple):
    """A round of annealing.

    Attributes:
        share: Fraction of the effort.
        chain_divisor: The number of chains is divided by this.
        initial_temperature: Temperature at the start, as a fraction of the step time.
        min_chains: Minimum number of chains.
    """

    share: float
    chain_divisor: int
    initial_temperature: float
    min_chains: int = 4


FIRST_ROUND, ROUNDS = Round(0.16, 1, 0.005), (Round(0.1, 3, 0.004), Round(0.09, 8, 0.003))
ROUNDS_OF_WIDE_GAPS = (Round(0.4, 3, 0.004, min_chains=2), Round(0.34, 8, 0.003, min_chains=2))
"""The rounds after the first if the gap to the bound is wide and the effort needs no reserve for an order search."""
FURTHER_ROUND, MAX_FURTHER_ROUNDS, FURTHER_GAIN = Round(0.5, 16, 0.006, min_chains=2), 4, 0.004
"""The round repeated with additional effort while the gap stays wide, how often at most, and the fraction of the step
that a round must gain for another one to follow."""
MAX_SIMULATED = 6
"""Number of plans that are simulated."""
MIN_ORDERED, BRIEF_SHARE = 4, 0.3
"""Minimum number of plans whose order is searched briefly, and the fraction of the remaining effort for that; the order
of the best one is then searched at length.  Without brief searches setting E of docs/joint.md is 2.7% slower."""
MIN_EXACT_SECONDS, MIN_EXACT_SHARE, EXACT_SHARE_OF_REST = 0.5, 0.8, 0.5
"""Effort of the exact search of small problems: the larger of these seconds and this fraction of the effort, plus this
fraction of the remaining effort."""
REFINEMENT_SHARE = 0.05
"""Fraction of the effort spent on refining the recomputation of these plans' single units."""


def search(problem: Problem, units: Units, *, draft: bool) -> Iterator[Solution]:
    """Draw and anneal points, then search their orders.

    Args:
        problem: The problem.
        units: The model's units.
        draft: Whether to omit the final order search, which the caller then runs with its own effort.

    Returns:
        Plans simulated under the memory limit, each faster than the previous one.

    Raises:
        InfeasibleError: If none of the plans tried fits.
    """
    effort = problem.begun()
    for best in _draft(problem, units, effort, no_order_search=draft):
        yield best
    if not draft:
        for better in improved_order(problem, best, effort):
            best = better
            yield best
    if effort.cut_off:
        yield replace(best, cut_off=True)


def _draft(problem: Problem, units: Units, effort: Effort, *, no_order_search: bool) -> Iterator[Solution]:
    """Draw, anneal, refine and search orders briefly; with ROUNDS, a third of the effort remains.

    With `no_order_search` none follows with this effort: where the gap is wide, the rounds may use all of it.
    Raises InfeasibleError if none of the plans tried fits.
    """
    if not may_compile(effort.deadline):
        raise CutOffError(NOT_COMPILED)
    levers = [Levers(problem, units, placement) for placement in _placements(problem, units)]
    points = CORES * FIRST_ROUND.share * problem.effort / max(map(price_of_point, levers))
    count = max(MIN_CHAINS, min(MAX_CHAINS, int(points / POINTS_PER_CHAIN)))
    starts = max(MIN_CHAINS_PER_PLACEMENT, count // len(levers))
    chains = [PointChain(space, starts * problem.seed + start) for space in levers for start in range(starts)]
    effort.deadline.extend_for_kernels(compile_kernels(chains[0].levers))
    _draw(problem, chains, DRAW_SHARE, effort)
    chains = sorted(chains, key=lambda chain: chain.best_score)
    if units.hostable:
        chains = _with_states_on_devices(problem, levers, chains, effort)
    best: Number = math.inf
    with suppress(InfeasibleError):
        # This one simulation provides a first plan at once and is not counted.
        best, solution = _simulated(problem, chains, Effort(math.inf, deadline=effort.deadline), plans=1)[0]
        yield solution
    chains = _annealed(problem, chains, count, FIRST_ROUND, effort)
    rounds = ROUNDS_OF_WIDE_GAPS if no_order_search and has_wide_gap(problem, chains[0].best_score) else ROUNDS
    for round_ in rounds:
        chains = _annealed(problem, chains, count, round_, effort)
    if no_order_search:
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
    refined = run_in_parallel(refining, effort, REFINEMENT_SHARE * problem.effort)
    improved = improved_orders(problem, refined, effort, BRIEF_SHARE * effort.remaining, BRIEF_COOLINGS)
    exact = _exact_plans(problem, units, [*refined, *improved], effort)
    value, solution = min([*refined, *improved, *exact], key=lambda entry: entry[0])
    if value < best:
        yield solution


def _annealed(
    problem: Problem, chains: Sequence[PointChain], count: int, round_: Round, effort: Effort
) -> list[PointChain]:
    """Anneal some of the best chains; returns all chains, the best first."""
    selected = _diverse(chains, max(count // round_.chain_divisor, round_.min_chains))
    searches = [partial(chain.run, initial=round_.initial_temperature, final=FINAL_TEMPERATURE) for chain in selected]
    run_in_parallel(searches, effort, round_.share * problem.effort)
    return sorted(chains, key=lambda chain: chain.best_score)


def _draw(problem: Problem, chains: Sequence[PointChain], share: float, effort: Effort) -> None:
    """Draw initial points with a share of the effort, and once more with additional effort if devices are crowded."""
    draws, seconds = [chain.draw for chain in chains], share * problem.effort
    run_in_parallel(draws, effort, seconds)
    if chains[0].levers.crowded:
        run_in_parallel(draws, Effort(seconds, deadline=effort.deadline), seconds)


def _annealed_further(problem: Problem, chains: list[PointChain], count: int, deadline: Deadline) -> list[PointChain]:
    """Anneal for further rounds while the gap is wide and each round gains enough; returns the chains."""
    for _ in range(MAX_FURTHER_ROUNDS):
        previous = chains[0].best_score
        if gap_of(problem, previous) <= WIDE_GAP:
            break
        further = Effort(FURTHER_ROUND.share * problem.effort, deadline=deadline)
        chains = _annealed(problem, chains, count, FURTHER_ROUND, further)
        if chains[0].best_score > (1 - FURTHER_GAIN) * previous:
            break
    return chains


def _diverse(chains: Sequence[PointChain], count: int) -> list[PointChain]:
    """The best `count` chains, with at most half of them from one placement if there are others."""
    selected: list[PointChain] = []
    remaining: list[PointChain] = []
    for chain in chains:
        of_placement = sum(other.levers is chain.levers for other in selected)
        (selected if of_placement < max(count // 2, 1) else remaining).append(chain)
    return [*selected, *remaining][:count]


def _with_states_on_devices(
    problem: Problem, levers: Sequence[Levers], chains: list[PointChain], effort: Effort
) -> list[PointChain]:
    """Interleave chains that start with all states on devices, if these are much faster."""
    fitting = [] if exceeds_devices(problem, levers[0].units) else levers
    starts = -(-DEVICE_STATE_CHAINS // max(len(fitting), 1))
    device_chains = [
        PointChain(space, starts * problem.seed + start, hosts=False) for space in fitting for start in range(starts)
    ]
    if not device_chains:
        return chains
    _draw(problem, device_chains, DRAW_SHARE * len(device_chains) / len(chains), effort)
    device_chains.sort(key=lambda chain: chain.best_score)
    if device_chains[0].best_score > MAX_TIME_RATIO * chains[0].best_score:
        return chains
    return [chain for pair in zip_longest(device_chains, chains) for chain in pair if chain is not None]


def _exact_plans(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], effort: Effort
) -> list[tuple[Number, Solution]]:
    """The exact search's plans, with additional effort, of which few problems need all."""
    minimum = max(MIN_EXACT_SECONDS, MIN_EXACT_SHARE * problem.effort)
    limit = Effort(minimum + EXACT_SHARE_OF_REST * effort.remaining, deadline=effort.deadline)
    return exact_plans(problem, units, plans, limit)


def _placements(problem: Problem, units: Units) -> list[Placement]:
    """The placements to try: looped and V-shaped for each number of chunks."""
    chunks: Sequence[int] = CHUNKS
    if problem.chunks is not None:
        chunks = (problem.chunks,)
    elif problem.devices <= min(MAX_DEVICES_WITH_HOSTS, len(units.units) // CHUNKS_WITH_HOSTS[-1]):
        chunks = CHUNKS_WITH_HOSTS if exceeds_devices(problem, units) else CHUNKS
    elif is_short(problem, units) and problem.devices * CHUNKS_OF_SHORT_MEMORY[0] <= len(units.units):
        chunks = CHUNKS_OF_SHORT_MEMORY
    return [
        make(problem.devices, v)
        for v in chunks
        if problem.devices * v <= len(units.units)
        for make in ((Placement.looped,) if 1 in (v, problem.devices) else (Placement.v_shape, Placement.looped))
    ]


def _simulated(
    problem: Problem, chains: Sequence[PointChain], effort: Effort, *, plans: int
) -> list[tuple[Number, Solution]]:
    """Simulate up to `plans` chain results with different partitions; returns those that fit, the fastest first."""
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
    """Let single units of a solution recompute less; returns the original with its step time if that is not faster."""
    assert isinstance(problem.workload, ModelUnits)
    try:
        refined = refine(problem.workload.units, partial(evaluate_solution, problem), solution, effort)
        effort.spend(price_of_simulation(refined))
        time = value if refined is solution else step_time(problem, refined)
    except DebubbleError:
        # The order search cannot evaluate blocking messages.
        return value, solution
    return (time, refined) if time < value else (value, solution)
