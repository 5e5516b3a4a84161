"""Hanayo: micro-batches run through the devices in waves, down and up again, several times.

Source: Liu et al., Hanayo, SC 2023 (arXiv:2308.15762).  A wave is two chunks: W waves are v = 2 W chunks in a zigzag.

As in the paper, the order comes from running the step event by event: a device runs the oldest micro-batch that has
arrived, backwards first or alternating with forwards, within memory for p micro-batches.
"""

from __future__ import annotations

from debubble.ir import Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule
from debubble.search.constructive.list_scheduling import Greedy, ListSchedule
from debubble.search.constructive.recomputing import fused_backward_orders
from debubble.search.constructive.zero_bubble import capacity_within, greedy_schedules


@schedule(
    "hanayo",
    paper="Hanayo, SC 2023",
    bubble="about 4 (p - 1) f / v, for m = p and b = 2 f",
    memory="min(m, p)",
    default_chunks=2,
    placement=Placement.v_shape,
    peak=lambda p, m, v: min(m, p),
)
def hanayo(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    costs: StageCosts | None = None,
    recomputing: frozenset[int] = frozenset(),
) -> Schedule:
    """Waves on a zigzag of v chunks (v = 2 per wave): less bubble with every wave, in 1F1B's memory.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Times and bytes per stage; all times 1 by default.
        recomputing: Stages whose backwards recompute.
    """
    placement = Placement.v_shape(devices, chunks)
    costs = costs or StageCosts.of(stages=placement.stages)
    # If no order fits, one without the limit lets lowering report the missing bytes, or fits with recomputation.
    outcomes = _orders(placement, micro_batches, costs, recomputing) or _orders(
        placement, micro_batches, costs.with_limit(None), frozenset()
    )
    best = min(outcomes, key=lambda outcome: outcome.makespan)
    return Schedule(name="hanayo", placement=placement, micro_batches=micro_batches, orders=best.orders)


def _orders(
    placement: Placement, micro_batches: int, costs: StageCosts, recomputing: frozenset[int]
) -> list[ListSchedule]:
    """The orders by all rules that do not get stuck within the limit and memory for p micro-batches."""
    capacity = capacity_within(placement, costs, placement.devices)
    if recomputing:
        return fused_backward_orders(placement, micro_batches, costs, capacity, recomputing, _RULES)
    return greedy_schedules(placement, micro_batches, costs, capacity, _RULES, split=False)


_RULES = (Greedy(alternate=False), Greedy(alternate=True), Greedy(alternate=True, timeout=0.5))
