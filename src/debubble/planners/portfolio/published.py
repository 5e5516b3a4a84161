"""Library schedules with their defaults on the even split of the units, as a user gets them by name.

They are built for the memory limit and simulated under it without recomputation, or, if that does not fit, with full
recomputation.  The simulation lets operations wait for memory, so that an offloading schedule may fit although its
repriced order does not.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.costs.partition import Partition
from debubble.ir import DebubbleError
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.local_search import PricedSchedule
from debubble.planners.portfolio.trials import Order
from debubble.planners.problem import FixedStages, ModelUnits, Problem
from debubble.simulator import simulate


def as_published(problem: Problem, order: Order) -> PricedSchedule:
    """A priced library schedule; raises DebubbleError if it does not fit or cannot run."""
    try:
        return _simulated(problem, order, "none")
    except DebubbleError:
        return _simulated(problem, order, "full")


def _simulated(problem: Problem, order: Order, strategy: str) -> PricedSchedule:
    """A priced library schedule with one recomputation strategy for all units or stages."""
    match problem.workload:
        case FixedStages(costs):
            partition = None
            recomputing = frozenset(range(costs.stages) if strategy == "full" else ())
        case ModelUnits(units):
            counts = even_counts(units, order.placement.stages)
            partition = Partition.cut(units, counts, strategy=strategy)
            costs, recomputing = units.stage_costs(partition, order.placement), partition.recomputing
    built = order.build(problem, costs)
    schedule = replace(built, fused_recompute=built.fused_recompute | recomputing)
    return PricedSchedule(float(problem.time_of(simulate(schedule, costs))), schedule, costs, partition)
