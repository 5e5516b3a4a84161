"""The rounds of the joint search: points are drawn, annealed in ever fewer placements, and put into order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Number, Placement
from debubble.planners.joint.annealing import Walk, random_point
from debubble.planners.joint.levers import Levers
from debubble.planners.problem import Problem, Solution
from debubble.search.bounds import lower_bound
from debubble.search.effort import SIMULATION, Effort
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import simulate

CHUNKS = (1, 2, 3, 4, 5, 6)
"""Stages per device; a device alone has no bubble that more than one could fill."""
DRAWING = 0.15
"""The part of the effort in which points are drawn at random."""
ROUNDS = ((6, 0.25, 0.03, 0.002), (3, 0.2, 0.01, 0.001), (2, 0.15, 0.004, 0.0002))
"""How many placements go on, with what part of the effort for all of them, and the temperatures at both ends."""
ORDERED = 2
"""Plans whose order is searched with the effort that is left."""


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
    walks = _initial_walks(problem, units, effort.part(DRAWING * problem.effort))
    for count, share, warm, cold in ROUNDS:
        walks = sorted(walks, key=lambda walk: walk.least)[:count]
        round_effort = effort.part(share * problem.effort)
        for rank, walk in enumerate(walks):
            walk.restart()
            walk.run(round_effort.part(round_effort.left / (len(walks) - rank)), warm=warm, cold=cold)
    walks = sorted(walks, key=lambda walk: walk.least)
    return _best(problem, walks, effort)


def _initial_walks(problem: Problem, units: Units, effort: Effort) -> list[Walk]:
    """Start a walk per placement at the best of many random points."""
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
    walks = []
    for rank, placement in enumerate(placements):
        levers = Levers(problem, units, placement)
        chance = random.Random(problem.seed)
        walk = Walk(levers, random_point(levers, chance), chance)
        walk.draw(effort.part(effort.left / (len(placements) - rank)))
        walks.append(walk)
    return walks


def _best(problem: Problem, walks: Sequence[Walk], effort: Effort) -> Solution:
    """The fastest of the walks' best points, after a search of their orders."""
    solutions: list[tuple[Number, Solution]] = []
    reason: DebubbleError | None = None
    for walk in walks:
        solution = walk.levers.solution(walk.best)
        effort.spend(SIMULATION * walk.levers.placement.stages * problem.micro_batches)
        try:
            solutions.append((problem.time_of(simulate(solution.schedule, solution.costs)), solution))
        except DebubbleError as error:
            reason = error
    if not solutions:
        raise InfeasibleError(
            "No plan of those that were tried fits the memory limit."
            if reason is None
            else f"No plan of those that were tried fits the memory limit: {reason}"
        )
    solutions.sort(key=lambda entry: entry[0])
    for rank, (value, solution) in enumerate(solutions[:ORDERED]):
        share = effort.part(effort.left / (min(ORDERED, len(solutions)) - rank))
        solutions.append(_improve_order(problem, value, solution, share))
    _, best = min(solutions, key=lambda entry: entry[0])
    return replace(best, cut_off=effort.cut_off)


def _improve_order(problem: Problem, value: Number, solution: Solution, effort: Effort) -> tuple[Number, Solution]:
    """Search better orders of a solution from its own, which takes `value`; return the best with its time."""
    from debubble.search.annealing.search import improve

    orders = OrderProblem.of(solution.schedule, solution.costs, objective=problem.objective)
    best = Incumbent(schedule=solution.schedule, value=value, bound=lower_bound(orders), source="start")
    for better in improve(orders, best, effort=effort, seed=problem.seed):
        if better.value < best.value:
            best = better
    return best.value, replace(solution, schedule=best.schedule)
