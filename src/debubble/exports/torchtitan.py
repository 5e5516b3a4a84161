"""torchtitan: a Python recipe with the order as CSV, the modules of each stage, and recomputation per layer.

The schedule's name still decides where the stages are placed; the CSV replaces its order.  The recipe asks the config
which of two sets of fields says how large a micro-batch is: those of 0.3.0, or those that replaced them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from typing import Any

from debubble.exports.layers import stage_layers
from debubble.exports.module_names import torchtitan_names
from debubble.exports.options import OptionTable, Written, adapters, by_value, nested, post_validation, written
from debubble.exports.recomputation import whole_where_needed
from debubble.exports.registry import Made, exporter
from debubble.exports.torch_csv import to_csv
from debubble.exports.torch_hosts import (
    expert_degree,
    fsdp,
    placing_schedule,
    refuse_mtp,
    whole_backwards,
    whole_experts,
)
from debubble.ir import Plan

_RECIPE = '''\
"""A plan of debubble for torchtitan: `apply` changes a Trainer.Config; schedule.csv belongs beside this file."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

RECOMPUTED_LAYERS = {recomputed}

MODULES = {modules}

MICRO_BATCHES = {micro_batches}
MICRO_BATCH_SIZE = {size}
SEQUENCE_LENGTH = {length}
PARALLELISM = {parallelism}
TRAINING = {training}


class PlannedAC(FullAC):
    """Recomputes the layers of the plan and no others."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def apply(self, model):
        layers = model.get_submodule("layers")
        for name, block in list(layers.named_children()):
            if int(name) in RECOMPUTED_LAYERS:
                layers.register_module(name, self._wrap_block(block, base_fqn=f"layers.{{name}}"))


def apply(config):
    """The config with the plan, changed at once, because its parts are checked against each other."""
    micro_batches, sizes = batches(config)
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_schedule_csv=str(Path(__file__).with_name("schedule.csv")),
        module_fqns_per_model_part=MODULES,
        **PARALLELISM,
        **micro_batches,
    )
    training = replace(config.training, disable_cuda_graphs=True, **TRAINING, **sizes)
    return replace(
        config, parallelism=parallelism, training=training, activation_checkpoint={checkpointing}
    )


def batches(config):
    """The fields of `parallelism` and of `training` for micro-batches, one step of the plan being one of torchtitan."""
    if "num_pp_microbatches" in {{field.name for field in fields(config.parallelism)}}:
        sizes = {{"num_tokens_per_train_step": -1}}
        if MICRO_BATCH_SIZE is not None:
            sizes["num_tokens_per_microbatch_per_dp_rank"] = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
            sizes["max_context_length"] = SEQUENCE_LENGTH
        return {{"num_pp_microbatches": MICRO_BATCHES}}, sizes
    size = MICRO_BATCH_SIZE or config.parallelism.pipeline_parallel_microbatch_size
    sizes = {{"local_batch_size": MICRO_BATCHES * size, "global_batch_size": -1}}
    if SEQUENCE_LENGTH is not None:
        sizes["seq_len"] = SEQUENCE_LENGTH
    return {{"pipeline_parallel_microbatch_size": size}}, sizes
'''

OPTIONS: OptionTable = {
    "micro_batch_size": written("size", lambda plan: plan.options.micro_batch_size),
    "sequence_length": written("length", lambda plan: plan.options.sequence_length),
    "tensor": lambda plan: Written(
        {"parallelism.tensor_parallel_degree": plan.options.tensor, "parallelism.enable_sequence_parallel": True}
    ),
    "data": lambda plan: Written(
        {
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": plan.options.data,
        }
    ),
    "context": written("parallelism.context_parallel_degree", lambda plan: plan.options.context),
    "expert": lambda plan: expert_degree(plan, name="parallelism.expert_parallel_degree"),
    "expert_tensor": whole_experts,
    "zero": lambda plan: fsdp(plan, target="torchtitan"),
    "optimizer": by_value("optimizer", {"adamw": {}, "adam": {}}),
    "dtype": by_value(
        "dtype",
        {
            "bf16": {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"},
            "fp32": {"training.dtype": "float32", "training.mixed_precision_param": "float32"},
        },
    ),
    "lora": adapters,
    "post_validation": post_validation,
}


@exporter("torchtitan", options=OPTIONS)
def torchtitan(plan: Plan, settings: Mapping[str, Any]) -> Made:
    """`plan.py`, which changes a trainer config, and `schedule.csv`."""
    stages = stage_layers(plan, target="torchtitan")
    refuse_mtp(stages, target="torchtitan")
    schedule = placing_schedule(plan, target="torchtitan")
    plan, losses = whole_where_needed(
        plan, stages, target="torchtitan", expressible=lambda layer: layer.whole or not layer.recomputes
    )
    plan, split = whole_backwards(plan)
    tree = nested(settings)
    parallelism = {"pipeline_parallel_degree": plan.devices, "pipeline_parallel_schedule": schedule}
    recomputed = {
        layer.index for stage in stage_layers(plan, target="torchtitan") for layer in stage.layers if layer.recomputes
    }
    recipe = _RECIPE.format(
        recomputed=_python(recomputed or ()),
        modules=_python(torchtitan_names(stages)),
        micro_batches=plan.micro_batches,
        size=tree.get("size"),
        length=tree.get("length"),
        parallelism=_python(parallelism | tree.get("parallelism", {})),
        training=_python(tree.get("training", {})),
        checkpointing="PlannedAC.Config()" if recomputed else "None",
    )
    return Made({"plan.py": recipe, "schedule.csv": to_csv(plan.schedule)}, plan, (*losses, *split))


def _python(value: object) -> str:
    return pformat(value, width=110, compact=True, sort_dicts=False)
