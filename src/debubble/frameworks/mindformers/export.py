"""Exports plans to MindFormers: the YAML entries for layers per stage, and recomputed layers per stage.

`offset[c][d]` is the number of layers of chunk c on device d minus L // (p v); `recompute[c][d]` and each pattern of
`select_recompute` count layers from the start of the chunk.  The order is MindSpore's 1F1B or interleaved 1F1B.
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
    """MindSpore's parallel optimizer shards weights too; sharding of accumulated gradients is its ZeRO-2."""
    divides = plan.options.zero >= 2
    return {
        "parallel.enable_parallel_optimizer": plan.options.zero >= 1,
        "parallel.parallel_optimizer_config.gradient_accumulation_shard": divides,
    }


def _dtype(plan: Plan) -> Decision:
    """The costs assume attention that does not store scores."""
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
    """One number per device, as one list per chunk, or as a flat list if there is a single chunk."""
    counts = [count(stage) for stage in stages]
    chunks = [counts[start : start + devices] for start in range(0, len(counts), devices)]
    return chunks[0] if len(chunks) == 1 else chunks


def _expressible(layer: PlannedLayer) -> bool:
    return layer.full or layer.operators <= MINDFORMERS_CELLS.keys()


def _recompute(stages: Sequence[StageLayers], devices: int) -> dict[str, Any]:
    """Numbers of fully recomputed layers, then of layers per pattern."""
    partly = [layer for stage in stages for layer in stage.layers if not layer.full]
    patterns = {
        pattern: _per_chunk(stages, devices, lambda stage, name=name: _pattern_layers(stage, name))  # type: ignore[misc]
        for name, cells in MINDFORMERS_CELLS.items()
        for pattern in cells
        if any(name in layer.operators for layer in partly)
    }
    full_layers = _per_chunk(stages, devices, _full_layers) if any(map(_full_layers, stages)) else False
    return {"recompute": full_layers, "select_recompute": patterns or False}


def _full_layers(stage: StageLayers) -> int:
    return sum(layer.full for layer in stage.layers)


def _pattern_layers(stage: StageLayers, operator: str) -> int:
    """Number of leading layers with a pattern: the fully recomputed ones, then those that recompute the operator."""
    having = sum(operator in layer.operators for layer in stage.layers if not layer.full)
    return _full_layers(stage) + having if having else 0


def _is_unsorted(stage: StageLayers) -> bool:
    """Tell whether layers are not sorted by recomputation: full, partial, none."""
    keys = [(not layer.full, not layer.recomputes) for layer in stage.layers]
    return keys != sorted(keys)
