"""Rules that torch and the frameworks on torch's pipelining share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from debubble.exports.layers import StageLayers
from debubble.exports.options import Decision, Lost, Refused, Written
from debubble.exports.prices import slowdown
from debubble.ir import ExportError, Kind, Op, Placement, Plan
from debubble.models import Model

FSDP_ZERO = 1
"""torch's pipelining sums gradients after the last micro-batch, so FSDP divides no more than optimizer states."""


def placing_schedule(plan: Plan, *, target: str) -> str:
    """The torch schedule whose placement is the plan's; the CSV then gives the order.

    Raises ExportError for a placement that no name stands for.
    """
    placement = plan.schedule.placement
    devices, chunks = placement.devices, placement.chunks
    if placement == Placement.linear(devices):
        return "1F1B"
    if placement == Placement.looped(devices, chunks):
        return "Interleaved1F1B"
    if chunks == 2 and placement == Placement.v_shape(devices):
        return "ZBVZeroBubble"
    raise ExportError(
        f"{target} places stages in a loop, or in a V of two per device, and this plan places them as"
        f" {list(placement.device_of)}; choose a schedule with one of those placements, or export it to torch."
    )


def refuse_tied(plan: Plan, *, target: str) -> None:
    """Raise ExportError for a model whose head is its embedding, which no host trains over a pipeline."""
    if plan.model is not None and plan.devices > 1 and _tied(plan.model):
        raise ExportError(
            f"{target} does not train tied embeddings over a pipeline; set tie_word_embeddings to false in the model's"
            " config and plan again."
        )


def _tied(config: Mapping[str, Any]) -> bool:
    said = config.get("tie_word_embeddings")
    return Model.from_hf(config).tied if said is None else bool(said)


def refuse_mtp(stages: Sequence[StageLayers], *, target: str) -> None:
    """Raise ExportError for multi-token-prediction layers, whose modules debubble cannot name in any target."""
    if any(stage.mtp for stage in stages):
        raise ExportError(
            f"debubble does not write multi-token-prediction layers for {target}; plan the model without them, or"
            " export to megatron."
        )


def fsdp(plan: Plan, *, target: str) -> Decision:
    """ZeRO under FSDP, which always divides what ZeRO-1 does."""
    if plan.options.zero or plan.options.data * plan.options.context == 1:
        return Written({})
    return Lost(f"{target} divides the optimizer states (FSDP), which takes less memory than planned.")


def expert_degree(plan: Plan, *, target: str, name: str) -> Decision:
    """Experts are divided over expert- and tensor-parallel ranks, which these targets call expert-parallel both."""
    if plan.model is None or (experts := Model.from_hf(plan.model).experts) is None:
        return Written({})
    degree = plan.options.expert * plan.options.tensor
    if experts.count % degree:
        return Refused(
            f"{target} gives every rank whole experts, and {experts.count} experts cannot be divided over the"
            f" {plan.options.expert} expert- x {plan.options.tensor} tensor-parallel ranks; plan again with a smaller"
            " --tensor."
        )
    return Written({name: degree})


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
        orders = tuple(
            tuple(_joined(op, joined) for op in order if not _weights(op, joined)) for order in plan.schedule.orders
        )
        changed = replace(plan, schedule=replace(plan.schedule, orders=orders))
        stages = f"stage{'s' * (len(joined) > 1)} {', '.join(map(str, sorted(joined)))}"
        losses.append(
            "torch's I and W would recompute a checkpointed layer once per group of parameters, so they are one B on"
            f" {stages}; {slowdown(changed, plan)}."
        )
    if split - joined:
        losses.append("torch's I and W hold more memory in between than the plan counts on: leave a margin.")
    return changed, tuple(losses)


def _weights(op: Op, stages: set[int]) -> bool:
    return op.kind is Kind.W and op.stage in stages


def _joined(op: Op, stages: set[int]) -> Op:
    return Op(Kind.B, op.stage, op.micro_batch) if op.kind is Kind.I and op.stage in stages else op
