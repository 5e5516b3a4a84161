"""Reads Megatron-Bridge (NeMo) YAML, of a run's ConfigContainer or an override, as Megatron-LM's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from debubble.frameworks.megatron.arguments import Arguments, is_off
from debubble.imports.command_line import CommandLine
from debubble.imports.settings import RECIPE, read_settings
from debubble.ir import InputError

PARTS = ("model", "train", "ddp", "optimizer", "comm_overlap", "checkpoint")
"""Sections of the configuration whose settings are arguments of Megatron-LM."""
_NAMES = {
    "num_moe_experts": "num-experts",
    "gated_linear_unit": "swiglu",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
"""Settings with another name in Megatron-LM."""
_ADAPTERS = "peft._target_"
_STAGES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def read_bridge(path: Path, command_line: CommandLine) -> Mapping[str, Any]:
    """The settings as arguments, `--name` -> value, without those that are off, and the model's name as `model`.

    Raises:
        InputError: if the file is not a training configuration of Megatron-Bridge.
    """
    return _read_settings({name: command_line.expand(value) for name, value in read_settings(path).items()}, path)


def _read_settings(raw: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    if raw.get("MODE") == "inference":
        raise InputError(f"{path} says MODE: inference: it generates, and nothing of it is trained.")
    if "model.encoder_seq_length" in raw or any(name.startswith("exp_manager.") for name in raw):
        raise InputError(
            f"{path} is a configuration of NeMo 1, which is not read: give what it says as Megatron-LM's arguments in a"
            " script (`pretrain_gpt.py --tensor-model-parallel-size 8 --micro-batch-size 1 --num-layers 96 --bf16`)."
        )
    if any(name.startswith(ARGUMENTS) for name in raw):
        return read_mapping(raw)
    settings = {
        name: value
        for name, value in raw.items()
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
_SCRIPT_ARGUMENTS = {
    "model.tensor_model_parallel_size": ("-tp",), "model.pipeline_model_parallel_size": ("-pp",),
    "model.context_parallel_size": ("-cp",), "model.expert_model_parallel_size": ("-ep",),
    "model.virtual_pipeline_model_parallel_size": ("-vp",), "model.expert_tensor_parallel_size": ("-et",),
    "train.micro_batch_size": ("-mb",), "train.global_batch_size": ("-gb",), "model.seq_length": ("-sl",),
    "model.recompute_num_layers": ("-rl",), "model.pipeline_model_parallel_layout": (), "model.num_layers": (),
    "model.hidden_size": (), "mixed_precision": ("-c", "--compute_dtype"), "model.recompute_modules": ("-rm",),
    "ddp.use_megatron_fsdp": (), "model.cuda_graph_impl": (), "model.cuda_graph_scope": (),
    "comm_overlap.overlap_moe_expert_parallel_comm": ("--moe_a2a_overlap",),
}  # fmt: skip
"""Setting -> arguments of scripts/performance that set it, besides its own name."""
_IMPLIED: Mapping[str, Mapping[str, Any]] = {
    "model.recompute_num_layers": {"model.recompute_granularity": "full", "model.recompute_method": "block"},
    "model.recompute_modules": {"model.recompute_granularity": "selective"},
    "ddp.use_megatron_fsdp": {"ddp.data_parallel_sharding_strategy": "optim_grads_params"},
    "comm_overlap.overlap_moe_expert_parallel_comm": {"comm_overlap.delay_wgrad_compute": True},
    "model.tensor_model_parallel_size": {"model.sequence_parallel": True},
}
"""Setting of such an argument -> further settings that scripts/performance derives (utils/overrides.py)."""
_PRECISIONS = {
    "bf16": "bf16_mixed", "fp8_cs": "bf16_with_fp8_current_scaling_mixed", "nvfp4": "bf16_with_nvfp4_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed", "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
}  # fmt: skip
"""Dtypes of scripts/performance -> Megatron-Bridge's mixed-precision recipe."""
_REQUIRED_SETTINGS = (
    "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.seq_length",
    "train.micro_batch_size", "train.global_batch_size",
)  # fmt: skip
"""Settings that a launch must override, because the recipe's values are unknown here."""
_RECIPE_KIND = re.compile(r"_(pretrain|finetune|sft|peft|lora)(_.*)?$")


