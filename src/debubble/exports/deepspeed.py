"""DeepSpeed: a PipelineModule with the plan's bounds, and its config.

DeepSpeed has one stage per device, its own 1F1B order, and recomputes a stage's layers all or not at all.
"""

from __future__ import annotations

import itertools
import json

from debubble.exports.layers import StageLayers, stage_layers
from debubble.exports.reduction import compute_only, require_order
from debubble.exports.registry import Export, exporter
from debubble.ir import ExportError, Plan

_MODULE = '''"""A plan of debubble for DeepSpeed: use PlannedPipeline in place of PipelineModule."""

from deepspeed.pipe import PipelineModule

BOUNDS = {bounds}
"""Stage s holds the layers BOUNDS[s] to BOUNDS[s + 1] of the list {names}."""

RECOMPUTED_STAGES = {recomputed}


class PlannedPipeline(PipelineModule):
    """Takes the layers as one list: the embedding, each decoder layer, and norm with head as one."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != BOUNDS[-1]:
            raise ValueError(f"The plan is for {{BOUNDS[-1]}} layers, not {{len(layers)}}.")
        super().__init__(layers, num_stages={stages}, **options)
        self.activation_checkpoint_interval = int(self.stage_id in RECOMPUTED_STAGES)

    def _partition_layers(self, method="uniform"):
        self.parts = BOUNDS
        self._set_bounds(start=BOUNDS[self.stage_id], stop=BOUNDS[self.stage_id + 1])
'''


@exporter("deepspeed")
def deepspeed(plan: Plan) -> Export:
    """`planned_pipeline.py` and `ds_config.json`."""
    if plan.options.zero > 1:
        raise ExportError("DeepSpeed's pipeline works with ZeRO 0 or 1 only; plan again with --zero 1.")
    reduction = compute_only(plan, target="DeepSpeed")
    require_order(reduction.schedule, target="DeepSpeed", names=("1f1b",))
    stages = stage_layers(plan, target="DeepSpeed")
    recomputed = [s for s, stage in enumerate(stages) if any(layer.recomputes for layer in stage.layers)]
    partly = [s for s in recomputed if not all(layer.whole for layer in stages[s].layers)]
    losses = []
    if partly:
        where = f"{', '.join(map(str, partly))} {'recompute' if len(partly) > 1 else 'recomputes'}"
        losses.append(f"Stage{'s' * (len(partly) > 1)} {where} every layer, which is slower than planned.")
    bounds = [0, *itertools.accumulate(_length(stage) for stage in stages)]
    module = _MODULE.format(
        bounds=bounds,
        names=f"embedding, {bounds[-1] - 2} decoder layers, head",
        recomputed=set(recomputed) or "()",
        stages=plan.devices,
    )
    options = plan.options
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": {"stage": options.zero},
        "bf16": {"enabled": options.dtype == "bf16"},
    }
    files = {"planned_pipeline.py": module, "ds_config.json": json.dumps(config, indent=1) + "\n"}
    return Export(files=files, losses=(*reduction.losses, *losses))


def _length(stage: StageLayers) -> int:
    return stage.embedding + len(stage.layers) + stage.mtp + stage.head
