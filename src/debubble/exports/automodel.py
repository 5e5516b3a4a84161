"""NeMo Automodel: the `distributed` section of its YAML recipe, with the order as CSV and the modules of each stage."""

from __future__ import annotations

import yaml

from debubble.exports.layers import stage_layers
from debubble.exports.module_names import hf_names
from debubble.exports.reduction import compute_only
from debubble.exports.registry import Export, exporter
from debubble.exports.torch_csv import to_csv
from debubble.exports.torch_hosts import placing_schedule, refuse_tied, split_losses
from debubble.ir import Plan


@exporter("automodel")
def automodel(plan: Plan) -> Export:
    """`plan.yaml`, to be merged into a recipe, and `schedule.csv`."""
    refuse_tied(plan, target="NeMo Automodel")
    stages = stage_layers(plan, target="NeMo Automodel")
    schedule = placing_schedule(plan, target="NeMo Automodel")
    reduction = compute_only(plan, target="NeMo Automodel")
    layers = [layer for stage in stages for layer in stage.layers]
    recomputing = any(layer.recomputes for layer in layers)
    losses = [*reduction.losses, *split_losses(plan)]
    if recomputing and not all(layer.whole for layer in layers):
        losses.append("Automodel recomputes all layers or none: here all, which is slower than planned.")
    options = plan.options
    recipe = {
        "step_scheduler": {"local_batch_size": options.micro_batch_size * plan.micro_batches},
        "distributed": {
            "strategy": "fsdp2",
            "pp_size": plan.devices,
            "tp_size": options.tensor,
            "cp_size": options.context,
            "activation_checkpointing": recomputing,
            "pipeline": {
                "pp_schedule": schedule,
                "pp_schedule_csv": "schedule.csv",
                "pp_microbatch_size": options.micro_batch_size,
                "module_fqns_per_model_part": hf_names(plan.model or {}, stages),
            },
        },
    }
    files = {"plan.yaml": yaml.safe_dump(recipe, sort_keys=False), "schedule.csv": to_csv(reduction.schedule)}
    return Export(files=files, losses=tuple(losses))
