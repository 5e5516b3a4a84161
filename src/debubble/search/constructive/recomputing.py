"""Orders for stages whose backwards recompute: a forward leaves little, and a backward brings the rest back for a time.

List scheduling takes what a backward allocates with its forward, so that no backward ever waits; then as few
micro-batches are in flight as if nothing were recomputed.  Two ways keep that small:

* Backwards are not split: what they bring back they also free, and one such workspace per device is set aside.
* Backwards are split, and an input gradient waits for memory like a forward; this may get stuck.

The shortest order is taken, simulated with the costs and their memory limit.
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

SIMULATED = 3
"""Orders of whole backwards that are simulated."""


def shortest_recomputing(
    schedules: Sequence[Schedule], costs: StageCosts, recomputing: frozenset[int], *, objective: Objective = "makespan"
) -> Schedule:
    """The shortest of the schedules within the memory limit, with these stages' backwards recomputing.

    Where none fits it is the first, of which lowering says which device lacks how much.
    """
    recomputed = [replace(schedule, fused_recompute=recomputing) for schedule in schedules]
    values: dict[int, Number] = {}
    for at, schedule in enumerate(recomputed):
        with suppress(OutOfMemoryError):
            values[at] = getattr(simulate(schedule, costs), objective)
    return recomputed[min(values, key=lambda at: values[at], default=0)]


def whole_backward_orders(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    capacity: Sequence[Number | None],
    recomputing: frozenset[int],
    rules: Iterable[Greedy],
) -> list[ListSchedule]:
    """Order backwards that are whole by each rule, in `capacity` bytes per device, and return the shortest orders."""
    scale = max(costs.micro_batch_scale or (1,))
    dropped = [costs.dropped_bytes(s) if s in recomputing else 0 for s in range(placement.stages)]
    workspace = [min(x) for x in zip(costs.recompute_workspace or dropped, dropped, strict=True)]
    left: list[Number | None] = [
        None if free is None else free - scale * max(workspace[s] for s in stages)
        for free, stages in zip(capacity, placement.stages_of, strict=True)
    ]
    kept = costs.replace(
        activation=[whole - less for whole, less in zip(costs.activation, dropped, strict=True)],
        backward_input=_with_recompute(costs.backward_input, costs.recompute, recomputing),
        attention_backward=_with_recompute(costs.attention_backward, costs.attention_recompute, recomputing),
    )
    scheduler = ListScheduler(placement, micro_batches, OpCosts(costs=kept), left, split=False)
    orders = [order for order in map(scheduler.schedule, rules) if order is not None]
    return sorted(orders, key=lambda order: order.makespan)[:SIMULATED]


def split_backward_order(
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    capacity: Sequence[Number | None],
    recomputing: frozenset[int],
) -> ListSchedule | None:
    """Order split backwards, weight gradients in gaps, in `capacity` bytes per device; None if that gets stuck."""
    op_costs = OpCosts(costs=costs, fused_recompute=recomputing)
    return ListScheduler(placement, micro_batches, op_costs, capacity).schedule(GapFilling())


def _with_recompute(
    backward: Sequence[Number], recompute: Sequence[Number], recomputing: frozenset[int]
) -> list[Number]:
    """The stages' times of backwards, those of recomputations included."""
    return [
        time + (again if stage in recomputing else 0)
        for stage, (time, again) in enumerate(zip(backward, recompute, strict=True))
    ]
