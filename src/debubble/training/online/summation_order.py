"""In which order a step adds numbers up: two schedules with the same order have the same losses, bit for bit.

Every operator computes the same from the same inputs whenever it runs, and a backward that is split computes what a
whole one does.  All that an order of operations could change is the order of floating-point sums.
"""

from __future__ import annotations

from debubble.ir import Kind, Plan, Schedule
from debubble.models import Model

Terms = list[tuple[str, int]]


def summation(plan: Plan, schedule: Schedule) -> dict[str, Terms]:
    """What is added up in a step of the schedule, each sum with its terms in order.

    A stage's linear operators add their gradients in its B or W, all others in its B or I; a tied table on one device
    gets both from two stages; the last stage adds losses.
    """
    assert plan.model is not None
    first, last = 0, schedule.stages - 1
    tied = (
        Model.from_hf(dict(plan.model)).tied
        and plan.schedule.placement.device_of[first] == plan.schedule.placement.device_of[last]
    )
    sums: dict[str, Terms] = {}

    def add(to: str, term: str, micro_batch: int) -> None:
        sums.setdefault(to, []).append((term, micro_batch))

    for order in schedule.orders:
        for kind, stage, j in order:
            if kind is Kind.F and stage == last:
                add("loss", "loss", j)
            if kind in (Kind.B, Kind.W):
                add(f"linear {stage}", "gradient", j)
                if tied and stage == last:
                    add("table", "head", j)
            if kind in (Kind.B, Kind.I):
                add(f"other {stage}", "gradient", j)
                if tied and stage == first:
                    add("table", "embedding", j)
    return sums
