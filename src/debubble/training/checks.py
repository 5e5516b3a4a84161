"""Checks of a training run before any rank starts; inconsistent options raise InputError."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from debubble.errors import check_at_least_one, readable
from debubble.files import check_folder, check_writable
from debubble.formatting import listed
from debubble.ir import InputError, Kind, Number
from debubble.models.runtime_limits import check_averages
from debubble.planners.plan_step import average_bytes, undo_bytes
from debubble.plans import Plan
from debubble.training.checkpoint.folder import checkpoints, progress_of
from debubble.training.data.text import tokens_of
from debubble.training.online.scheduler import check_searchable
from debubble.training.options import (
    TrainOptions,
    maker_of,
    model_of,
    packed_of,
    runnable,
    separator_of,
    sequences_of,
    start_of,
    tokenizer_of,
    words_of,
)
from debubble.training.run_lock import locked
from debubble.training.user_code import named_dataset


def check(options: TrainOptions) -> Plan:
    """Check that the options are valid, and load the plan.  Raises InputError with one sentence if not."""
    plan = runnable(options.plan)
    if plan.has_lengths and options.lengths is None:
        raise InputError(
            "The plan counts on micro-batches of its own lengths, but `train` cuts the data into equal ones: give the"
            " sequences with --lengths, or plan without."
        )
    _check_numbers(options)
    _check_optimizer(options, plan)
    _check_average(options, plan)
    if options.tensorboard is not None and find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs TensorBoard: install debubble with its tensorboard extra.")
    if (options.load or options.save is not None) and find_spec("safetensors") is None:
        raise InputError("--load and --save need safetensors: install debubble with its hf extra.")
    if options.wandb is not None and find_spec("wandb") is None:
        raise InputError("--wandb needs Weights & Biases: install the package wandb.")
    _check_data(options, plan)
    if options.separate_texts:
        separator_of(options, plan)
    if options.prompt is not None:
        _check_prompt(options, options.prompt, plan)
    validates_after(options.post_validation, plan)
    if options.compile or options.fp8:
        _check_units(options, plan)
    if options.online:
        check_searchable(plan)
    options.check_folder_given()
    for folder in options.load:
        if not folder.is_dir():
            raise InputError(f"--load: there is no folder {folder}.")
        _check_checkpoint(folder, plan)
    if options.offload_to is not None and not options.offload_to.is_dir():
        raise InputError(f"--offload-to: there is no folder {options.offload_to}.")
    check_folder(options.save, "--save")
    check_folder(options.checkpoint, "--checkpoint")
    check_folder(options.tensorboard, "--tensorboard")
    check_writable(options.metrics, makes_folders=True)
    if options.checkpoint is not None:
        _check_checkpoints(options, options.checkpoint, plan)
    if os.environ.get("RANK", "0") == "0":
        check_unlocked(options)
    return plan


def check_unlocked(options: TrainOptions) -> None:
    """Raise InputError if another run has locked a folder, and remove the locks of ended runs.

    Rank 0 locks the folders when the run starts.
    """
    for folder in (options.checkpoint, options.save):
        if folder is not None and folder.is_dir():
            with locked(folder):
                pass


def _check_checkpoint(folder: Path, plan: Plan) -> None:
    """Raise InputError for a folder without a Hugging Face checkpoint, or with adapters of another model."""
    from debubble.runtime.models.lora import CONFIG
    from debubble.runtime.weights.adapter_config import check_model
    from debubble.runtime.weights.hf_files import checkpoint_files

    files = checkpoint_files(folder)
    if plan.options.lora and (folder / CONFIG).is_file():
        check_model(folder, files, model_of(plan))


def _check_average(options: TrainOptions, plan: Plan) -> None:
    """Raise InputError for an invalid decay, or if the plan has no memory for averages of the weights."""
    decay = options.ema_decay
    if decay is None:
        return
    if not 0 < decay < 1:
        raise InputError(f"--ema must lie between 0 and 1, not be {decay}.")
    check_averages(plan.options)
    remedy = "plan with a --memory-limit that is as much smaller"
    _check_capacity("The averages of the weights", average_bytes, plan, remedy=remedy)


def _check_units(options: TrainOptions, plan: Plan) -> None:
    """Raise InputError if --compile or --fp8 is not possible."""
    import torch

    from debubble.runtime.models.compilation import compiler_of
    from debubble.runtime.models.float8 import float8_of

    compiler_of(options.compile, plan)
    float8_of(options.fp8, plan, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _check_numbers(options: TrainOptions) -> None:
    names = ("steps", "validate_every", "sample_tokens", "save_every", "keep")
    check_at_least_one(**{name: getattr(options, name) for name in names})
    if options.seed < 0:
        raise InputError(f"--seed must be 0 or more, not {options.seed}.")
    for option, number in {
        "--lr": options.peak_rate, "--warmup": options.warmup, "--weight-decay": options.weight_decay,
        "--clip": options.clip, "--hang-timeout": options.hang_timeout,
    }.items():  # fmt: skip
        if not 0 <= number < math.inf:
            raise InputError(f"{option} must be a number, 0 or more, not {number}.")


def validates_after(wanted: bool | None, plan: Plan) -> bool:
    """Tell whether devices update before the gradient norm is known: `wanted`, or if that is None, the plan's option.

    CPU optimizer steps always do, because the host has memory for the copies that rollback needs.  Raises InputError
    if the plan has no memory for the devices' copies, or has optimizer steps on devices that require post-validation.
    """
    validates = plan.options.post_validation if wanted is None else wanted
    on_device = {op.stage for op in plan.schedule.operations if op.kind is Kind.S} - plan.schedule.host_steps
    if on_device and not validates:
        raise InputError(
            f"The plan steps stage {min(on_device)} on its device before the norm of all gradients is known: plan and"
            " train it with --post-validation."
        )
    if validates and plan.options.dtype == "fp16":
        raise InputError("fp16 skips steps, so it cannot update before the norm is known: train without.")
    if validates and not plan.options.post_validation:
        remedy = "plan with --post-validation, which counts them"
        _check_capacity("The copies that take updates back", undo_bytes, plan, remedy=remedy)
    return validates


def _check_capacity(subject: str, bytes_of: Callable[[Plan], Sequence[Number]], plan: Plan, *, remedy: str) -> None:
    """Raise InputError if additional bytes, which the plan does not include, exceed a device's memory limit."""
    if plan.model is None or plan.costs.memory_limit is None:
        return
    for device, (peak, more) in enumerate(zip(plan.simulate().peak_memory, bytes_of(plan), strict=True)):
        limit = plan.costs.limit_of(device)
        if limit is not None and peak + more > limit:
            raise InputError(
                f"{subject} need {readable(float(more))} more than the plan has on device {device},"
                f" {readable(float(peak + more))} of {readable(float(limit))}: {remedy}."
            )


