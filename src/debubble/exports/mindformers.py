"""MindFormers: the parts of its YAML that say how many layers each stage has, and how many of them recompute.

`offset[c][d]` is what chunk c of device d has more than L // (p v) layers; `recompute[c][d]` and each pattern of
`select_recompute` count layers from the start of the chunk.  The order is MindSpore's own 1F1B or interleaved one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import yaml

from debubble.exports.layers import Layer, StageLayers, stage_layers
from debubble.exports.reduction import compute_only, require_order
from debubble.exports.registry import Export, exporter
from debubble.ir import Plan

_PATTERNS = {
    "0:norm": r"attention_norm\.norm",
    "1:norm": r"ffn_norm\.norm",
    "1:activation": r"feed_forward\.w1\.activation\.silu",
    "1:multiply": r"feed_forward\.mul",
}
"""Operators of the attention half (0) and the MLP half (1) of a layer, as MindFormers' cells."""


@exporter("mindformers")
def mindformers(plan: Plan) -> Export:
    """`plan.yaml`, to be merged into a run's configuration."""
    reduction = compute_only(plan, target="MindFormers")
    require_order(reduction.schedule, target="MindFormers", names=("1f1b", "interleaved"))
    stages = stage_layers(plan, target="MindFormers")
    options = plan.options
    chunks = plan.schedule.placement.chunks
    layers = sum(len(stage.layers) for stage in stages)
    even = layers // len(stages)
    recompute, losses = _recompute(stages, plan.devices)
    config = {
        "parallel": {"pipeline_config": {"pipeline_interleave": chunks > 1, "pipeline_scheduler": "1f1b"}},
        "parallel_config": {
            "data_parallel": options.data,
            "model_parallel": options.tensor,
            "context_parallel": options.context,
            "pipeline_stage": plan.devices,
            "micro_batch_num": plan.micro_batches,
        },
        "model": {
            "model_config": {
                "num_layers": layers,
                "seq_length": options.sequence_length,
                "pp_interleave_num": chunks,
                "offset": _per_chunk(stages, plan.devices, lambda stage: len(stage.layers) - even),
            }
        },
        "recompute_config": recompute,
    }
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None)
    return Export(files={"plan.yaml": text}, losses=(*reduction.losses, *losses))


def _per_chunk(stages: Sequence[StageLayers], devices: int, count: Callable[[StageLayers], int]) -> list[Any]:
    """One number per device, in one list per chunk; a single chunk needs no list around it."""
    counts = [count(stage) for stage in stages]
    chunks = [counts[at : at + devices] for at in range(0, len(counts), devices)]
    return chunks[0] if len(chunks) == 1 else chunks


def _recompute(stages: Sequence[StageLayers], devices: int) -> tuple[dict[str, Any], list[str]]:
    """Whole layers first, then patterns.  What no pattern names is recomputed with its layer."""
    layers = [layer for stage in stages for layer in stage.layers]
    partly = [layer for layer in layers if layer.recomputes and not layer.whole]
    rounded = [layer.index for layer in partly if _is_whole(layer)]
    losses = [f"Layers {rounded} recompute wholly, which is slower than planned."] if rounded else []
    if any(_moved(stage) for stage in stages):
        losses.append("Recomputation counts from each chunk's first layer: as many layers, but others.")
    config: dict[str, Any] = {"recompute": _per_chunk(stages, devices, _whole) if any(map(_whole, stages)) else False}
    patterns = {
        pattern: _per_chunk(stages, devices, lambda stage, name=name: _reach(stage, name))  # type: ignore[misc]
        for name, pattern in _PATTERNS.items()
        if any(name in layer.operators for layer in partly if not _is_whole(layer))
    }
    return config | {"select_recompute": patterns or False}, losses


def _is_whole(layer: Layer) -> bool:
    return layer.whole or not layer.operators <= _PATTERNS.keys()


def _whole(stage: StageLayers) -> int:
    return sum(_is_whole(layer) for layer in stage.layers)


def _reach(stage: StageLayers, operator: str) -> int:
    """Layers up to which a pattern holds: the whole ones, which come first, and those that have it."""
    having = sum(operator in layer.operators for layer in stage.layers if not _is_whole(layer))
    return _whole(stage) + having if having else 0


def _moved(stage: StageLayers) -> bool:
    """Whether the layers that recompute are not already sorted, most first."""
    keys = [(not _is_whole(layer), not layer.recomputes) for layer in stage.layers]
    return keys != sorted(keys)
