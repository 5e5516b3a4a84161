"""AMD Primus: Megatron-LM's settings as the overrides of a Primus experiment, with the layers that recompute by number.

Primus has Megatron-LM's arguments with its own beside them: `recompute_layer_ids` names layers of the whole model, and
its own pipeline runs `zero-bubble`, whose order is that of ZB-H1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from debubble.exports.layers import stage_layers
from debubble.exports.megatron import OPTIONS, arguments_of
from debubble.exports.recomputation import whole_where_needed
from debubble.exports.reduction import require_order
from debubble.exports.registry import Made, exporter
from debubble.ir import Plan

_TARGET = "AMD Primus"


@exporter("primus", options=OPTIONS)
def primus(plan: Plan, settings: Mapping[str, Any]) -> Made:
    """`plan.yaml`, to be merged into an experiment's `modules.pre_trainer`."""
    stages = stage_layers(plan, target=_TARGET)
    order = require_order(plan, target=_TARGET, names=("1f1b", "interleaved", "zb-h1"))
    plan, losses = whole_where_needed(
        plan, stages, target=_TARGET, expressible=lambda layer: layer.whole or not layer.recomputes
    )
    recomputed = [
        layer.index for stage in stage_layers(plan, target=_TARGET) for layer in stage.layers if layer.recomputes
    ]
    overrides = {name[2:].replace("-", "_"): value for name, value in arguments_of(plan, stages, settings).items()}
    if recomputed:
        overrides |= {"recompute_granularity": "full", "recompute_method": None, "recompute_layer_ids": recomputed}
    if order == "zb-h1":
        overrides |= {"patch_primus_pipeline": True, "pp_algorithm": "zero-bubble"}
    config = {"modules": {"pre_trainer": {"framework": "megatron", "overrides": overrides}}}
    return Made({"plan.yaml": yaml.safe_dump(config, sort_keys=False, default_flow_style=None)}, plan, losses)
