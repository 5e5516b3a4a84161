"""What to say when a device runs out of memory: where, predicted against actual, and a plan that needs less."""

from __future__ import annotations

from dataclasses import asdict

from debubble.costs import Cluster
from debubble.errors import readable
from debubble.ir import DebubbleError, InfeasibleError, Plan
from debubble.models import Model
from debubble.planners.plan_model import plan as make_plan
from debubble.runtime.out_of_memory import DeviceMemoryError

LESS = 0.9
"""How much of its memory a plan that is to fit may take of what this one was to take."""
EFFORT = 2.0
"""Seconds that such a plan is searched."""


class ShortageError(DebubbleError):
    """A device ran out of memory; the sentences say what was predicted there, and which plan would fit."""


def explained(error: DeviceMemoryError, plan: Plan, *, held: float) -> ShortageError:
    """`held`: bytes that the device held when it happened."""
    predicted = predicted_at(error, plan)
    return ShortageError(
        f"{error}  It held {readable(held)} of parameters, states and activations; the plan has {readable(predicted)}"
        f" there.  {_advice(plan, beyond=max(0.0, held - predicted))}"
    )


def predicted_at(error: DeviceMemoryError, plan: Plan) -> float:
    """Bytes that the plan has on the device when the operation starts, with what it allocates."""
    timeline = plan.simulate()
    start = timeline.by_name[error.operation].start
    return float([held for at, held in timeline.memory[error.device] if at <= start][-1])


def _advice(plan: Plan, *, beyond: float) -> str:
    """A plan that takes a tenth less, and as much less as this one took too much."""
    if plan.model is None or plan.cluster is None:
        return "Plan again with a lower memory limit."
    timeline = plan.simulate()
    limit = max(1, int(LESS * float(max(timeline.peak_memory)) - beyond))
    model, cluster = Model.from_hf(plan.model), Cluster.from_dict(plan.cluster)
    try:
        found = make_plan(
            model, cluster, micro_batches=plan.micro_batches, planner="portfolio", pipeline=plan.devices,
            memory_limit=limit, effort=EFFORT, profile=plan.profile, **asdict(plan.options),
        )  # fmt: skip
    except InfeasibleError:
        return (
            f"No plan on these devices takes less than {readable(limit)}: use more devices, smaller micro-batches, or"
            " shorter sequences."
        )
    slower = float(found.simulate().makespan / timeline.makespan)
    return (
        f"Plan again with --memory-limit {limit}: {found.schedule.name} with recomputation"
        f" {' | '.join(sorted(set(found.recompute)))} then fits, at {slower:.2f} times the predicted step."
    )
