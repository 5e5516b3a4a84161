"""Restriction of a planner's answer to the levers of the problem's target framework."""

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
    """A planner's answer restricted to the levers that the problem allows; unchanged if it allows all.

    If the target requires the same recomputation of all layers and the answer has different ones, the fastest uniform
    recomputation that fits replaces them.  Raises InfeasibleError if the framework has no such order, or nothing fits.
    """
    levers, partition = problem.levers, solution.partition
    if levers is None or partition is None or not isinstance(problem.workload, ModelUnits):
        return solution
    units = problem.workload.units
    if levers.allows(units, partition):
        return _with(solution, levers, units, partition)
    return _recomputing_uniformly(problem, levers, solution, units)


def _recomputing_uniformly(problem: Problem, levers: TargetLevers, solution: Solution, units: Units) -> Solution:
    """The answer with the fastest uniform recomputation of all layers."""
    assert solution.partition is not None
    fitting: list[Solution] = []
    reason: OutOfMemoryError | None = None
    for partitions in levers.uniform_partitions(units, solution.partition.lengths):
        for partition in partitions:
            changed = _with(solution, levers, units, partition)
            try:
                changed.simulate()
            except OutOfMemoryError as error:
                reason = error
            else:
                fitting.append(changed)
                break
    if not fitting:
        raise InfeasibleError(str(reason))
    return min(fitting, key=lambda answer: problem.time_of(answer.simulate()))


def _with(solution: Solution, levers: TargetLevers, units: Units, partition: Partition) -> Solution:
    partition = levers.in_target_order(units, partition)
    schedule = levers.as_run(solution.schedule, partition.recomputing)
    costs = units.stage_costs(partition, schedule.placement)
    return replace(solution, schedule=schedule, costs=costs, partition=partition)


def with_module_offload(problem: Problem, solution: Solution) -> Solution:
    """The answer with the framework's module offload instead of recomputation, if that is faster.

    For every uniform recomputation with less time than the answer's, the least offload that fits is tried, as more
    offload never takes less time.  For an answer that does not fit, such as one that needs its own offload, equal
    recomputation is tried too.
    """
    levers, partition = problem.levers, solution.partition
    if levers is None or not levers.offload or partition is None or not isinstance(problem.workload, ModelUnits):
        return solution
    units = problem.workload.units
    if problem.memory_limit is None or units.module_bandwidth is None:
        return solution
    best, time = solution, _time(problem, solution)
    for less in _recomputing_less(levers, units, partition, or_equal=time is None):
        operators = recomputed_operators(units, less)
        settings = _by_bytes([setting for setting in levers.offload if setting.combines_with(operators)], units, less)
        plain = _with(solution, levers, units, less)
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
    """The pipeline's time; None if the answer does not fit."""
    try:
        return problem.time_of(solution.simulate())
    except OutOfMemoryError:
        return None


def _recomputing_less(
    levers: TargetLevers, units: Units, partition: Partition, *, or_equal: bool
) -> Iterator[Partition]:
    """Partitions with uniform recomputation that take less recompute time than this one (`or_equal` time)."""

    def recompute(stages: Partition) -> float:
        return sum(float(units.units[index].strategies[name].recompute) for stage in stages for index, name in stage)

    limit = recompute(partition)
    series = next(iter(levers.uniform_partitions(units, partition.lengths)), [Partition.cut(units, partition.lengths)])
    yield from (other for other in series if recompute(other) < limit or (or_equal and recompute(other) == limit))


def _by_bytes(settings: Sequence[ModuleOffload], units: Units, partition: Partition) -> list[ModuleOffload]:
    """The settings that offload any bytes, by increasing bytes; of equal ones the first."""
    sizes = {setting: sum(setting.moved_bytes(units, partition)) for setting in settings}
    distinct = {round(sizes[setting]): setting for setting in reversed(settings) if sizes[setting]}
    return sorted(distinct.values(), key=lambda setting: sizes[setting])


def _with_offload(plain: Solution, units: Units, setting: ModuleOffload) -> Solution:
    """The answer with a setting's offload, to which the bound of the answer without offload does not apply."""
    assert plain.partition is not None
    schedule = setting.schedule(plain.schedule, units, plain.partition)
    costs = units.offloading_modules().stage_costs(plain.partition, schedule.placement)
    return replace(plain, schedule=schedule, costs=costs, lower_bound=0)
