"""Exports plans to torchtitan: a Python recipe with the schedule as CSV, stages by modules, and recomputed layers.

The schedule's name still determines the placement of stages; the CSV replaces its order.  The micro-batch size has
other fields since 0.3.0, and the recipe checks which ones the config has.  Without a pipeline torchtitan accumulates
the gradients of micro-batches itself.  Releases up to 0.2 take a TOML file in place of the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pprint import pformat
from typing import Any

from debubble.costs.frameworks import framework_of_options
from debubble.exports.layers import StageLayers, stage_layers, torchtitan_names
from debubble.exports.options import UNSETTABLE, Decision, OptionTable, as_tree, by_value, of_frameworks, one_setting
from debubble.exports.reduction import recomputed_layers, whole_where_needed
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

_RECIPE = '''\
"""A plan of debubble for torchtitan: `apply` changes a Trainer.Config{alongside}."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC

RECOMPUTED_LAYERS = {recomputed}

MODULES = {modules}
"""The modules of each stage; None: there is no pipeline."""

MICRO_BATCHES = {micro_batches}
MICRO_BATCH_SIZE = {size}
SEQUENCE_LENGTH = {length}
PARALLELISM = {parallelism}
TRAINING = {training}
COMPILE = {compile}


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
        pipeline_parallel_schedule_csv=str(Path(__file__).with_name("schedule.csv")) if MODULES is not None else "",
        module_fqns_per_model_part=MODULES,
        **PARALLELISM,
        **micro_batches,
    )
    divided = MODULES is not None or PARALLELISM.get("expert_parallel_degree", 1) > 1
    graphs = {{"disable_cuda_graphs": True}} if divided else {{}}
    training = replace(config.training, **graphs, **TRAINING, **sizes)
    return replace(
        config,
        parallelism=parallelism,
        training=training,
        compile=replace(config.compile, **COMPILE),
        activation_checkpoint={checkpointing},
    )


def batches(config):
    """The fields of `parallelism` and of `training` for micro-batches, one step of the plan being one of torchtitan."""
    size, length = MICRO_BATCH_SIZE, SEQUENCE_LENGTH
    replicas = PARALLELISM.get("data_parallel_shard_degree", 1)
    if "num_pp_microbatches" in {{field.name for field in fields(config.parallelism)}}:
        sizes = {{"num_tokens_per_train_step": -1}}
        if size is not None:
            sizes["num_tokens_per_microbatch_per_dp_rank"] = size * length
            sizes["max_context_length"] = length
            if MODULES is None:
                sizes["num_tokens_per_train_step"] = MICRO_BATCHES * size * length * replicas
        return {{"num_pp_microbatches": MICRO_BATCHES if MODULES is not None else 1}}, sizes
    sizes = {{}} if length is None else {{"seq_len": length}}
    if MODULES is not None:
        size = size or config.parallelism.pipeline_parallel_microbatch_size
        sizes |= {{"local_batch_size": MICRO_BATCHES * size, "global_batch_size": -1}}
        return {{"pipeline_parallel_microbatch_size": size}}, sizes
    if size is not None:
        sizes |= {{"local_batch_size": size, "global_batch_size": MICRO_BATCHES * size * replicas}}
    return {{}}, sizes
