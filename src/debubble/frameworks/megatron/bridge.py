"""Megatron-Bridge (NeMo): the YAML of a run's ConfigContainer, or of an override, as Megatron-LM's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from debubble.frameworks.megatron.arguments import is_off
from debubble.imports.command_line import CommandLine
from debubble.imports.settings import RECIPE, read_settings
from debubble.ir import InputError

PARTS = ("model", "train", "ddp", "optimizer", "comm_overlap", "checkpoint")
"""The parts of the configuration whose settings are arguments."""
_NAMES = {
    "num_moe_experts": "num-experts",
    "gated_linear_unit": "swiglu",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
"""Settings that Megatron-LM calls otherwise."""
_ADAPTERS = "peft._target_"
_STAGES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def read_bridge(path: Path, given: CommandLine) -> Mapping[str, Any]:
    """The settings as arguments, `--name` -> value, and the model's name as `model`; those that are off are left out.

    Raises:
        InputError: if the file is no configuration of Megatron-Bridge, or of no training.
    """
    return _read_settings({name: given.expand(value) for name, value in read_settings(path).items()}, path)


def _read_settings(whole: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    if whole.get("MODE") == "inference":
        raise InputError(f"{path} says MODE: inference: it generates, and nothing of it is trained.")
    if "model.encoder_seq_length" in whole or any(name.startswith("exp_manager.") for name in whole):
        raise InputError(
            f"{path} is a configuration of NeMo 1, which is not read: give what it says as Megatron-LM's arguments in a"
            " script (`pretrain_gpt.py --tensor-model-parallel-size 8 --micro-batch-size 1 --num-layers 96 --bf16`)."
        )
    if any(name.startswith(ARGUMENTS) for name in whole):
        return read_mapping(whole)
    settings = {
        name: value
        for name, value in whole.items()
        if (value is False or not is_off(name.rpartition(".")[2], value))
        and (not name.rpartition(".")[2].startswith("_") or name == _ADAPTERS)
    }
    if not any(name.startswith("model.") for name in settings):
        raise InputError(
            f"{path} has no model, as configurations of Megatron-Bridge have: give the run's configuration, or a YAML"
            " with Megatron-LM's arguments under MODEL_ARGS."
        )
    return {"framework": "megatron-bridge", **dict(_arguments(settings))}


_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+|mixed_precision)=(.*)", re.DOTALL)
_OWN_ARGUMENTS = {
    "model.tensor_model_parallel_size": ("-tp",), "model.pipeline_model_parallel_size": ("-pp",),
    "model.context_parallel_size": ("-cp",), "model.expert_model_parallel_size": ("-ep",),
    "model.virtual_pipeline_model_parallel_size": ("-vp",), "model.expert_tensor_parallel_size": ("-et",),
    "train.micro_batch_size": ("-mb",), "train.global_batch_size": ("-gb",), "model.seq_length": ("-sl",),
    "model.recompute_num_layers": ("-rl",), "model.pipeline_model_parallel_layout": (), "model.num_layers": (),
    "model.hidden_size": (), "mixed_precision": ("-c", "--compute_dtype"), "model.recompute_modules": ("-rm",),
    "ddp.use_megatron_fsdp": (), "model.cuda_graph_impl": (), "model.cuda_graph_scope": (),
    "comm_overlap.overlap_moe_expert_parallel_comm": ("--moe_a2a_overlap",),
}  # fmt: skip
"""Setting -> the arguments of scripts/performance that say it, besides its own name."""
_IMPLIED: Mapping[str, Mapping[str, Any]] = {
    "model.recompute_num_layers": {"model.recompute_granularity": "full", "model.recompute_method": "block"},
    "model.recompute_modules": {"model.recompute_granularity": "selective"},
    "ddp.use_megatron_fsdp": {"ddp.data_parallel_sharding_strategy": "optim_grads_params"},
    "comm_overlap.overlap_moe_expert_parallel_comm": {"comm_overlap.delay_wgrad_compute": True},
    "model.tensor_model_parallel_size": {"model.sequence_parallel": True},
}
"""Setting that such an argument says -> what scripts/performance sets with it (utils/overrides.py)."""
_PRECISIONS = {
    "bf16": "bf16_mixed", "fp8_cs": "bf16_with_fp8_current_scaling_mixed", "nvfp4": "bf16_with_nvfp4_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed", "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
}  # fmt: skip
"""Dtypes of scripts/performance -> the recipe of dtypes."""
_DECIDING = (
    "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.seq_length",
    "train.micro_batch_size", "train.global_batch_size",
)  # fmt: skip
"""Settings that a launch must say, as a recipe's own are not known here."""
_KIND_OF_RECIPE = re.compile(r"_(pretrain|finetune|sft|peft|lora)(_.*)?$")


