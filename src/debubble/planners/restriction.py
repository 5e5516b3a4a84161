"""Answers as the framework that a problem is for runs them."""

from __future__ import annotations

from dataclasses import replace

from debubble.costs.units import Partition, Units
from debubble.ir import InfeasibleError, OutOfMemoryError
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.simulator import simulate
from debubble.targets.levers import Levers


def as_run(problem: Problem, solution: Solution) -> Solution:
    """A planner's answer with the levers that the problem allows; the same answer if it allows all.

    Layers that would have to recompute alike, and do not in the answer, recompute in the fastest way that fits.

    Raises:
        InfeasibleError: if the framework has no such order, or does not fit in any of its ways.
    """
    levers, partition = problem.levers, solution.partition
    if levers is None or partition is None or not isinstance(problem.workload, ModelUnits):
        return solution
    units = problem.workload.units
    if levers.alike(units, partition):
        return _with(solution, levers, units, partition)
    fitting: list[Solution] = []
    reason: OutOfMemoryError | None = None
    for ways in levers.together(units, partition.lengths):
        for way in ways:
            changed = _with(solution, levers, units, way)
            try:
                simulate(changed.schedule, changed.costs)
            except OutOfMemoryError as error:
                reason = error
            else:
                fitting.append(changed)
                break
    if not fitting:
        raise InfeasibleError(str(reason))
    return min(fitting, key=lambda each: problem.time_of(simulate(each.schedule, each.costs)))


def _with(solution: Solution, levers: Levers, units: Units, partition: Partition) -> Solution:
    partition = levers.arranged(units, partition)
    schedule = levers.as_run(solution.schedule, partition.recomputing)
    costs = units.stage_costs(partition, schedule.placement)
    return replace(solution, schedule=schedule, costs=costs, partition=partition)
