"""Plans in equal runs of units, whose costs say nothing: for what is run, not planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from debubble.ir import Plan, PlannedUnit, RunOptions, Schedule, StageCosts


def even_plan(
    schedule: Schedule, units: Sequence[PlannedUnit], options: RunOptions, *, model: Mapping[str, Any] | None = None,
    costs: StageCosts | None = None,
) -> Plan:  # fmt: skip
    """A plan of a schedule, with about as many units on every stage."""
    bounds = [round(stage * len(units) / schedule.stages) for stage in range(schedule.stages + 1)]
    return Plan(
        planner="benchmark", schedule=schedule, costs=costs or StageCosts.of(stages=schedule.stages), lower_bound=0,
        model=model, partition=tuple(tuple(units[a:b]) for a, b in pairwise(bounds)), options=options,
    )  # fmt: skip
