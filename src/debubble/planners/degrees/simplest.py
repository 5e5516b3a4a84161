"""Choice of the simplest plan within a tolerance of the fastest.

The simplest plan uses the fewest levers: kinds of parallelism beyond data parallelism with ZeRO, interleaving,
recomputation, offload.  Every lever has to be configured and debugged, and is one more prediction to rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from debubble.ir import Kind, Schedule
from debubble.ir.degrees import CPU_OPTIMIZER, OFFLOAD, RECOMPUTATION, UNEVEN_STAGES, Degrees
from debubble.planners.degrees.ranking import NEGLIGIBLE_DIFFERENCE
from debubble.planners.degrees.space import degrees_key
from debubble.planners.problem import Solution

TOLERANCE = 0.02
"""Default fraction of the fastest plan's step by which a simpler plan may be slower."""
EVEN_UNITS_RANGE = 2
"""Stages count as even if their lengths differ by at most this many units (two half-layers are one layer)."""


@dataclass(frozen=True, kw_only=True)
class PlannedChoice:
    """A plan of a choice of degrees, verified or not, and its step in seconds."""

    degrees: Degrees
    solution: Solution
    step: float

    @property
    def levers(self) -> tuple[str, ...]:
        """The mechanisms of the plan beyond data parallelism with ZeRO, in words."""
        plan = self.solution
        strategies = [[strategy for _, strategy in stage] for stage in plan.partition or ()]
        return tuple(levers_of(self.degrees, plan.schedule, strategies, gathers=bool(plan.costs.gathers)))


def levers_of(
    degrees: Degrees, schedule: Schedule, strategies: Sequence[Sequence[str]], *, gathers: bool
) -> Iterator[str]:
    """The mechanisms of a plan beyond data parallelism with ZeRO, or a pipeline with ZeRO-1, in words.

    Args:
        degrees: Its degrees of parallelism.
        schedule: Its schedule.
        strategies: Per stage, the recomputation strategies of its units.
        gathers: Whether weights are gathered stage by stage.
    """
    for name in ("pipeline", "tensor", "context", "expert", "slices"):
        if (degree := getattr(degrees, name)) > 1:
            yield f"{name} {degree}"
    if degrees.pipeline > 1 and degrees.zero > 1:
        yield f"ZeRO-{degrees.zero} with a pipeline"
    if schedule.placement.chunks > 1 and not (degrees.pipeline == 1 and gathers):
        yield f"{schedule.placement.chunks} chunks"
    lengths = [len(stage) for stage in strategies] or [0]
    if degrees.pipeline > 1 and max(lengths) - min(lengths) > EVEN_UNITS_RANGE:
        yield UNEVEN_STAGES
    if any(strategy != "none" for stage in strategies for strategy in stage):
        yield RECOMPUTATION
    if any(op.kind is Kind.O for op in schedule.operations):
        yield OFFLOAD
    if schedule.host_steps:
        yield CPU_OPTIMIZER


def simplest(
    plans: Sequence[PlannedChoice], *, tolerance: float, support: Callable[[PlannedChoice], int] = lambda _: 0
) -> PlannedChoice:
    """The plan with the fewest levers among those within the tolerance of the fastest step.

    Plans with the highest `support` by frameworks come first.  Of plans with equally many levers, those with the least
    context parallelism come first, as few people run few tokens per rank if data parallelism is as fast; then the
    fastest, and of equally fast ones the least complex.
    """
    max_step = min(plan.step for plan in plans) * (1 + tolerance)
    fast = [plan for plan in plans if plan.step <= max_step]
    supported = [support(plan) for plan in fast]
    first = [plan for plan, level in zip(fast, supported, strict=True) if level == max(supported)]
    near = [(len(plan.levers), plan.degrees.context, plan) for plan in first]
    fewest = min((levers, context) for levers, context, _ in near)
    simple = [plan for levers, context, plan in near if (levers, context) == fewest]
    step = min(plan.step for plan in simple) * (1 + NEGLIGIBLE_DIFFERENCE)
    equal = [plan for plan in simple if plan.step <= step]
    if len(equal) == 1:
        return equal[0]
    return min(equal, key=lambda plan: (plan.solution.complexity, degrees_key(plan.degrees)))
