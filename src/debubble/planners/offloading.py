"""PipeOffload and AdaOffload as planners: the schedules of `schedules/offloading.py` on every partition that is tried.

Sources: Wan et al., PipeOffload, ICML 2025; OptPipe, appendix D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from debubble.costs.units import Partition
from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.problem import Problem, Solution, cut
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.search.problem import Objective, OrderProblem
from debubble.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Stages with their costs, ready to be ordered."""

    costs: StageCosts
    partition: Partition | None
    placement: Placement
    objective: Objective

    def order_problem(self, micro_batches: int) -> OrderProblem:
        """With every freedom that the costs give."""
        return OrderProblem(
            placement=self.placement,
            micro_batches=micro_batches,
            costs=self.costs,
            offload=self.costs.offload is not None,
            objective=self.objective,
            recompute=self.costs.memory_limit is not None and any(map(self.costs.dropped, range(self.costs.stages))),
        )

    def solution(self, schedule: Schedule, *, lower_bound: Number = 0) -> Solution:
        """A schedule as the planner's answer."""
        return Solution(schedule=schedule, costs=self.costs, partition=self.partition, lower_bound=lower_bound)


def settings(problem: Problem) -> Iterator[Setting]:
    """The fixed stages; or the even and the balanced partition of the units, nothing recomputed.

    `chunks` stages per device in looped placement, one by default.
    """
    placement = Placement.looped(problem.devices, problem.chunks or 1)
    if problem.costs is not None:
        yield Setting(costs=problem.costs, partition=None, placement=placement, objective=problem.objective)
        return
    assert problem.units is not None
    even, balanced = (split(problem.units, placement.stages) for split in (even_counts, balanced_counts))
    for counts in (even, balanced) if balanced != even else (even,):
        partition = cut(problem.units, counts)
        costs = problem.units.stage_costs(partition, placement)
        yield Setting(costs=costs, partition=partition, placement=placement, objective=problem.objective)


def best_of(problem: Problem, build: Callable[[Setting], Schedule]) -> Solution:
    """The fastest schedule that is built for any setting within memory; a setting that fails leaves the others.

    Raises InfeasibleError with the last reason if none fits.
    """
    found: list[tuple[Number, Solution]] = []
    reason: DebubbleError | None = None
    for setting in settings(problem):
        try:
            schedule = build(setting)
            time = problem.time_of(simulate(schedule, setting.costs))
        except DebubbleError as error:
            reason = error
            continue
        found.append((time, setting.solution(schedule)))
    if not found:
        raise InfeasibleError(str(reason))
    return min(found, key=lambda entry: entry[0])[1]


def with_offload(setting: Setting) -> StageCosts:
    """The setting's costs.  Raises InfeasibleError if they have no link to the host."""
    if setting.costs.offload is None:
        raise InfeasibleError("There is no link to offload over: give 'offload' times, or a bandwidth for units.")
    return setting.costs


@planner("pipeoffload", paper="PipeOffload, ICML 2025")
def pipeoffload(problem: Problem) -> Solution:
    """Offload the longest-lived activations, as many as the memory limit asks for."""

    def build(setting: Setting) -> Schedule:
        return schedules["pipeoffload"](
            devices=problem.devices, micro_batches=problem.micro_batches, chunks=setting.placement.chunks,
            costs=with_offload(setting), objective=problem.objective,
        )  # fmt: skip

    return best_of(problem, build)


@planner("adaoffload", paper="OptPipe, appendix D")
def adaoffload(problem: Problem) -> Solution:
    """PipeOffload with a denser fill phase, and PipeOffload where that is no faster."""

    def build(setting: Setting) -> Schedule:
        if setting.placement.chunks > 1:
            raise InfeasibleError("AdaOffload holds one stage per device; ask for one chunk.")
        return schedules["adaoffload"](
            devices=problem.devices, micro_batches=problem.micro_batches, costs=with_offload(setting),
            objective=problem.objective,
        )  # fmt: skip

    return best_of(problem, build)
