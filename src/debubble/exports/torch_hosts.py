"""What torch and the frameworks that host torch's pipelining have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.costs import Model
from debubble.ir import ExportError, Placement, Plan


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


def split_losses(plan: Plan) -> list[str]:
    """What torch's own split of the backward, by graph, does worse than the plan's I and W."""
    if not plan.schedule.split_backward:
        return []
    losses = ["torch's I and W hold more memory in between than the plan counts on: leave a margin."]
    if any(recompute != "none" for recompute in plan.recompute):
        losses.append("torch's I and W recompute a checkpointed layer once per group of parameters, not once.")
    return losses
