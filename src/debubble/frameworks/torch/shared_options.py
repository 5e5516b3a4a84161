"""Export rules that torch and the frameworks on torch's pipelining share."""

from __future__ import annotations

from dataclasses import replace

from debubble.exports.layers import replanning_advice
from debubble.exports.options import Decision, Lost
from debubble.exports.prices import slowdown
from debubble.ir import ExportError
from debubble.plans import Plan
from debubble.targets import orders
from debubble.targets.orders import placement_kind


def placing_schedule(plan: Plan, *, target: str) -> str:
    """The torch schedule with the plan's placement of stages; the CSV replaces its order.

    Raises ExportError if no torch schedule has the placement.
    """
    kind = placement_kind(plan.schedule.placement)
    if kind in _PLACING:
        return _PLACING[kind]
    raise ExportError(
        f"{target} places stages in a loop, or in a V of two per device, and this plan places them as"
        f" {list(plan.schedule.placement.device_of)}; export it to torch, or {replanning_advice(plan, target)}."
    )


_PLACING = {"linear": "1F1B", "looped": "Interleaved1F1B", "v_shape": "ZBVZeroBubble"}
"""Kind of placement -> torch schedule with that placement."""


def fsdp(plan: Plan, *, target: str) -> Decision:
    """ZeRO by FSDP, which always shards optimizer states."""
    if plan.options.zero or plan.options.data * plan.options.context == 1:
        return {}
    return Lost(f"{target} divides the optimizer states (FSDP), which takes less memory than planned.")


def accumulation(plan: Plan) -> tuple[str, ...]:
    """Advice to set the global batch, for plans of abstract costs without a pipeline."""
    if plan.model is not None:
        return ()
    return (f"A step has {plan.micro_batches} micro-batches: set the global batch to as many of them.",)


def expert_degree(plan: Plan, *, name: str) -> Decision:
    """The expert-parallel degree, which in these targets includes the tensor-parallel ranks.

    These targets do not shard an expert; the plan's shards of an expert count as expert-parallel ranks.
    """
    if plan.model is None or plan.model.experts is None:
        return {}
    return {name: plan.options.expert * plan.options.expert_shards}


def whole_backwards(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with fused backwards (B for I and W) on stages that recompute, and sentences on the losses.

    torch splits a backward by its autograd graph: a checkpointed layer then recomputes once per group of parameters, in
    I and in W.  A fused B recomputes once.
    """
    recomputing = {s for s, how in enumerate(plan.recompute) if how != "none"}
    split = {stage for stage, _ in plan.schedule.split_backward}
    joined = split & recomputing
    changed, losses = plan, []
    if joined:
        changed = replace(plan, schedule=orders.whole_backwards(plan.schedule, joined))
        stages = f"stage{'s' * (len(joined) > 1)} {', '.join(map(str, sorted(joined)))}"
        losses.append(
            "torch's I and W would recompute a checkpointed layer once per group of parameters, so they are one B on"
            f" {stages}; {slowdown(changed, plan)}."
        )
    after_input = plan.costs.activation_after_input
    # Plans for these targets assume that torch keeps all of a forward's tensors until W.
    if any(after_input[stage] < plan.costs.activation[stage] for stage in split - joined):
        losses.append("torch's I and W hold more memory in between than the plan counts on: leave a margin.")
    return changed, tuple(losses)