def _check_optimizer(options: TrainOptions, plan: Plan) -> None:
    from debubble.training.optimizer import SCHEDULES, check_optimizer

    if options.lr_schedule not in SCHEDULES:
        raise InputError(f"--lr-schedule must be one of {', '.join(SCHEDULES)}, not '{options.lr_schedule}'.")
    name = options.optimizer or plan.options.optimizer
    check_optimizer(name, maker_of(options, plan), planned=plan.options.optimizer, saved=options.checkpoint is not None)


def _check_lengths(options: TrainOptions, plan: Plan) -> None:
    """Raise InputError if --lengths cannot be combined with other options or with the plan."""
    refused = {
        "--data": options.data is not None,
        "--dataset": options.dataset is not None,
        "--separate-texts": options.separate_texts,
        "--online": options.online,
        "a plan for --post-validation": validates_after(options.post_validation, plan),
        "a plan for --context": plan.options.context > 1,
        "routers' auxiliary loss on replicas, which counts what fills them up": _padding_counts(plan),
        "a model of transformers' modules, which count positions by themselves": model_of(plan).whole_layers,
    }
    for option in (option for option, present in refused.items() if present):
        raise InputError(f"--lengths does not go with {option}.")
    check_searchable(plan, "--lengths")
    packed_of(options, plan)


def _padding_counts(plan: Plan) -> bool:
    """Tell whether an auxiliary loss would count padding tokens of replicas' micro-batches."""
    from debubble.runtime.assembly import balance_of

    return plan.options.data > 1 and balance_of(plan) is not None


def _check_data(options: TrainOptions, plan: Plan) -> None:
    if options.lengths is not None:
        _check_lengths(options, plan)
        return
    if options.dataset is None:
        for data in [options.data, *([] if options.validation is None else [Path(options.validation)])]:
            sequences_of(options, plan, data)
        return
    if options.data is not None or options.tokenizer is not None:
        raise InputError("--dataset takes the place of --data and --tokenizer: give one or the other.")
    named_dataset(options.dataset)
    if options.validation is not None:
        named_dataset(options.validation, option="--validation")


def _check_prompt(options: TrainOptions, prompt: str, plan: Plan) -> None:
    """Raise InputError for a prompt that the model cannot continue."""
    if options.dataset is not None:
        raise InputError("--prompt is text, as --data is: it does not go with --dataset.")
    if plan.options.context > 1:
        raise InputError("--prompt needs whole sequences, which the plan divides: plan with --context 1.")
    length = len(tokens_of(prompt, tokenizer_of(options, plan)))
    positions = model_of(plan).positions
    if not length:
        raise InputError("--prompt is empty: give some text.")
    if positions and length + options.sample_tokens > positions:
        raise InputError(
            f"The prompt's {length} tokens and {options.sample_tokens} more are beyond the model's {positions}"
            " positions: give a shorter prompt, or fewer --sample-tokens."
        )


def _check_checkpoints(options: TrainOptions, folder: Path, plan: Plan) -> None:
    """Raise InputError if the checkpoint to resume does not fit plan and options, or the folder has another run's."""
    newest = start_of(options)
    if newest is None:
        if checkpoints(folder):
            raise InputError(f"{folder} holds checkpoints already: add --resume, or give another folder.")
        return
    progress = progress_of(newest)
    if progress.model != model_of(plan).config:
        raise InputError(f"{newest} is a checkpoint of another model than the plan's.")
    if missing := set(progress.data or {}) - set(options.source):
        raise InputError(
            f"The run of {newest} read {words_of(progress.data or {})}: give {listed(sorted(missing))} again, as"
            " nothing that a checkpoint names is read."
        )
    if progress.step == options.steps and options.save is not None and not options.json:
        return
    if progress.step >= options.steps:
        more = progress.step > options.steps
        taken = (
            f"{progress.step} steps, more than the {options.steps} asked for" if more else f"all {options.steps} steps"
        )
        save = "--save" if options.save is not None else "--save FOLDER"
        written = "" if more else f"; {save} without --json writes its weights"
        raise InputError(f"{newest} has taken {taken}: give more with --steps{written}.")
