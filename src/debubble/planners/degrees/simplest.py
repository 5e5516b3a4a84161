"""The simplest of the plans that are nearly as fast as the fastest, and the usual choices of degrees.

A plan is simple that uses few levers: kinds of parallelism beyond data parallelism with ZeRO, interleaving,
recomputation, offload.  Each is something to configure, to debug and to rely on a prediction for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from debubble.ir import Kind
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.space import in_order
from debubble.planners.problem import Solution

TOLERANCE = 0.02
"""Share of the fastest plan's step by which a simpler plan may be slower."""
UNEVEN_UNITS = 2
"""Units by which the stages of an even partition may differ: a layer, as half-layers."""

USUAL_CHOICES = {3: "FSDP (ZeRO-3)", 1: "data parallel (ZeRO-1)", 0: "one device"}
"""ZeRO levels of the usual choices -> their names."""


@dataclass(frozen=True, kw_only=True)
class PlannedChoice:
    """A plan of a choice of degrees, before or after its verification, and the seconds of its step."""

    degrees: Degrees
    solution: Solution
    step: float

    @property
    def levers(self) -> tuple[str, ...]:
        """The mechanisms that it uses beyond data parallelism with ZeRO, in words."""
        return tuple(self._levers())

    def _levers(self) -> Iterator[str]:
        schedule, partition = self.solution.schedule, self.solution.partition or ()
        for name in ("pipeline", "tensor", "context", "expert", "slices"):
            if (degree := getattr(self.degrees, name)) > 1:
                yield f"{name} {degree}"
        gathers_stages = self.degrees.pipeline == 1 and self.solution.costs.gathers
        if schedule.placement.chunks > 1 and not gathers_stages:
            yield f"{schedule.placement.chunks} chunks"
        lengths = [len(stage) for stage in partition] or [0]
        if self.degrees.pipeline > 1 and max(lengths) - min(lengths) > UNEVEN_UNITS:
            yield "uneven stages"
        if any(strategy != "none" for stage in partition for _, strategy in stage):
            yield "recomputation"
        if any(op.kind is Kind.O for op in schedule.operations):
            yield "offload"
        if schedule.host_steps:
            yield "CPU optimizer"


def simplest(plans: Sequence[PlannedChoice], *, tolerance: float) -> PlannedChoice:
    """The plan with the fewest levers of those whose step is at most that share above the fastest; then the fastest.

    Of as many levers, those with the least context parallelism come first: few tokens per rank are nothing that people
    run where data parallelism is as fast.
    """
    most = min(plan.step for plan in plans) * (1 + tolerance)
    near = [plan for plan in plans if plan.step <= most]
    return min(near, key=lambda plan: (len(plan.levers), plan.degrees.context, plan.step, in_order(plan.degrees)))


def usual_choices(legal: Sequence[Degrees]) -> dict[str, list[Degrees]]:
    """The legal choices without any model parallelism, by the name of their ZeRO level, small micro-batches first."""
    plain = [d for d in legal if d.devices == d.data and d.expert == d.slices == 1 and d.expert_tensor is None]
    plain.sort(key=lambda degrees: degrees.micro_batch_size)
    found = {name: [d for d in plain if d.zero == zero] for zero, name in USUAL_CHOICES.items()}
    return {name: choices for name, choices in found.items() if choices}
