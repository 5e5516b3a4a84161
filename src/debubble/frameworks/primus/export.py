"""Exports plans to AMD Primus: Megatron-LM's settings as overrides of an experiment, with recomputed layers by index.

Primus adds arguments to Megatron-LM's: `recompute_layer_ids` lists layers of the model, and its own pipeline runs
`zero-bubble`, whose order is that of ZB-H1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from debubble.exports.layers import StageLayers, stage_layers
from debubble.exports.reduction import fastest, recomputed_layers, require_order, whole_where_needed
from debubble.exports.registry import ExportDraft, exporter
from debubble.frameworks.megatron.bridge_recipe import as_settings
from debubble.frameworks.megatron.export import (
    OPTIONS,
    arguments_of,
    environment,
    offload_arguments,
    recompute_choices,
    untested_settings,
)
from debubble.plans import Plan
from debubble.targets import targets

_TARGET = "AMD Primus"
_ON_BY_DEFAULT = ("bf16", "use_distributed_optimizer")
"""Switches that Primus's base configuration sets and an experiment must turn off."""


@exporter("primus", options=OPTIONS)
def primus(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`plan.yaml`, to be merged into an experiment's `modules.pre_trainer`."""
    stages = stage_layers(plan, target=_TARGET)
    order = require_order(plan, targets["primus"])
    plan, recompute, losses = _by_module(plan, stages) if plan.options.expert_overlap else _by_layer(plan)
    arguments = {**arguments_of(plan, stages, settings), **offload_arguments(plan, targets["primus"])}
    overrides = {**dict.fromkeys(_ON_BY_DEFAULT, False), **as_settings(arguments), **recompute}
    losses = (*losses, *untested_settings(plan))
    variables = environment(arguments)
    if variables:
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        losses = (*losses, f"Set {said} in the environment of the experiment.")
    if order == "zb-h1":
        overrides |= {"patch_primus_pipeline": True, "pp_algorithm": "zero-bubble"}
    config = {"modules": {"pre_trainer": {"framework": "megatron", "overrides": overrides}}}
    return ExportDraft({"plan.yaml": yaml.safe_dump(config, sort_keys=False, default_flow_style=None)}, plan, losses)


def _by_layer(plan: Plan) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """Full recomputation of layers by index."""
    plan, losses = whole_where_needed(plan, target=_TARGET)
    recomputed = recomputed_layers(plan, target=_TARGET)
    settings = {"recompute_granularity": "full", "recompute_method": None, "recompute_layer_ids": recomputed}
    return plan, settings if recomputed else {}, losses


def _by_module(plan: Plan, stages: Sequence[StageLayers]) -> tuple[Plan, dict[str, Any], tuple[str, ...]]:
    """Recomputation of modules in every layer, because combined 1F1B does not recompute full layers."""
    plan, recompute, losses = fastest(plan, recompute_choices(plan, stages), target=_TARGET)
    return plan, as_settings(recompute), losses
