"""Exports plans to DeepSpeed: a config, and a PipelineModule with the plan's bounds and recomputation.

DeepSpeed has one stage per device and its own 1F1B order.  Its pipeline engine rejects ZeRO-2 and ZeRO-3; a plan
without a pipeline uses the other engine, with a config and a function that makes layers recompute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from debubble.costs.frameworks import framework_name, framework_of_options
from debubble.exports.layers import StageLayers, stage_layers
from debubble.exports.options import (
    UNSETTABLE,
    Decision,
    Lost,
    OptionTable,
    as_tree,
    by_value,
    global_batch,
    of_frameworks,
    one_setting,
    set_by_target_rules,
)
from debubble.exports.reduction import recomputed_layers, require_order, whole_where_needed
from debubble.exports.registry import ExportDraft, exporter
from debubble.plans import Plan
from debubble.targets import targets

_MODULE = '''"""A plan of debubble for DeepSpeed: use PlannedPipeline in place of PipelineModule."""

from deepspeed.pipe import PipelineModule

BOUNDS = {bounds}
"""Stage s holds the layers BOUNDS[s] to BOUNDS[s + 1] of the list {names}."""

RECOMPUTED_LAYERS = {recomputed}
"""Indices in the same list."""


class PlannedPipeline(PipelineModule):
    """Takes the layers as one list: the embedding, each decoder layer, and norm with head as one."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != BOUNDS[-1]:
            raise ValueError(f"The plan is for {{BOUNDS[-1]}} layers, not {{len(layers)}}.")
        options |= {{"num_stages": {stages}, "activation_checkpoint_interval": int(bool(RECOMPUTED_LAYERS))}}
        super().__init__(layers, **options)

    def _partition_layers(self, method="uniform"):
        self.parts = BOUNDS
        self._set_bounds(start=BOUNDS[self.stage_id], stop=BOUNDS[self.stage_id + 1])

    def _is_checkpointable(self, funcs):
        """Whether the plan recomputes the layer; DeepSpeed asks layer by layer, at an interval of 1."""
        held = BOUNDS[self.stage_id]
        index = next(i for i, layer in enumerate(self.forward_funcs) if layer is funcs[0])
        return held + index in RECOMPUTED_LAYERS
'''

_LAYERS = '''"""A plan of debubble for DeepSpeed: `recompute` the decoder layers before deepspeed.initialize."""

from functools import partial

from torch.utils.checkpoint import checkpoint

RECOMPUTED_LAYERS = {recomputed}
"""Indices of decoder layers."""


def recompute(layers):
    """Makes the planned layers recompute in their backward."""
    for index, layer in enumerate(layers):
        if index in RECOMPUTED_LAYERS:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
