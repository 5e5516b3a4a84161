"""MindFormers: the parts of its YAML that say how many layers each stage has, and how many of them recompute.

`offset[c][d]` is what chunk c of device d has more than L // (p v) layers; `recompute[c][d]` and each pattern of
`select_recompute` count layers from the start of the chunk.  The order is MindSpore's own 1F1B or interleaved one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from debubble.exports.layers import PlannedLayer, StageLayers, stage_layers
from debubble.exports.options import UNSETTABLE, Decision, OptionTable, as_tree, by_value, one_setting
from debubble.exports.reduction import require_order, whole_where_needed
from debubble.exports.registry import ExportDraft, exporter
from debubble.frameworks.mindformers.target import MINDFORMERS_CELLS
from debubble.plans import Plan
from debubble.targets import targets

_TARGET = "MindFormers"


def _zero(plan: Plan) -> Decision:
    """MindSpore's parallel optimizer divides weights too; ZeRO-2 is its division of gradients that add up."""
    divides = plan.options.zero >= 2
    return {
        "parallel.enable_parallel_optimizer": plan.options.zero >= 1,
        "parallel.parallel_optimizer_config.gradient_accumulation_shard": divides,
    }


def _dtype(plan: Plan) -> Decision:
    """The costs count on attention that keeps no scores."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return {
        "model.model_config.compute_dtype": names[plan.options.dtype],
        "model.model_config.param_init_type": "float32",
        "model.model_config.use_flash_attention": True,
    }


OPTIONS: OptionTable = {
    **UNSETTABLE,
    "micro_batch_size": one_setting("runner_config.batch_size", "micro_batch_size"),
    "sequence_length": one_setting("model.model_config.seq_length", "sequence_length"),
    "tensor": lambda plan: {
        "parallel_config.model_parallel": plan.options.tensor,
        "parallel_config.use_seq_parallel": plan.options.tensor > 1 and plan.options.sequence_parallel,
    },
    "data": one_setting("parallel_config.data_parallel", "data"),
    "context": one_setting("parallel_config.context_parallel", "context"),
    "expert": one_setting("parallel_config.expert_parallel", "expert"),
    "zero": _zero,
    "optimizer": by_value("optimizer", {"adamw": {"optimizer.type": "AdamW"}}),
    "dtype": _dtype,
}


@exporter("mindformers", options=OPTIONS)
def mindformers(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`plan.yaml`, to be merged into a run's configuration."""
    stages = stage_layers(plan, target=_TARGET, further_tokens=False)
    require_order(plan, targets["mindformers"])
    plan, losses = whole_where_needed(plan, target=_TARGET, expressible=_expressible)
    stages = stage_layers(plan, target=_TARGET)
    chunks = plan.schedule.placement.chunks
    layers = sum(len(stage.layers) for stage in stages)
    even = layers // len(stages)
    config = as_tree(
        {
            "parallel.pipeline_config.pipeline_interleave": chunks > 1,
            "parallel.pipeline_config.pipeline_scheduler": "1f1b",
            "parallel_config.pipeline_stage": plan.devices,
            "parallel_config.micro_batch_num": plan.micro_batches,
            **settings,
            "model.model_config.num_layers": layers,
            "model.model_config.pp_interleave_num": chunks,
            "model.model_config.offset": _per_chunk(stages, plan.devices, lambda stage: len(stage.layers) - even),
            "recompute_config": _recompute(stages, plan.devices),
        }
    )
    if any(_is_unsorted(stage) for stage in stages):
        losses = (*losses, "Recomputation counts from each chunk's first layer: as many layers, but others.")
    return ExportDraft({"plan.yaml": yaml.safe_dump(config, sort_keys=False, default_flow_style=None)}, plan, losses)


def _per_chunk(stages: Sequence[StageLayers], devices: int, count: Callable[[StageLayers], int]) -> list[Any]:
    """One number per device, in one list per chunk; a single chunk needs no list around it."""
    counts = [count(stage) for stage in stages]
    chunks = [counts[at : at + devices] for at in range(0, len(counts), devices)]
    return chunks[0] if len(chunks) == 1 else chunks


def _expressible(layer: PlannedLayer) -> bool:
    return layer.full or layer.operators <= MINDFORMERS_CELLS.keys()


def _recompute(stages: Sequence[StageLayers], devices: int) -> dict[str, Any]:
    """Whole layers first, then patterns."""
    partly = [layer for stage in stages for layer in stage.layers if not layer.full]
    patterns = {
        pattern: _per_chunk(stages, devices, lambda stage, name=name: _reach(stage, name))  # type: ignore[misc]
        for name, cells in MINDFORMERS_CELLS.items()
        for pattern in cells
        if any(name in layer.operators for layer in partly)
    }
    whole = _per_chunk(stages, devices, _whole) if any(map(_whole, stages)) else False
    return {"recompute": whole, "select_recompute": patterns or False}


def _whole(stage: StageLayers) -> int:
    return sum(layer.full for layer in stage.layers)


def _reach(stage: StageLayers, operator: str) -> int:
    """Layers up to which a pattern holds: the whole ones, which come first, and those that have it."""
    having = sum(operator in layer.operators for layer in stage.layers if not layer.full)
    return _whole(stage) + having if having else 0


def _is_unsorted(stage: StageLayers) -> bool:
    """Tell whether the layers that recompute are not already sorted, most first."""
    keys = [(not layer.full, not layer.recomputes) for layer in stage.layers]
    return keys != sorted(keys)
