"""PipeOffload and AdaOffload as planners: the schedules of `schedules/offload.py` on even and balanced partitions.

Sources: Wan et al., PipeOffload, ICML 2025; OptPipe, appendix D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from debubble.costs.partition import Partition
from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, Schedule, StageCosts, UnsupportedError
from debubble.planners.partitioning.balance import even_and_balanced
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.search.problem import Objective, OrderProblem
from debubble.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class PlacedStages:
    """Stages with costs and placement, ready for an order search."""

    costs: StageCosts
    partition: Partition | None
    placement: Placement
    objective: Objective

    def order_problem(self, micro_batches: int) -> OrderProblem:
        """The order search problem of these stages, with offload and recomputation if the costs allow them."""
        return OrderProblem(
            placement=self.placement,
            micro_batches=micro_batches,
            costs=self.costs,
            offload=self.costs.offload is not None,
            objective=self.objective,
            recompute=self.costs.memory_limit is not None
            and any(map(self.costs.dropped_bytes, range(self.costs.stages))),
        )

    def solution(self, schedule: Schedule, *, lower_bound: Number = 0) -> Solution:
        """A schedule as a planner's solution."""
        return Solution(schedule=schedule, costs=self.costs, partition=self.partition, lower_bound=lower_bound)


def placed_stages(
    problem: Problem, placement: Placement | None = None, *, strategy: str = "none"
) -> Iterator[PlacedStages]:
    """The fixed stages, or the even and the balanced partition of the units with one recomputation strategy.

    `placement` defaults to looped placement with the problem's number of chunks, one by default.
    """
    placement = placement or Placement.looped(problem.devices, problem.chunks or 1)
    match problem.workload:
        case FixedStages(costs):
            yield PlacedStages(costs=costs, partition=None, placement=placement, objective=problem.objective)
        case ModelUnits(units):
            for lengths in even_and_balanced(units, placement.stages):
                partition = Partition.cut_layers(units, lengths, strategy=strategy)
                costs = units.stage_costs(partition, placement)
                yield PlacedStages(costs=costs, partition=partition, placement=placement, objective=problem.objective)


def _best_of(problem: Problem, name: str) -> Solution:
    """The fastest solution of a library schedule that fits, over all `placed_stages`.

    Raises InfeasibleError with the last reason if none fits, UnsupportedError if there is no link to the host.
    """
    solutions: list[tuple[Number, Solution]] = []
    reason: DebubbleError | None = None
    entry = schedules[name]
    for stages in placed_stages(problem):
        if stages.costs.offload is None:
            raise UnsupportedError(
                "There is no link to offload over: give 'offload' times, or a bandwidth for units, and leave out"
                " --swap none."
            )
        options = entry.accepted_options(chunks=stages.placement.chunks, objective=problem.objective)
        try:
            schedule = entry(
                devices=problem.devices, micro_batches=problem.micro_batches, costs=stages.costs, **options
            )
            time = problem.time_of(simulate(schedule, stages.costs))
        except DebubbleError as error:
            reason = error
            continue
        solutions.append((time, stages.solution(schedule)))
    if not solutions:
        raise InfeasibleError(str(reason))
    return min(solutions, key=lambda entry: entry[0])[1]


@planner("pipeoffload", paper="PipeOffload, ICML 2025")
def pipeoffload(problem: Problem) -> Solution:
    """Offload the longest-lived activations, as many as the memory limit asks for."""
    return _best_of(problem, "pipeoffload")


@planner("adaoffload", paper="OptPipe, appendix D")
def adaoffload(problem: Problem) -> Solution:
    """PipeOffload with a denser fill phase, and PipeOffload where that is no faster."""
    if problem.chunks not in (None, 1):
        raise UnsupportedError(
            f"AdaOffload holds one stage per device, and --chunks asks for {problem.chunks}: leave it out, or take"
            " another planner, such as auto."
        )
    return _best_of(problem, "adaoffload")
