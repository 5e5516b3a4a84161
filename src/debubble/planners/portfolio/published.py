"""The schedules of the library as they are, on the even split of the units: what anybody gets who asks for one by name.

Each is built for the memory limit, with its own defaults, and simulated under it without recomputation; where that does
not fit, with full recomputation.  Operations may wait for memory there, so that a schedule that offloads fits sooner
than a repriced one.
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
    """A schedule of the library with its price; raises DebubbleError if it does not fit or cannot run."""
    try:
        return _simulated(problem, order, "none")
    except DebubbleError:
        return _simulated(problem, order, "full")


def _simulated(problem: Problem, order: Order, strategy: str) -> PricedSchedule:
    """A schedule of the library whose units, or stages, all recompute by a strategy."""
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
