"""ms-swift: the arguments of its `megatron` command as Megatron-LM's, and the commands whose step is no plain one.

Source: ms-swift 4.6, swift/megatron/arguments (what its dataclasses default to, and compute after parsing).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.frameworks.megatron.arguments import Arguments
from debubble.imports.defaults import Defaults
from debubble.imports.kinds import as_yaml
from debubble.imports.registry import UserFacts
from debubble.imports.training_scripts import COMMAND
from debubble.ir import InputError
from debubble.models import Model

SWIFT = "ms-swift"
SWIFT_DEFAULTS = Defaults(
    SWIFT,
    {
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--global-batch-size": "16",
        "--recompute-granularity": "selective",
        "--moe-token-dispatcher-type": "alltoall",
        "--expert-tensor-parallel-size": "1",
        "peft.dim": "8",
    },
)
"""The dtype is the model's own, which is bf16 in those of the last years."""
SWIFT_OFF = {"--recompute-granularity": "none", "--use-distributed-optimizer": "false"}
"""The values that turn off what is on by default."""
SWIFT_HARMLESS = """
    command model_type model_revision task_type num_labels problem_type use_hf hub_token check_model bridge_backend
    mcore_model save_* merge_lora max_shard_size add_version create_checkpoint_symlink tuner_type train_type
    tuner_backend lora_alpha lora_dropout lora_bias use_rslora freeze_vit freeze_aligner dataset val_dataset
    cached_dataset cached_val_dataset custom_dataset_info dataset_* val_dataset_shuffle split_dataset_ratio streaming
    interleave_prob columns strict stopping_strategy shuffle_buffer_size download_mode remove_unused_columns
    disable_auto_column_mapping model_name model_author packing padding_free packing_num_proc packing_strategy
    lazy_tokenize dataloader_* train_dataloader_* template template_backend system truncation_strategy agent_template
    norm_bbox use_chat_template padding_side is_binary_loss_scale response_prefix enable_thinking preserve_thinking
    add_non_thinking_prefix disable_ignore_empty_think external_plugins callbacks metric_for_best_model
    greater_is_better logging_steps report_to swanlab_* ddp_timeout ddp_backend manual_gc_* attn_impl loss_type
    center_rewards_coefficient ignore_args_error enable_channel_loss no_load_* logprobs
"""
"""Arguments that cost neither time nor memory of a step, besides those of Megatron-LM and of all frameworks."""

_NAMES = {
    "--model": "model",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-vp-stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}
