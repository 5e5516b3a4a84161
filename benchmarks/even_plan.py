"""Plans with equal runs of units and meaningless costs, for code that runs plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from debubble.costs import Cluster
from debubble.ir import PlannedUnit, RunOptions, Schedule, StageCosts
from debubble.models import ModelConfig
from debubble.plans import ModelOnCluster, Plan


def even_plan(
    schedule: Schedule, units: Sequence[PlannedUnit], options: RunOptions, *, model: Mapping[str, Any] | None = None,
    costs: StageCosts | None = None, cluster: Cluster | None = None,
) -> Plan:  # fmt: skip
    """A plan of a schedule with about as many units on every stage; by default a model's cluster is CPUs."""
    devices = cluster or Cluster.parse(f"{schedule.devices}xCPU")
    described = None if model is None else ModelOnCluster(ModelConfig.from_hf(model), devices)
    bounds = [round(stage * len(units) / schedule.stages) for stage in range(schedule.stages + 1)]
    return Plan(
        planner="benchmark", schedule=schedule, costs=costs or StageCosts.of(stages=schedule.stages), lower_bound=0,
        model_on_cluster=described, partition=tuple(tuple(units[a:b]) for a, b in pairwise(bounds)), options=options,
    )  # fmt: skip
