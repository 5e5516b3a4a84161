"""The simplest of the plans that are nearly as fast as the fastest.

A plan is simple that uses few levers: kinds of parallelism beyond data parallelism with ZeRO, interleaving,
recomputation, offload.  Each is something to configure, to debug and to rely on a prediction for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from debubble.ir import Kind, Schedule
from debubble.ir.degrees import CPU_OPTIMIZER, OFFLOAD, RECOMPUTATION, UNEVEN_STAGES, Degrees
from debubble.planners.degrees.ranking import NEGLIGIBLE
from debubble.planners.degrees.space import in_order
from debubble.planners.problem import Solution

TOLERANCE = 0.02
"""Share of the fastest plan's step by which a simpler plan may be slower."""
UNEVEN_UNITS = 2
"""Units by which the stages of an even partition may differ: a layer, as half-layers."""


@dataclass(frozen=True, kw_only=True)
class PlannedChoice:
    """A plan of a choice of degrees, before or after its verification, and the seconds of its step."""

    degrees: Degrees
    solution: Solution
    step: float

    @property
    def levers(self) -> tuple[str, ...]:
        """The mechanisms that it uses beyond data parallelism with ZeRO, in words."""
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
    if degrees.pipeline > 1 and max(lengths) - min(lengths) > UNEVEN_UNITS:
        yield UNEVEN_STAGES
    if any(strategy != "none" for stage in strategies for strategy in stage):
        yield RECOMPUTATION
    if any(op.kind is Kind.O for op in schedule.operations):
        yield OFFLOAD
    if schedule.host_steps:
        yield CPU_OPTIMIZER


def simplest(
    plans: Sequence[PlannedChoice], *, tolerance: float, runs: Callable[[PlannedChoice], bool] = lambda _: True
) -> PlannedChoice:
    """The plan with the fewest levers of those whose step is at most that share above the fastest; then the fastest.

    Plans that some framework `runs` come before others.

    Of as many levers, those with the least context parallelism come first: few tokens per rank are nothing that people
    run where data parallelism is as fast.  Of equally fast ones the least complex is taken.
    """
    most = min(plan.step for plan in plans) * (1 + tolerance)
    fast = [plan for plan in plans if plan.step <= most]
    runnable = [plan for plan in fast if runs(plan)]
    near = [(len(plan.levers), plan.degrees.context, plan) for plan in runnable or fast]
    fewest = min((levers, context) for levers, context, _ in near)
    simple = [plan for levers, context, plan in near if (levers, context) == fewest]
    step = min(plan.step for plan in simple) * (1 + NEGLIGIBLE)
    equal = [plan for plan in simple if plan.step <= step]
    if len(equal) == 1:
        return equal[0]
    return min(equal, key=lambda plan: (plan.solution.complexity, in_order(plan.degrees)))