def read_recipe(words: Sequence[str], path: Path) -> Mapping[str, Any]:
    """The settings that a command overrides in a recipe, as arguments.

    Args:
        words: The words of the command.
        path: The script.

    Raises:
        InputError: if the recipe determines a degree or a batch.
    """
    values = dict(pairwise([*(piece for word in words for piece in _split_option(word)), ""]))
    overrides = (match for word in words if (match := _OVERRIDE.fullmatch(word)) is not None)
    settings = {match[1]: _value(match[2]) for match in overrides}
    for name, aliases in _SCRIPT_ARGUMENTS.items():
        said = next((values[alias] for alias in (f"--{name.rpartition('.')[2]}", *aliases) if alias in values), None)
        if said is not None:
            settings[name] = _PRECISIONS.get(said, said) if name == "mixed_precision" else _value(said)
            off = (False, 1) if name == "model.tensor_model_parallel_size" else (False,)
            if settings[name] not in off or settings[name] is True:
                settings = {**_IMPLIED.get(name, {}), **settings}
    settings.setdefault("model.seq_length", settings.get("dataset.seq_length", settings.get("dataset.sequence_length")))
    if missing := [name for name in _REQUIRED_SETTINGS if settings.get(name) is None]:
        raise InputError(
            f"{path} starts a recipe of Megatron-Bridge, and leaves {', '.join(missing)} to it: give these with --args"
            f" '{missing[0]}=1 ...', or import the configuration that its run saves (run_config.yaml)."
        )
    recipe = next((values[name] for name in ("--recipe", "--model_recipe_name", "-mr") if name in values), "")
    model = values.get("--hf_path") or _RECIPE_KIND.sub("", recipe)
    kind = _RECIPE_KIND.search(recipe)
    if values.get("--task") == "lora" or (kind is not None and kind[1] in ("peft", "lora")):
        settings.setdefault(_ADAPTERS, "LoRA")
    named = {} if model is None else {"model.hf_model_id": re.sub(r"^(llama|qwen)(\d)(\d)", r"\1\2.\3", model)}
    return {**_read_settings({**named, **settings}, path), RECIPE: recipe or True}


def overlaps_gradients(arguments: Arguments) -> bool:
    """Tell whether gradients are reduced during backwards; recipes of pretraining do so unless told not to.

    Source: Megatron-Bridge 0.4, recipes/, where `ddp.overlap_grad_reduce` is False for fine-tuning.
    """
    name, settings = "--overlap-grad-reduce", arguments.settings
    of_bridge = arguments.word("framework") == "megatron-bridge" and settings.get(name) is not False
    kind = _RECIPE_KIND.search(str(settings.get(RECIPE, "")))
    adapts = any(key.startswith("peft.") for key in settings)
    return arguments.flag(name) or (of_bridge and not adapts and (kind is None or kind[1] == "pretrain"))


def _split_option(word: str) -> Sequence[str]:
    """Split `--name=value` into the name, with underscores, and the value; other words stay."""
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
"""The section of a YAML file that has Megatron-LM's arguments by their names with dashes."""


def read_mapping(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a file that has them in the section MODEL_ARGS, without those that are off."""
    named = {name.removeprefix(ARGUMENTS): value for name, value in settings.items() if name.startswith(ARGUMENTS)}
    return {
        f"--{name.lstrip('-').replace('_', '-')}": argument(value)
        for name, value in named.items()
        if not is_off(name, value)
    }


def _arguments(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in settings.items():
        section, _, name = path.partition(".")
        if path == "model.hf_model_id":
            yield "model", value
        elif path == "mixed_precision":
            yield from _precision(str(value))
        elif path == "ddp.grad_reduce_in_fp32":
            # Bridge overwrites it by the setting in mixed_precision, if there is one.
            if not any(other.partition(".")[0] == "mixed_precision" for other in settings):
                yield from _precision_entry(name, value)
        elif name == "pipeline_model_parallel_layout":
            yield "--pipeline-model-parallel-layout", value if isinstance(value, str) else _layout(value)
        elif section == "optimizer" and f"model.{name}" in settings:
            continue
        elif section in PARTS and name:
            yield f"--{_NAMES.get(name, name.replace('_', '-'))}", argument(value)
        elif section == "mixed_precision":
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
    """An entry of a mixed-precision configuration."""
    if name == "grad_reduce_in_fp32":
        if value is False:
            yield "--grad-reduce-in-bf16", True
    else:
        yield f"--{name.replace('_', '-')}", argument(value)


def _layout(stages: Sequence[Any]) -> str:
    """The layout string for lists of layer names, one per stage."""
    return "|".join("".join(_STAGES.get(str(name), "t") for name in stage) for stage in stages)


def argument(value: Any) -> Any:
    """A value as that of an argument: True, a word, or a tuple of words; False if it is off."""
    if isinstance(value, list):
        return tuple(map(str, value))
    return value if isinstance(value, bool) else str(value)
