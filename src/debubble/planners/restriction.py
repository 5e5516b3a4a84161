"""Answers as the framework that a problem is for runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Number, OutOfMemoryError
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.targets.levers import TargetLevers
from debubble.targets.offload import ModuleOffload, recomputed_operators


def as_run(problem: Problem, solution: Solution) -> Solution:
    """A planner's answer with the levers that the problem allows; the same answer if it allows all.

    Layers that would have to recompute alike, and do not in the answer, recompute in the fastest way that fits.  Raises
    InfeasibleError if the framework has no such order, or does not fit in any of its ways.
    """
    levers, partition = problem.levers, solution.partition
    if levers is None or partition is None or not isinstance(problem.workload, ModelUnits):
        return solution
    units = problem.workload.units
    if levers.allows(units, partition):
        return _with(solution, levers, units, partition)
    return _recomputing_uniformly(problem, levers, solution, units)


def _recomputing_uniformly(problem: Problem, levers: TargetLevers, solution: Solution, units: Units) -> Solution:
    """The answer with the fastest way to recompute all layers alike."""
    assert solution.partition is not None
    fitting: list[Solution] = []
    reason: OutOfMemoryError | None = None
    for ways in levers.uniform_partitions(units, solution.partition.lengths):
        for way in ways:
            changed = _with(solution, levers, units, way)
            try:
                changed.simulate()
            except OutOfMemoryError as error:
                reason = error
            else:
                fitting.append(changed)
                break
    if not fitting:
        raise InfeasibleError(str(reason))
    return min(fitting, key=lambda each: problem.time_of(each.simulate()))


def _with(solution: Solution, levers: TargetLevers, units: Units, partition: Partition) -> Solution:
    partition = levers.in_target_order(units, partition)
    schedule = levers.as_run(solution.schedule, partition.recomputing)
    costs = units.stage_costs(partition, schedule.placement)
    return replace(solution, schedule=schedule, costs=costs, partition=partition)


def with_module_offload(problem: Problem, solution: Solution) -> Solution:
    """An answer as the framework runs it, with modules offloaded where that is faster than recomputation.

    It is the fastest that recomputes less than this one and offloads what it takes to fit; this one if none is.  In
    each way to recompute it is the least offload that fits, as more of it takes no less time.  An answer that does not
    fit, as one that offloads already does not without, may recompute as much.
    """
    levers, partition = problem.levers, solution.partition
    if levers is None or not levers.offload or partition is None or not isinstance(problem.workload, ModelUnits):
        return solution
    units = problem.workload.units
    if problem.memory_limit is None or units.module_bandwidth is None:
        return solution
    best, time = solution, _time(problem, solution)
    for way in _recomputing_less(levers, units, partition, as_much=time is None):
        operators = recomputed_operators(units, way)
        settings = _by_bytes([each for each in levers.offload if each.combines_with(operators)], units, way)
        plain = _with(solution, levers, units, way)
        low, high = 0, len(settings)
        while low < high:
            middle = (low + high) // 2
            changed = _with_offload(plain, units, settings[middle])
            taken = _time(problem, changed)
            if taken is None:
                low = middle + 1
                continue
            high = middle
            if time is None or taken < time:
                best, time = changed, taken
    return best


def _time(problem: Problem, solution: Solution) -> Number | None:
    """Time of the pipeline's part of a step; None if the answer does not fit."""
    try:
        return problem.time_of(solution.simulate())
    except OutOfMemoryError:
        return None


def _recomputing_less(
    levers: TargetLevers, units: Units, partition: Partition, *, as_much: bool
) -> Iterator[Partition]:
    """The ways to recompute parts of all layers alike in less time than a partition's way takes, or `as_much`."""

    def recompute(ways: Partition) -> float:
        return sum(float(units.units[index].strategies[name].recompute) for stage in ways for index, name in stage)

    most = recompute(partition)
    ladders = [list(ways) for ways in levers.uniform_partitions(units, partition.lengths)]
    ways = ladders[0] if ladders else [Partition.cut(units, partition.lengths)]
    yield from (way for way in ways if recompute(way) < most or (as_much and recompute(way) == most))


def _by_bytes(settings: Sequence[ModuleOffload], units: Units, way: Partition) -> list[ModuleOffload]:
    """The settings that move something, from the least to the most; of equal ones the first."""
    sizes = {setting: sum(setting.moved_bytes(units, way)) for setting in settings}
    distinct = {round(sizes[setting]): setting for setting in reversed(settings) if sizes[setting]}
    return sorted(distinct.values(), key=lambda setting: sizes[setting])


def _with_offload(plain: Solution, units: Units, setting: ModuleOffload) -> Solution:
    """The answer with a setting's offload, for which no bound without it holds."""
    assert plain.partition is not None
    schedule = setting.schedule(plain.schedule, units, plain.partition)
    costs = units.offloading_modules().stage_costs(plain.partition, schedule.placement)
    return replace(plain, schedule=schedule, costs=costs, lower_bound=0)