'''


def _length(plan: Plan) -> Decision:
    return Lost(
        f"Sequences of {plan.options.sequence_length} tokens: DeepSpeed takes them as your data loader gives them."
    )


def _zero(plan: Plan) -> Decision:
    """The ZeRO stage; ZeRO-3 gathers two layers at a time, as the costs assume, fewer than DeepSpeed's default."""
    # A single rank needs ZeRO too: without it DeepSpeed sums gradients in another dtype or twice, and cannot offload.
    alone = plan.options.data == 1 and (_sums_in_16_bits(plan) or _sums_in_fp32(plan))
    stage = {"zero_optimization.stage": max(plan.options.zero, int(plan.options.host_optimizer > 0 or alone))}
    model = plan.model
    if plan.options.zero < 3 or model is None:
        return stage
    layer = max(model.layer_parameters(layer) for layer in range(model.layers))
    return {
        **stage,
        "zero_optimization.stage3_max_live_parameters": 2 * layer,
        "zero_optimization.stage3_max_reuse_distance": 0,
        "zero_optimization.stage3_prefetch_bucket_size": layer,
    }


def _sums_in_16_bits(plan: Plan) -> bool:
    """Tell whether the costs assume gradients in bf16; plans without a framework assume fp32."""
    return plan.options.dtype == "bf16" and framework_of_options(plan.options.framework).gradient_bytes == 2


def _sums_in_fp32(plan: Plan) -> bool:
    """Tell whether the plan has DeepSpeed's costs with fp32 gradients in bf16 training."""
    o = plan.options
    named = bool(o.framework) and framework_name(o.framework) in ("", "deepspeed")
    return named and o.dtype == "bf16" and not _sums_in_16_bits(plan)


def _framework(plan: Plan) -> Decision:
    """The gradient dtype, if the plan has DeepSpeed's costs and the dtype differs from its default."""
    o = plan.options
    if not _sums_in_fp32(plan) or (o.zero == 0 and o.data > 1):
        return {}
    settings: dict[str, Any] = {"data_types.grad_accum_dtype": "fp32"}
    if o.zero < 2 and not o.host_optimizer:
        # ZeRO-1 uses a separate optimizer for this, which by default keeps the gradients in bf16 as well.
        settings["bf16.immediate_grad_update"] = True
    return settings


def _gradient_dtype(plan: Plan) -> Decision:
    """The gradient dtype without ZeRO, which depends on DeepSpeed's version; pipelines store gradients twice.

    Source: get_data_types in runtime/engine.py of 0.17.0 and 0.17.6; runtime/bf16_optimizer.py of 0.19.8.
    """
    if plan.options.zero or plan.options.data == 1:
        return {}
    if _sums_in_fp32(plan):
        return Lost("DeepSpeed sums gradients in bf16 without ZeRO from 0.17.6 on, not in fp32: give --zero 1.")
    if not _sums_in_16_bits(plan):
        return {}
    return Lost(
        "Without ZeRO a DeepSpeed pipeline keeps gradients twice, 2 bytes a parameter more than planned, and before"
        " 0.17.6 in fp32, 4 bytes more: give --zero 1."
        if plan.devices > 1
        else "Before 0.17.6 DeepSpeed sums gradients in fp32 without ZeRO, 2 bytes a parameter more than planned: give"
        " --zero 1."
    )


def _optimizer(plan: Plan) -> Decision:
    """The script must create the optimizer; DeepSpeed has no default."""
    if plan.options.host_optimizer and _steps_on_host(plan):
        return Lost("States on hosts: make DeepSpeedCPUAdam, or name the optimizer in the configuration's `optimizer`.")
    return Lost(f"Optimizer {plan.options.optimizer}: give it to DeepSpeed; the plan's memory counts on its states.")


def _host_optimizer(plan: Plan) -> Decision:
    """ZeRO-Offload, with states and optimizer step on the host; other optimizers than DeepSpeed's must be allowed."""
    if not plan.options.host_optimizer:
        return {}
    return {
        "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_optimizer.pin_memory": True,
        **(
            {}
            if _steps_on_host(plan)
            else {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        ),
    }


def _steps_on_host(plan: Plan) -> bool:
    """Tell whether DeepSpeedCPUAdam is the plan's optimizer."""
    return plan.options.optimizer in ("adam", "adamw")


OPTIONS: OptionTable = {
    **UNSETTABLE,
    "framework": of_frameworks("deepspeed", settings=_framework),
    "micro_batch_size": one_setting("train_micro_batch_size_per_gpu", "micro_batch_size"),
    "sequence_length": _length,
    "tensor": set_by_target_rules,
    "data": global_batch("train_batch_size"),
    "context": set_by_target_rules,
    "expert": set_by_target_rules,
    "zero": _zero,
    "optimizer": _optimizer,
    "host_optimizer": _host_optimizer,
    "gradient_dtype": _gradient_dtype,
    "master_dtype": by_value(
        "master_dtype",
        {"fp32": {}, "bf16": {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}},
    ),
    "dtype": by_value("dtype", {"bf16": {"bf16.enabled": True}, "fp16": {"fp16.enabled": True}, "fp32": {}}),
}


@exporter("deepspeed", options=OPTIONS)
def deepspeed(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`ds_config.json`, and the module or function for the model's layers."""
    stages = stage_layers(plan, target="DeepSpeed", further_tokens=False)
    require_order(plan, targets["deepspeed"])
    plan, losses = whole_where_needed(plan, target="DeepSpeed")
    recomputed = set(recomputed_layers(plan, target="DeepSpeed"))
    config = {"gradient_accumulation_steps": plan.micro_batches, **as_tree(settings)}
    if plan.devices == 1:
        files = {"planned_layers.py": _LAYERS.format(recomputed=recomputed)} if recomputed else {}
    else:
        files = {"planned_pipeline.py": _module(stages, recomputed)}
        if plan.options.lora and recomputed:
            # After a frozen embedding nothing asks for a gradient, which reentrant checkpoints need.
            config["pipeline"] = {"use_reentrant": False}
    return ExportDraft({**files, "ds_config.json": json.dumps(config, indent=1) + "\n"}, plan, losses)


def _module(stages: Sequence[StageLayers], recomputed: Collection[int]) -> str:
    """The Python file with the pipeline module; its list of layers starts with the embedding."""
    bounds = [0, *itertools.accumulate(_length_of(stage) for stage in stages)]
    first = int(stages[0].embedding)
    count = sum(len(stage.layers) for stage in stages)
    return _MODULE.format(
        bounds=bounds,
        names=", ".join([*["embedding"] * first, f"{count} decoder layers", *["head"] * stages[-1].head]),
        recomputed={first + index for index in recomputed} or "()",
        stages=len(stages),
    )


def _length_of(stage: StageLayers) -> int:
    return stage.embedding + len(stage.layers) + stage.head
