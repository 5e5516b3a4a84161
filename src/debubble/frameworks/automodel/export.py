"""Exports plans to NeMo Automodel: a partial YAML recipe, the schedule as CSV, and the modules of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from debubble.costs.frameworks import framework_name, framework_of_options
from debubble.exports.layers import StageLayers, hf_names, stage_layers
from debubble.exports.options import (
    UNSETTABLE,
    Decision,
    Lost,
    OptionTable,
    as_tree,
    by_value,
    of_frameworks,
    one_setting,
)
from debubble.exports.reduction import Alternative, fastest
from debubble.exports.registry import ExportDraft, exporter
from debubble.frameworks.torch.export import to_csv
from debubble.frameworks.torch.shared_options import (
    accumulation,
    expert_degree,
    fsdp,
    placing_schedule,
    whole_backwards,
)
from debubble.plans import Plan

_TARGET = "NeMo Automodel"


def _batch(plan: Plan) -> Decision:
    """A pipeline splits the local batch into micro-batches; without one, it is a micro-batch of an accumulation."""
    size = plan.options.micro_batch_size
    batch = {"step_scheduler.global_batch_size": plan.degrees.global_batch}
    if plan.devices == 1:
        return {"step_scheduler.local_batch_size": size, **batch}
    local = size * plan.micro_batches
    return {"step_scheduler.local_batch_size": local, **batch, "distributed.pipeline.pp_microbatch_size": size}


def resharding(expert: int) -> str:
    """The setting that frees gathered weights after the forward; expert-parallel models have their own."""
    return f"distributed.{'moe.' if expert > 1 else ''}reshard_after_forward"


def _zero(plan: Plan) -> Decision:
    """With a pipeline, FSDP keeps weights and gradients unsharded until the end of the step."""
    if plan.devices > 1 or plan.options.zero == 0:
        return fsdp(plan, target=_TARGET)
    deferred = plan.options.zero == 1 or framework_of_options(plan.options.framework).defers_gradients
    return {
        resharding(plan.options.expert): plan.options.zero == 3,
        "distributed.defer_fsdp_grad_sync": deferred,
    }


def _framework(plan: Plan) -> Decision:
    """Set the gradient dtype and the token dispatcher, if the plan has Automodel's costs."""
    traits = framework_of_options(plan.options.framework)
    named = framework_name(plan.options.framework) == "automodel"
    sums = {"distributed.mp_policy.reduce_dtype": "bfloat16"} if named and traits.gradient_bytes == 2 else {}
    apart = named and plan.options.expert > 1 and not traits.dispatches_once
    return {**sums, **({"model.backend.dispatcher": "torch"} if apart else {})}


def _length(plan: Plan) -> Decision:
    return Lost(
        f"Sequences of {plan.options.sequence_length} tokens: set that in your recipe's dataset, each of which has its"
        " own setting."
    )


def _dtype(plan: Plan) -> Decision:
    """Weights are stored in the optimizer's master dtype; frozen ones, under LoRA, in bf16."""
    stored = "bfloat16" if plan.options.lora or plan.options.master_dtype == "bf16" else "float32"
    policy = {
        "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
        "reduce_dtype": "float32",
        "cast_forward_inputs": True,
    }
    computed = {"bf16": "bfloat16", "fp32": "float32"}
    settings = {
        name: {
            "model.torch_dtype": stored if name == "bf16" else "float32",
            "distributed.mp_policy": policy | {"param_dtype": dtype, "output_dtype": dtype},
        }
        for name, dtype in computed.items()
    }
    return by_value("dtype", settings)(plan)


def _lora(plan: Plan) -> Decision:
    if not plan.options.lora:
        return {}
    peft = "nemo_automodel.components._peft.lora.PeftConfig"
    return {"peft._target_": peft, "peft.target_modules": ["*_proj"], "peft.dim": plan.options.lora}


OPTIONS: OptionTable = {
    **UNSETTABLE,
    "framework": of_frameworks("automodel", settings=_framework),
    "micro_batch_size": _batch,
    "sequence_length": _length,
    "tensor": lambda plan: {
        "distributed.tp_size": plan.options.tensor,
        "distributed.sequence_parallel": plan.options.tensor > 1 and plan.options.sequence_parallel,
    },
    "data": one_setting("distributed.dp_size", "data"),
    "context": one_setting("distributed.cp_size", "context"),
    "expert": lambda plan: expert_degree(plan, name="distributed.ep_size"),
    "zero": _zero,
    "optimizer": by_value(
        "optimizer",
        {
            "adamw": {"optimizer._target_": "torch.optim.AdamW"},
            "adam": {"optimizer._target_": "torch.optim.Adam"},
            "momentum": {"optimizer._target_": "torch.optim.SGD", "optimizer.momentum": 0.9},
            "sgd": {"optimizer._target_": "torch.optim.SGD"},
        },
    ),
    "dtype": _dtype,
    "master_dtype": lambda plan: {},
    "lora": _lora,
}


@exporter("automodel", options=OPTIONS)
def automodel(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`plan.yaml`, to be merged into a recipe, and, for a pipeline, `schedule.csv`."""
    stages = stage_layers(plan, target=_TARGET, further_tokens=False)
    pipeline: dict[str, Any] = {}
    if plan.devices > 1:
        pipeline = {
            "distributed.pipeline.pp_schedule": placing_schedule(plan, target=_TARGET),
            "distributed.pipeline.pp_schedule_csv": "schedule.csv",
            "distributed.pipeline.module_fqns_per_model_part": hf_names(plan.model, stages),
        }
    plan, recomputing, losses = fastest(plan, _recompute_choices(stages), target=_TARGET)
    plan, split = whole_backwards(plan)
    recipe = as_tree(
        {
            "distributed.strategy": "fsdp2",
            "distributed.pp_size": plan.devices,
            **settings,
            "distributed.activation_checkpointing": recomputing,
            **pipeline,
        }
    )
    files = {"plan.yaml": yaml.safe_dump(recipe, sort_keys=False)}
    if plan.devices > 1:
        files["schedule.csv"] = to_csv(plan.schedule)
    else:
        split = (*accumulation(plan), *split)
    if plan.model is None and plan.devices > 1:
        split = (f"A step has {plan.micro_batches} micro-batches: set local_batch_size to as many of them.", *split)
    if recomputing:
        split = (
            "Of its own classes of models, Automodel recomputes the parts of a layer one by one, which keeps up to four"
            " inputs of a layer, not one: use the class of transformers, or leave a margin.",
            *split,
        )
    return ExportDraft(files, plan, (*losses, *split))


def _recompute_choices(stages: Sequence[StageLayers]) -> list[list[Alternative[bool]]]:
    """The two choices of recomputation: no layer and every layer."""
    layers = [layer for stage in stages for layer in stage.layers]
    nothing = {layer.index: ("none",) * len(layer.strategies) for layer in layers}
    everything = {layer.index: ("full",) * len(layer.strategies) for layer in layers}
    return [
        [Alternative(False, nothing, "")],
        [Alternative(True, everything, f"{_TARGET} recomputes all layers or none: here all")],
    ]