def read_recipe(words: Sequence[str], path: Path) -> Mapping[str, Any]:
    """The settings that a command overrides in a recipe, as arguments.

    Args:
        words: The command's.
        path: The script.

    Raises:
        InputError: if it leaves the recipe a degree or a batch.
    """
    values = dict(pairwise([*(part for word in words for part in _named(word)), ""]))
    overrides = (match for word in words if (match := _OVERRIDE.fullmatch(word)) is not None)
    settings = {match[1]: _value(match[2]) for match in overrides}
    for name, others in _OWN_ARGUMENTS.items():
        said = next((values[each] for each in (f"--{name.rpartition('.')[2]}", *others) if each in values), None)
        if said is not None:
            settings[name] = _PRECISIONS.get(said, said) if name == "mixed_precision" else _value(said)
            off = (False, 1) if name == "model.tensor_model_parallel_size" else (False,)
            if settings[name] not in off or settings[name] is True:
                settings = {**_IMPLIED.get(name, {}), **settings}
    settings.setdefault("model.seq_length", settings.get("dataset.seq_length", settings.get("dataset.sequence_length")))
    if left := [name for name in _DECIDING if settings.get(name) is None]:
        raise InputError(
            f"{path} starts a recipe of Megatron-Bridge, and leaves {', '.join(left)} to it: give these with --args"
            f" '{left[0]}=1 ...', or import the configuration that its run saves (run_config.yaml)."
        )
    recipe = next((values[name] for name in ("--recipe", "--model_recipe_name", "-mr") if name in values), "")
    model = values.get("--hf_path") or _KIND_OF_RECIPE.sub("", recipe)
    kind = _KIND_OF_RECIPE.search(recipe)
    if values.get("--task") == "lora" or (kind is not None and kind[1] in ("peft", "lora")):
        settings.setdefault(_ADAPTERS, "LoRA")
    named = {} if model is None else {"model.hf_model_id": re.sub(r"^(llama|qwen)(\d)(\d)", r"\1\2.\3", model)}
    return {**_read_settings({**named, **settings}, path), RECIPE: recipe or True}


def _named(word: str) -> Sequence[str]:
    """An argument with underscores in its name, and its value, which may be one word; or another word."""
    if not word.startswith("--"):
        return (word,)
    name, *value = word.split("=", 1)
    return (f"--{name[2:].replace('-', '_')}", *value)


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


ARGUMENTS = "MODEL_ARGS."
"""The part of a YAML file that has Megatron-LM's arguments by their names, dashes and all."""


def read_mapping(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a file that has them as a mapping, with the rest of the file by its names; off is left out."""
    named = {name.removeprefix(ARGUMENTS): value for name, value in settings.items() if name.startswith(ARGUMENTS)}
    return {
        f"--{name.lstrip('-').replace('_', '-')}": argument(value)
        for name, value in named.items()
        if not is_off(name, value)
    }


def _arguments(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in settings.items():
        part, _, name = path.partition(".")
        if path == "model.hf_model_id":
            yield "model", value
        elif path == "mixed_precision":
            yield from _precision(str(value))
        elif path == "ddp.grad_reduce_in_fp32":
            # Bridge overwrites it with that of mixed_precision, where there is one.
            if not any(each.partition(".")[0] == "mixed_precision" for each in settings):
                yield from _precision_entry(name, value)
        elif name == "pipeline_model_parallel_layout":
            yield "--pipeline-model-parallel-layout", value if isinstance(value, str) else _layout(value)
        elif part == "optimizer" and f"model.{name}" in settings:
            continue
        elif part in PARTS and name:
            yield f"--{_NAMES.get(name, name.replace('_', '-'))}", argument(value)
        elif part == "mixed_precision":
            yield from _precision_entry(name, value)
        else:
            yield path, value
    if not settings.get("model.share_embeddings_and_output_weights"):
        yield "--untie-embeddings-and-output-weights", True
    if settings.get("model.num_query_groups") is not None:
        yield "--group-query-attention", True


def _precision(recipe: str) -> Iterator[tuple[str, Any]]:
    """The dtypes of a recipe such as `bf16_with_fp8_delayed_scaling_mixed`."""
    yield "--fp16" if recipe.startswith("fp16") else "--bf16", True
    if "mxfp8" in recipe:
        yield "--fp8-format", "e4m3"
        yield "--fp8-recipe", "mxfp8"
    elif "fp8" in recipe:
        yield "--fp8-format", "hybrid"
    elif "nvfp4" in recipe:
        yield "--fp4-format", "e2m1"


def _precision_entry(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """One entry of a configuration of dtypes."""
    if name == "grad_reduce_in_fp32":
        if value is False:
            yield "--grad-reduce-in-bf16", True
    else:
        yield f"--{name.replace('_', '-')}", argument(value)


def _layout(stages: Sequence[Any]) -> str:
    """A layout string of lists of names, one for each stage."""
    return "|".join("".join(_STAGES.get(str(name), "t") for name in stage) for stage in stages)


def argument(value: Any) -> Any:
    """A value as it stands after an argument: True, a word, or a tuple of words; False for one that is off."""
    if isinstance(value, list):
        return tuple(map(str, value))
    return value if isinstance(value, bool) else str(value)
