"""Translates arguments of ms-swift's `megatron` command to Megatron-LM's, and rejects unsupported commands.

Source: ms-swift 4.6, swift/megatron/arguments (defaults of its dataclasses, and values computed after parsing).
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
"""ms-swift's defaults; the dtype is the checkpoint's, which is bf16 in recent models."""
SWIFT_OFF = {"--recompute-granularity": "none", "--use-distributed-optimizer": "false"}
"""Values that turn off settings which are on by default."""
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
"""Arguments with another name in Megatron-LM."""
_TRUE, _FALSE = ("true", "yes", "t", "y"), ("false", "no", "f", "n")
_SWITCHES = (
    "--bf16", "--fp16", "--packing", "--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    "--tp-comm-overlap", "--moe-enable-deepep", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Boolean arguments, which accept 1 and 0."""
_DTYPES = {"bfloat16": "--bf16", "float16": "--fp16", "float32": "--fp16"}
_TUNERS = ("full", "lora", "lora_llm")
_ADAPTERS = ("--adapters", "--ref-adapters", "--mcore-adapter", "--mcore-ref-adapter")
"""Arguments with checkpoints of adapters; ms-swift then trains adapters."""

_EXTRA_WORK = {
    "dpo": "runs a reference model",
    "kto": "runs a reference model",
    "grpo": "generates its samples",
    "gkd": "runs a teacher, and generates its samples",
    "rm": "has pairs of sequences (without --packing)",
}
"""Kind of RLHF -> work of its step in addition to a training step."""
_GROUP_TASKS = ("embedding", "reranker", "generative_reranker")
"""Tasks whose samples are groups of sequences."""


def read_swift(arguments: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The arguments as Megatron-LM's, with the model's name as `model` and adapters as settings of Megatron-Bridge.

    Args:
        arguments: The arguments of ms-swift's command, and the command itself.
        path: The file.

    Raises:
        InputError: if the command does not train, or its step does more than train.
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


def check_required(arguments: Arguments, facts: UserFacts) -> None:
    """Raise InputError if neither the arguments nor the user give the model and the sequence length."""
    if facts.model is None and arguments.word("model") is None:
        raise InputError(f"{arguments.path} names no model: give it with --model.")
    if facts.sequence_length is None and arguments.word("--seq-length") is None:
        raise InputError(
            f"{arguments.path} does not say --max_length, which is the model's longest then: give --sequence-length."
        )


def remarks_on_swift(arguments: Arguments, model: Model) -> Iterator[str]:
    """Sentences on arguments of ms-swift that the prediction does not follow."""
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
    """The model with a number of multi-token-prediction layers, which ms-swift does not take from the config."""
    if model.mtp_layers == number:
        return model
    return Model.from_hf({**model.config, "num_nextn_predict_layers": number})


def _value(name: str, value: Any) -> Any:
    """An argument's value, with words for on and off converted to True and False."""
    word = value.lower() if isinstance(value, str) else None
    if word in _TRUE or (word == "1" and name in _SWITCHES):
        return True
    return False if word in _FALSE or (word == "0" and name in _SWITCHES) else value


def _check_command(settings: dict[str, Any], path: Path) -> None:
    """Raise InputError for a command that does not train or does more than train; set a reward model's task type.

    `--rlhf-type none` is SFT in ms-swift.
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
            f"{path}: a step of --rlhf_type {kind} also {_EXTRA_WORK.get(kind, 'does other things')}, which is not"
            " predicted: for SFT of the same model and batch give --args '--rlhf_type none'."
        )


def _set_length(settings: dict[str, Any]) -> None:
    """Set the sequence length: with packing that of a pack, which may differ from the maximum length of samples."""
    names = ("--packing-length", "--max-length") if settings.get("--packing") else ("--max-length",)
    lengths = [value for name in names if (value := settings.pop(name, None)) is not None]
    if lengths:
        settings.setdefault("--seq-length", lengths[0])


def _set_dtype(settings: dict[str, Any]) -> None:
    """Set the dtype by --torch-dtype; fp32 is trained in fp16 mixed precision, and fp16 overrides bf16."""
    switch = _DTYPES.get(str(settings.get("--torch-dtype")))
    if switch is not None:
        del settings["--torch-dtype"]
        settings.setdefault(switch, True)
    if settings.get("--fp16") is True:
        settings["--bf16"] = False


def _adapters(settings: dict[str, Any]) -> dict[str, Any]:
    """The adapters as settings of Megatron-Bridge, by default on all layers; removes their arguments."""
    rank, modules = settings.pop("--lora-rank", None), settings.pop("--target-modules", "all-linear")
    adapter = {"peft._target_": "LoRA"}
    if rank is not None:
        adapter["peft.dim"] = rank
    if modules not in ("all-linear", ("all-linear",)):
        adapter["peft.target_modules"] = modules
    return adapter
