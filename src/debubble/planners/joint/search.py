"""The rounds of the joint search: points are drawn, annealed in ever fewer placements, and put into order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from debubble.costs.host_memory import check_host_memory
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Kind, Number, Placement, Schedule
from debubble.planners.joint.annealing import Walk
from debubble.planners.joint.levers import Levers, step_on_host
from debubble.planners.problem import Problem, Solution
from debubble.search.bounds import lower_bound
from debubble.search.effort import SIMULATION, Effort
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import simulate

CHUNKS = (1, 2, 3, 4, 5, 6)
"""Stages per device; a device alone has no bubble that more than one could fill."""
DRAWING = 0.1
"""The part of the effort in which points are drawn at random."""
ROUNDS = ((6, 0.25, 0.01, 0.001), (2, 0.25, 0.005, 0.0002))
"""How many placements go on, with what part of the effort for all of them, and the temperatures at both ends."""
ORDERED = 2
"""Plans whose order is searched with the effort that is left."""
CORES = 2
"""Walks side by side: the reference machine has so many cores."""


def search(problem: Problem, units: Units) -> Solution:
    """Draw, anneal and order.

    Args:
        problem: What is asked.
        units: The model's units.

    Returns:
        The fastest plan that was found, simulated under the limit.

    Raises:
        InfeasibleError: If no plan of those that were tried fits.
    """
    effort = problem.begun()
    walks = [Walk(Levers(problem, units, placement), problem.seed) for placement in _placements(problem, units)]
    _side_by_side([walk.draw for walk in walks], effort, DRAWING * problem.effort)
    for count, share, warm, cold in ROUNDS:
        walks = sorted(walks, key=lambda walk: walk.least)[:count]
        _side_by_side([partial(walk.run, warm=warm, cold=cold) for walk in walks], effort, share * problem.effort)
    found = _simulated(problem, units, walks, effort)[:ORDERED]
    improved: list[tuple[Number, Solution]] = []
    searches = [partial(_improve_order, problem, units, value, solution, improved) for value, solution in found]
    _side_by_side(searches, effort, effort.left)
    _, best = min([*found, *improved], key=lambda entry: entry[0])
    return replace(best, cut_off=effort.cut_off)


def _side_by_side(searches: Sequence[Callable[[Effort], None]], effort: Effort, seconds: float) -> None:
    """Run searches on all cores, each with an equal share of what the cores can do in so many seconds."""
    share = min(seconds, effort.left) * min(CORES / len(searches), 1)
    with ThreadPoolExecutor(CORES) as pool:
        for done in [pool.submit(search, Effort(share, brake=effort.brake)) for search in searches]:
            done.result()
    effort.spend(seconds)


def _placements(problem: Problem, units: Units) -> list[Placement]:
    """The placements that are tried: for each number of chunks, looped and in V."""
    chunks = (problem.chunks,) if problem.chunks is not None else CHUNKS if problem.devices > 1 else CHUNKS[:1]
    placements = [
        make(problem.devices, v)
        for v in chunks
        if problem.devices * v <= len(units.units)
        for make in ((Placement.looped,) if 1 in (v, problem.devices) else (Placement.v_shape, Placement.looped))
    ]
    if not placements:
        raise InfeasibleError(
            f"{len(units.units)} model units cannot fill {problem.devices * chunks[0]} stages; use"
            " fewer devices or chunks."
        )
    return placements


def _simulated(problem: Problem, units: Units, walks: Sequence[Walk], effort: Effort) -> list[tuple[Number, Solution]]:
    """The walks' best plans that fit, by the time of their step, the fastest first."""
    solutions: list[tuple[Number, Solution]] = []
    reason: DebubbleError | None = None
    for walk in walks:
        solution = walk.levers.solution(walk.best)
        effort.spend(SIMULATION * walk.levers.placement.stages * problem.micro_batches)
        try:
            solutions.append((_step_time(problem, units, solution), solution))
        except DebubbleError as error:
            reason = error
    if not solutions:
        raise InfeasibleError(
            "No plan of those that were tried fits the memory limit."
            if reason is None
            else f"No plan of those that were tried fits the memory limit: {reason}"
        )
    return sorted(solutions, key=lambda entry: entry[0])


def _step_time(problem: Problem, units: Units, solution: Solution) -> Number:
    """The time of the step; raises a DebubbleError if the solution does not fit."""
    timeline = simulate(solution.schedule, solution.costs)
    assert solution.partition is not None
    check_host_memory(units, solution.partition, timeline)
    return problem.step_time(timeline)


def _improve_order(
    problem: Problem,
    units: Units,
    value: Number,
    solution: Solution,
    improved: list[tuple[Number, Solution]],
    effort: Effort,
) -> None:
    """Search better orders of a solution, whose step takes `value`, and add the best if it is better."""
    from debubble.search.annealing.search import improve

    hosted = solution.schedule.host_steps
    start = _without_host_steps(solution.schedule)
    orders = OrderProblem.of(start, solution.costs, objective=problem.objective)
    best = Incumbent(schedule=start, value=orders.value(start), bound=lower_bound(orders), source="start")
    for better in improve(orders, best, effort=effort, seed=problem.seed):
        best = better
    better_solution = replace(solution, schedule=step_on_host(best.schedule, hosted))
    try:
        better_value = _step_time(problem, units, better_solution)
    except DebubbleError:
        return
    if better_value < value:
        improved.append((better_value, better_solution))


def _without_host_steps(schedule: Schedule) -> Schedule:
    """The schedule without optimizer steps on the host, which the order search does not know."""
    moved = (Kind.P, Kind.D, Kind.S)
    return replace(
        schedule, orders=tuple(tuple(op for op in order if op.kind not in moved) for order in schedule.orders)
    )