"""Arguments that Megatron-LM calls otherwise."""
_TRUE, _FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
_SWITCHES = (
    "--bf16", "--fp16", "--packing", "--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    "--tp-comm-overlap", "--moe-enable-deepep", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that are on or off, in which 1 and 0 are no numbers."""
_DTYPES = {"bfloat16": "--bf16", "float16": "--fp16", "float32": "--fp16"}
_TUNERS = ("full", "lora", "lora_llm")
_ADAPTERS = ("--adapters", "--ref-adapters", "--mcore-adapter", "--mcore-ref-adapter")
"""Checkpoints of adapters, with which ms-swift trains adapters."""

_FURTHER_WORK = {
    "dpo": "runs a reference model",
    "kto": "runs a reference model",
    "grpo": "generates its samples",
    "gkd": "runs a teacher, and generates its samples",
    "rm": "has pairs of sequences (without --packing)",
}
"""Kind of RLHF -> what its step does besides a training step of sequences of --max_length."""
_GROUP_TASKS = ("embedding", "reranker", "generative_reranker")
"""Tasks whose samples are groups of sequences."""


def read_swift(arguments: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The arguments as Megatron-LM has them, with the model's name as `model` and the adapters as Megatron-Bridge's.

    Args:
        arguments: Those of ms-swift's command, and the command itself.
        path: The file.

    Raises:
        InputError: if the command's step is no training step, or more than that.
    """
    settings = {_NAMES.get(name, name): _value(name, value) for name, value in arguments.items()}
    _check_command(settings, path)
    _set_length(settings)
    _set_dtype(settings)
    if "muon" in str(settings.get("--optimizer")):
        settings["--use-distributed-optimizer"] = False
    tuner = settings.get("--tuner-type", settings.get("--train-type", "full"))
    if tuner not in _TUNERS:
        raise InputError(f"{path}: --tuner_type is {as_yaml(tuner)}, which is none of {', '.join(_TUNERS)}.")
    if tuner != "full" or any(name in settings for name in _ADAPTERS):
        settings |= _adapters(settings)
    return {"framework": SWIFT, **settings}


def check_said(arguments: Arguments, given: UserFacts) -> None:
    """Raise InputError if neither the arguments nor the user say the model and the length of a sequence."""
    if given.model is None and arguments.word("model") is None:
        raise InputError(f"{arguments.path} names no model: give it with --model.")
    if given.sequence_length is None and arguments.word("--seq-length") is None:
        raise InputError(
            f"{arguments.path} does not say --max_length, which is the model's longest then: give --sequence-length."
        )


def remarks_on_swift(arguments: Arguments, model: Model) -> Iterator[str]:
    """Sentences on arguments of ms-swift that are predicted otherwise."""
    if not arguments.flag("--packing"):
        yield "Without --packing sequences are as long as their samples, and predicted is --max_length for each."
    task = arguments.word("--task-type", "causal_lm")
    if task != "causal_lm":
        yield f"--task_type {task}: its head is predicted as one of the vocabulary, which takes more."
    if arguments.word("--tuner-type") == "lora_llm":
        yield "--tuner_type lora_llm: the vision tower, which it trains as well, is not in the prediction."
    elif model.vision is not None:
        frozen, adapted = arguments.settings.get("--freeze-vit") is not False, "peft._target_" in arguments
        if frozen and not adapted:
            yield "The vision tower is frozen unless --freeze_vit is false, and the prediction trains it."
        elif adapted and not frozen:
            yield "--freeze_vit false: the vision tower has adapters too, and the prediction freezes it."


def with_further_layers(model: Model, number: int) -> Model:
    """The model with so many layers of multi-token prediction: ms-swift takes their number from no config."""
    if model.mtp_layers == number:
        return model
    return Model.from_hf({**model.config, "num_nextn_predict_layers": number})


def _value(name: str, value: Any) -> Any:
    """An argument's value, where words that mean on and off are True and False."""
    word = value.lower() if isinstance(value, str) else None
    if word in _TRUE or (word == "1" and name in _SWITCHES):
        return True
    return False if word in _FALSE or (word == "0" and name in _SWITCHES) else value


def _check_command(settings: dict[str, Any], path: Path) -> None:
    """Raise InputError for a command that does not train, or whose step is not a plain one; a reward model has labels.

    A kind of RLHF that is `none`, which is SFT's in ms-swift, is a plain step.
    """
    command = settings[COMMAND]
    if not command.startswith("megatron") and command.endswith((" sft", " pt", " rlhf")):
        raise InputError(
            f"{path} runs `{command}`, which trains without Megatron-LM: import its DeepSpeed configuration with"
            " `debubble import deepspeed`, or give a script with `megatron sft`."
        )
    if command not in ("megatron sft", "megatron pt", "megatron rlhf"):
        raise InputError(f"{path} runs `{command}`, which trains nothing: give a script with `megatron sft`.")
    task = settings.get("--task-type")
    if task in _GROUP_TASKS:
        raise InputError(
            f"{path}: the samples of --task_type {task} are several sequences each, whose number it does not say: for"
            " a step of one each, give --args '--task_type causal_lm'."
        )
    kind = settings.pop("--rlhf-type", "dpo") if command == "megatron rlhf" else "none"
    if kind == "rm" and settings.get("--packing"):
        settings["--task-type"] = "seq_cls"
    elif kind != "none":
        raise InputError(
            f"{path}: a step of --rlhf_type {kind} also {_FURTHER_WORK.get(kind, 'does other things')}, which is not"
            " predicted: for SFT of the same model and batch give --args '--rlhf_type none'."
        )


def _set_length(settings: dict[str, Any]) -> None:
    """Set the tokens of a sequence: with packing, of a pack, which may have another length than the longest sample."""
    names = ("--packing-length", "--max-length") if settings.get("--packing") else ("--max-length",)
    said = [value for name in names if (value := settings.pop(name, None)) is not None]
    if said:
        settings.setdefault("--seq-length", said[0])


def _set_dtype(settings: dict[str, Any]) -> None:
    """Set the dtype that is said by name, where fp32 is trained in fp16's mixed precision; fp16 precedes bf16."""
    switch = _DTYPES.get(str(settings.get("--torch-dtype")))
    if switch is not None:
        del settings["--torch-dtype"]
        settings.setdefault(switch, True)
    if settings.get("--fp16") is True:
        settings["--bf16"] = False


def _adapters(settings: dict[str, Any]) -> dict[str, Any]:
    """The adapters as Megatron-Bridge has them, without their arguments in the settings; they are on all layers."""
    rank, modules = settings.pop("--lora-rank", None), settings.pop("--target-modules", "all-linear")
    found = {"peft._target_": "LoRA"}
    if rank is not None:
        found["peft.dim"] = rank
    if modules not in ("all-linear", ("all-linear",)):
        found["peft.target_modules"] = modules
    return found
