"""Orders for stages whose backwards recompute: forwards retain little, and backwards restore the rest temporarily.

List scheduling allocates the memory of a backward with its forward, so that no backward waits; then recomputation would
not increase the number of micro-batches in flight.  Two variants avoid this:

* Backwards are not split: they free what they restore, and one such workspace per device is reserved.
* Backwards are split, and an input gradient waits for memory like a forward; this may get stuck.

The shortest order by simulation with the costs and their memory limit is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from debubble.ir import Number, OutOfMemoryError, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.search.constructive.list_scheduling import GapFilling, Greedy, ListSchedule, ListScheduler
from debubble.search.problem import Objective
from debubble.simulator import simulate

MAX_SIMULATED = 3
"""Number of orders with fused backwards that are simulated."""


def shortest_recomputing(
    schedules: Sequence[Schedule], costs: StageCosts, recomputing: frozenset[int], *, objective: Objective = "makespan"
) -> Schedule:
    """The shortest schedule within the memory limit, with the backwards of the `recomputing` stages.

    If none fits, the first one is returned, for which lowering reports the device and the missing bytes.
    """
    recomputed = [replace(schedule, fused_recompute=recomputing) for schedule in schedules]
    values: dict[int, Number] = {}
    for index, schedule in enumerate(recomputed):
        with suppress(OutOfMemoryError):
            values[index] = getattr(simulate(schedule, costs), objective)
    return recomputed[min(values, key=lambda index: values[index], default=0)]


def fused_backward_orders(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    capacity: Sequence[Number | None],
    recomputing: frozenset[int],
    rules: Iterable[Greedy],
) -> list[ListSchedule]:
    """Order fused backwards by each rule, in `capacity` bytes per device, and return the shortest orders."""
    scale = max(costs.micro_batch_scale or (1,))
    dropped = [costs.dropped_bytes(s) if s in recomputing else 0 for s in range(placement.stages)]
    workspace = [min(x) for x in zip(costs.recompute_workspace or dropped, dropped, strict=True)]
    capacities: list[Number | None] = [
        None if free is None else free - scale * max(workspace[s] for s in stages)
        for free, stages in zip(capacity, placement.stages_of, strict=True)
    ]
    recomputed_costs = costs.replace(
        activation=[size - dropped_bytes for size, dropped_bytes in zip(costs.activation, dropped, strict=True)],
        backward_input=_with_recompute(costs.backward_input, costs.recompute, recomputing),
        attention_backward=_with_recompute(costs.attention_backward, costs.attention_recompute, recomputing),
    )
    scheduler = ListScheduler(placement, micro_batches, OpCosts(costs=recomputed_costs), capacities, split=False)
    orders = [order for order in map(scheduler.schedule, rules) if order is not None]
    return sorted(orders, key=lambda order: order.makespan)[:MAX_SIMULATED]


def split_backward_order(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    capacity: Sequence[Number | None],
    recomputing: frozenset[int],
) -> ListSchedule | None:
    """Order split backwards with W in gaps, in `capacity` bytes per device; None if that gets stuck."""
    op_costs = OpCosts(costs=costs, fused_recompute=recomputing)
    return ListScheduler(placement, micro_batches, op_costs, capacity).schedule(GapFilling())


def _with_recompute(
    backward: Sequence[Number], recompute: Sequence[Number], recomputing: frozenset[int]
) -> list[Number]:
    """The times of the stages' backwards, including recomputation."""
    return [
        time + (recompute_time if stage in recomputing else 0)
        for stage, (time, recompute_time) in enumerate(zip(backward, recompute, strict=True))
    ]