'''


def _zero(plan: Plan) -> Decision:
    """Without a pipeline, the ZeRO level determines whether weights are resharded after a forward."""
    if plan.devices > 1 or plan.options.zero == 0:
        return fsdp(plan, target="torchtitan")
    return {"parallelism.fsdp_reshard_after_forward": "always" if plan.options.zero == 3 else "never"}


def _framework(plan: Plan) -> Decision:
    """Turn on torch.compile and asynchronous tensor parallelism, if the costs assume them."""
    traits = framework_of_options(plan.options.framework)
    overlapping = traits.compiled and traits.tensor_overlap and plan.options.tensor > 1
    return {
        "compile.enable": traits.compiled,
        **({"compile.enable_async_tensor_parallel": True} if overlapping else {}),
    }


OPTIONS: OptionTable = {
    **UNSETTABLE,
    "framework": of_frameworks("torchtitan", settings=_framework),
    "micro_batch_size": one_setting("size", "micro_batch_size"),
    "sequence_length": one_setting("length", "sequence_length"),
    "tensor": lambda plan: {
        "parallelism.tensor_parallel_degree": plan.options.tensor,
        "parallelism.enable_sequence_parallel": plan.options.sequence_parallel,
    },
    "data": lambda plan: {
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": plan.options.data,
    },
    "context": one_setting("parallelism.context_parallel_degree", "context"),
    "expert": lambda plan: expert_degree(plan, name="parallelism.expert_parallel_degree"),
    "zero": _zero,
    "optimizer": by_value("optimizer", {"adamw": {}, "adam": {}}),
    "dtype": by_value(
        "dtype",
        {
            "bf16": {"training.mixed_precision_param": "bfloat16"},
            "fp32": {"training.mixed_precision_param": "float32"},
        },
    ),
    "master_dtype": by_value(
        "master_dtype", {"fp32": {"training.dtype": "float32"}, "bf16": {"training.dtype": "bfloat16"}}
    ),
}


@exporter("torchtitan", options=OPTIONS)
def torchtitan(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`plan.py`, which changes a trainer config, and, for a pipeline, `schedule.csv`."""
    stages = stage_layers(plan, target="torchtitan", further_tokens=False)
    pipeline = plan.devices > 1
    parallelism: dict[str, Any] = {"pipeline_parallel_degree": plan.devices}
    if pipeline:
        parallelism["pipeline_parallel_schedule"] = placing_schedule(plan, target="torchtitan")
    plan, losses = whole_where_needed(plan, target="torchtitan")
    plan, split = whole_backwards(plan)
    tree = as_tree(settings)
    recomputed = set(recomputed_layers(plan, target="torchtitan"))
    recipe = _RECIPE.format(
        alongside="; schedule.csv belongs next to this file" if pipeline else "",
        recomputed=_python(recomputed or ()),
        modules=_python(torchtitan_names(stages) if pipeline else None),
        micro_batches=plan.micro_batches,
        size=tree.get("size"),
        length=tree.get("length"),
        parallelism=_python(parallelism | tree.get("parallelism", {})),
        training=_python(tree.get("training", {})),
        compile=_python(tree.get("compile", {})),
        checkpointing="PlannedAC.Config()" if recomputed else "None",
    )
    files = {"plan.py": recipe, **_toml_file(plan, tree, parallelism, stages, recomputed)}
    if not pipeline:
        return ExportDraft(files, plan, (*losses, *accumulation(plan), *split))
    return ExportDraft({**files, "schedule.csv": to_csv(plan.schedule)}, plan, (*losses, *split))


def _toml_file(
    plan: Plan,
    settings: Mapping[str, Any],
    parallelism: Mapping[str, Any],
    stages: Sequence[StageLayers],
    recomputed: Collection[int],
) -> dict[str, str]:
    """`plan.toml`, for torchtitan up to 0.2; empty if it cannot express the recomputation or sequence parallelism."""
    some = 0 < len(recomputed) < sum(len(stage.layers) for stage in stages)
    divided = dict(settings.get("parallelism", {}))
    whole_norms = not divided.pop("enable_sequence_parallel", True) and plan.options.tensor > 1
    if some or whole_norms or "size" not in settings:
        return {}
    compiled = dict(settings.get("compile", {}))
    if compiled.pop("enable_async_tensor_parallel", False):
        divided["enable_async_tensor_parallel"] = True
    size, number = settings["size"], plan.micro_batches
    batch = {"local_batch_size": size, "global_batch_size": plan.degrees.global_batch}
    if plan.devices > 1:
        batch = {"local_batch_size": size * number, "global_batch_size": -1}
        names = [["output" if name == "lm_head" else name for name in modules] for modules in torchtitan_names(stages)]
        divided |= {"pipeline_parallel_microbatch_size": size, "pipeline_parallel_schedule_csv": "schedule.csv"}
        divided |= {"module_fqns_per_model_part": names}
    tables: dict[str, Mapping[str, Any]] = {
        "training": {**settings.get("training", {}), "seq_len": settings["length"], **batch},
        "parallelism": {**parallelism, **divided},
        "activation_checkpoint": {"mode": "full" if recomputed else "none"},
        "compile": compiled,
    }
    text = "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in entries.items())
        for table, entries in tables.items()
    )
    o = plan.options
    undivided = o.data * o.context == 1 and (plan.devices > 1 or o.tensor > 1)
    undivided = undivided and (o.dtype, o.master_dtype) == ("bf16", "fp32")
    fp32 = (
        "# Without FSDP torchtitan to 0.2 computes in fp32, unless training.dtype is bfloat16.\n" if undivided else ""
    )
    return {"plan.toml": f"# A plan of debubble for torchtitan to 0.2, to be merged into a job's file.\n{fp32}{text}"}


def _python(value: object) -> str:
    return pformat(value, width=110, compact=True, sort_dicts=False)
