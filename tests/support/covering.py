"""Cases that cover every pair of schedule and family, and for each of them all recomputation and offload options.

Case (schedule s, family f) has option (s + f) mod 8, so at least 8 schedules and 8 families get all options.
"""

from dataclasses import dataclass, replace
from typing import Any

import debubble as db
from debubble.ir import StageCosts
from tests.support.runtime_cases import plan_of
from tests.support.schedule_cases import explicit, fused, offloading, schedule_of, tightest
from tests.support.tiny_models import FAMILIES

RECOMPUTATIONS = ["none", "selective", "full", "explicit"]
"""`none`: nothing but the schedule's own recomputation."""
SELECTIVE = ["norm+activation+multiply", "core", "mlp"]


@dataclass(frozen=True)
class Case:
    schedule: str
    family: str
    recompute: str
    offloads: bool
    selected: str
    """What a selective recomputation runs again."""
    devices: int

    def __str__(self) -> Any:
        return f"{self.schedule}-{self.family}-{self.recompute}-{'offload' if self.offloads else 'kept'}"

    def plan(self) -> Any:
        """With offload, half of the activations of every second stage stay, and lowering keeps the tightest limit."""
        schedule = schedule_of(self.schedule, devices=self.devices, micro_batches=2 * self.devices)
        schedule = {"none": lambda s: s, "explicit": explicit}.get(self.recompute, fused)(schedule)
        costs = StageCosts.of(stages=schedule.stages, activation=2, activation_recomputed=1, offload=1)
        if self.offloads:
            halves = {stage: 0.5 for stage in range(1, schedule.stages, 2)}
            schedule = replace(offloading(schedule), offload_fraction={**halves, **schedule.offload_fraction})
            costs = tightest(schedule, costs)
        strategy = self.selected if self.recompute == "selective" else "full"
        if not schedule.fused_recompute and not schedule.explicit_recompute:
            strategy = "none"
        return plan_of(schedule, FAMILIES[self.family], strategy=strategy, costs=costs)


def case(s: Any, f: Any) -> Any:
    turn, way = divmod(s + f, 2 * len(RECOMPUTATIONS))
    return Case(
        schedule=list(db.schedules)[s],
        family=list(FAMILIES)[f],
        recompute=RECOMPUTATIONS[way // 2],
        offloads=bool(way % 2),
        selected=SELECTIVE[turn % len(SELECTIVE)],
        devices=2 if turn % 2 else 4,
    )


CASES = [case(s, f) for s in range(len(db.schedules)) for f in range(len(FAMILIES))]


def one_per_schedule(*, first_family: Any) -> Any:
    """Few cases that cover every schedule, every family and every combination of recomputation and offload."""
    return [case(s, (first_family + 5 * s) % len(FAMILIES)) for s in range(len(db.schedules))]
