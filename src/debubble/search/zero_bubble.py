"""The best zero-bubble schedule for given costs and memory: constructed, and improved by search on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from debubble.errors import readable
from debubble.ir import InfeasibleError, InputError, Number, Placement, Schedule, StageCosts
from debubble.search.constructive.recomputing import fused_backward_orders, shortest_recomputing, split_backward_order
from debubble.search.constructive.zero_bubble import (
    RULES,
    best_order,
    capacity_within,
    greedy_schedules,
    place_weights,
)
from debubble.search.problem import Objective


def zero_bubble_schedule(
    name: str,
    placement: Placement,
    micro_batches: int,
    costs: StageCosts | None,
    *,
    activations: Number,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int = 0,
    recomputing: frozenset[int] = frozenset(),
) -> Schedule:
    """Search the best order within memory for `activations` micro-batches and the memory limit (default: the costs').

    `tries` is the number of candidates, by default as TRIAL_OPERATIONS allows; `steps` moves of local search improve
    the best order.  Raises InfeasibleError if no order fits, and InputError for `steps` if backwards recompute, which
    the local search does not support here.
    """
    if recomputing and steps:
        raise InputError(f"The schedule '{name}' searches no further where stages recompute: leave out its steps.")
    costs = costs or StageCosts.of(stages=placement.stages)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    capacity = capacity_within(placement, costs, activations)
    best = best_order(name, placement, micro_batches, costs, capacity, objective=objective, tries=tries)
    if recomputing:
        split = split_backward_order(placement, micro_batches, costs, capacity, recomputing)
        fused = fused_backward_orders(placement, micro_batches, costs, capacity, recomputing, RULES)
        orders = [order.orders for order in (best, split, *fused) if order is not None]
        candidates = [Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=o) for o in orders]
        if candidates:
            return shortest_recomputing(candidates, costs, recomputing, objective=objective)
    if best is None:
        fullest = min(range(len(capacity)), key=lambda d: capacity[d])
        capacities = capacity if len(set(capacity)) > 1 else capacity[:1]
        raise InfeasibleError(
            f"The schedule '{name}' finds no order within {', '.join(readable(float(c)) for c in capacities)} of"
            " activations per device; raise the memory limit."
            if capacity[fullest] >= 0
            else f"The schedule '{name}' has no room for activations: what is static on device {fullest} is"
            f" {readable(float(-capacity[fullest]))} more than its limit; raise the memory limit."
        )
    return _improve(best, costs, capacity, objective=objective, steps=steps) if steps else best


def _improve(
    schedule: Schedule, costs: StageCosts, capacity: Sequence[Number], *, objective: Objective, steps: int
) -> Schedule:
    """Improve a schedule, and orders by greedy rules, by exact and local search.

    A schedule with messages that the search does not support is returned unchanged.
    """
    # Importing the search loads the compiler, which other schedules do not need.
    from debubble.search.annealing.arrays import knows_messages
    from debubble.search.bounds import lower_bound
    from debubble.search.exact.tight_memory import improve_tight
    from debubble.search.problem import Incumbent, OrderProblem

    if not knows_messages(costs):
        return schedule
    limits = [capacity[d] + costs.static_of(d) for d in range(schedule.devices)]
    problem = OrderProblem.from_schedule(
        schedule, costs.with_limit(limits).replace(offload=None, reload=None), objective=objective
    )
    by_rules = greedy_schedules(schedule.placement, schedule.micro_batches, costs, capacity, RULES)
    starts = [schedule, *(replace(schedule, orders=outcome.orders) for outcome in by_rules)]
    value, first = min(((problem.value(start), k) for k, start in enumerate(starts)))
    best = Incumbent(schedule=starts[first], value=value, bound=lower_bound(problem), source="start")
    for better in improve_tight(
        problem, best, steps=steps, complete=partial(place_weights, costs=costs, capacity=capacity)
    ):
        best = better
    return replace(best.schedule, name=schedule.name)
