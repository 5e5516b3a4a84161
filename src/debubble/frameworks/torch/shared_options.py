"""Rules that torch and the frameworks on torch's pipelining share."""

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
    """The torch schedule whose placement is the plan's; the CSV then gives the order.

    Raises ExportError for a placement that no name stands for.
    """
    kind = placement_kind(plan.schedule.placement)
    if kind in _PLACING:
        return _PLACING[kind]
    raise ExportError(
        f"{target} places stages in a loop, or in a V of two per device, and this plan places them as"
        f" {list(plan.schedule.placement.device_of)}; export it to torch, or {replanning_advice(plan, target)}."
    )


_PLACING = {"linear": "1F1B", "looped": "Interleaved1F1B", "v_shape": "ZBVZeroBubble"}
"""Way of placing stages -> the torch schedule that has it."""


def fsdp(plan: Plan, *, target: str) -> Decision:
    """ZeRO under FSDP, which always divides what ZeRO-1 does."""
    if plan.options.zero or plan.options.data * plan.options.context == 1:
        return {}
    return Lost(f"{target} divides the optimizer states (FSDP), which takes less memory than planned.")


def accumulation(plan: Plan) -> tuple[str, ...]:
    """The setting to make where neither a pipeline nor a batch of the plan says how many micro-batches a step has."""
    if plan.model is not None:
        return ()
    return (f"A step has {plan.micro_batches} micro-batches: set the global batch to as many of them.",)


def expert_degree(plan: Plan, *, name: str) -> Decision:
    """Experts are divided over expert- and tensor-parallel ranks, which these targets call expert-parallel both.

    Every rank has whole experts in these targets, whatever the plan; the shards of an expert count as ranks.
    """
    if plan.model is None or plan.model.experts is None:
        return {}
    return {name: plan.options.expert * plan.options.expert_shards}


def whole_backwards(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan without I and W on stages that recompute, and what torch's split of the others does worse.

    torch splits a backward by its graph: a checkpointed layer recomputes once for every group of parameters, in I and
    in W.  As one B it recomputes once.
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
    # Plans for these targets count on what torch keeps until W, all of a forward's tensors.
    if any(after_input[stage] < plan.costs.activation[stage] for stage in split - joined):
        losses.append("torch's I and W hold more memory in between than the plan counts on: leave a margin.")
    return changed, tuple(losses)
