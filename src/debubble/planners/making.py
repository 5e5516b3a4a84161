"""From a problem, or a model on a cluster, to a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.ir import Plan, RunOptions
from debubble.planners.problem import Problem
from debubble.planners.registry import planners


def solve(
    problem: Problem,
    *,
    planner: str = "auto",
    model: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
) -> Plan:
    """Let a planner solve a problem.  Raises InfeasibleError if it finds nothing that fits."""
    result = planners[planner](problem)
    solution = result.solution
    units, partition = problem.units, solution.partition
    return Plan(
        planner=planner,
        schedule=solution.schedule,
        costs=solution.costs,
        lower_bound=result.lower_bound,
        solve_seconds=result.solve_seconds,
        partition=None if units is None or partition is None else units.planned(partition),
        candidates=solution.candidates or (result.summary,),
        model=model,
        cluster=cluster,
        options=options or RunOptions(),
    )
