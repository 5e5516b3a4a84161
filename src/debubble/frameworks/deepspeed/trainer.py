"""Reads the arguments of Transformers' Trainer, which replace `auto` in a DeepSpeed configuration.

Source: transformers 5.24, training_args.py and integrations/deepspeed.py (HfTrainerDeepSpeedConfig).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.costs.step import MOMENTS
from debubble.imports.command_line import CommandLine, args_hint
from debubble.imports.reader import SettingsReader
from debubble.imports.settings import OPEN_LOOP
from debubble.imports.unread import listed_names
from debubble.ir import InputError
from debubble.models import Model, named_model

CHECKPOINTING = "--gradient_checkpointing"
_LENGTHS = ("--max_length", "--max_seq_length", "--model_max_length", "--cutoff_len", "--block_size")
_RANKS, _TUNES, _PEFT, _LORA = ("--lora_rank", "--lora_r"), "--finetuning_type", "--use_peft", "--use_lora"
_FINETUNING_RANK, _PEFT_RANK = 8, 16
"""Default ranks of adapters of LLaMA-Factory's --finetuning_type lora, also assumed for --use_lora, and of TRL's
--use_peft."""
_QUANTIZES = ("--q_lora", "--load_in_4bit")
_MODEL, _OPTIMIZER = "--model_name_or_path", "--optim"
LEFT_OUT = "left_out"
"""Key for the arguments that the Trainer's file leaves to their defaults."""
_FILLED = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Argument of the Trainer -> the entry of the configuration that it sets."""
_TRAINER_ARGUMENTS = (CHECKPOINTING, *_LENGTHS, _MODEL, _OPTIMIZER, *_RANKS, _TUNES, _PEFT, _LORA, *_QUANTIZES)
"""Arguments of the Trainer without an entry in the configuration."""
HARMLESS = """
    logging_* save_* eval_* evaluation_strategy report_to run_name do_* remove_unused_columns dataloader_*
    num_train_epochs overwrite_output_dir lr_scheduler_* ddp_timeout hub_* push_to_hub dataset_* torch_dtype
    per_device_eval_batch_size lazy_preprocess deepspeed deepspeed_config deepspeed_config_file use_deepspeed
    lora_alpha lora_dropout lora_target* template dataset val_size max_samples preprocessing_* overwrite_cache plot_loss
    resume_from_checkpoint load_best_model_at_end metric_for_best_model greater_is_better media_dir model_revision
    include_num_input_tokens_seen disable_tqdm
"""
"""Arguments that cost neither time nor memory of a step."""


def with_trainer(
    config: Mapping[str, Any], path: Path, command_line: CommandLine | None, of_file: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A configuration's settings, overridden and completed by the Trainer's arguments.

    Args:
        config: The settings.
        path: The file that is imported.
        command_line: The job's command line; None: unknown.
        of_file: The arguments in the Trainer's file; None: it has none.

    Raises:
        InputError: if the arguments contradict the configuration, which the Trainer rejects.
    """
    line = command_line or CommandLine({})
    filled = {name: line.expand(value) for name, value in config.items()}
    sections = {name.partition(".")[0] for name in listed_names("deepspeed", "entries.txt")}
    for name, value in line.override(of_file or {}).items():
        argument = name.replace("-", "_")
        if name in (LEFT_OUT, OPEN_LOOP):
            filled[name] = value
        elif argument in _FILLED:
            entry = _FILLED[argument]
            said = config.get(entry, "auto")
            if said not in ("auto", value):
                raise InputError(
                    f"{path}: {entry} is {said}, and --{argument} {value}, which the Trainer refuses: let the entry be"
                    " 'auto', or give the same."
                )
            filled[entry] = value
        elif f"--{argument}" in _TRAINER_ARGUMENTS or name.partition(".")[0] not in sections:
            filled[f"--{argument}"] = value
        else:
            filled[name] = value
    if of_file is not None:  # The Trainer's own default.
        filled |= {name: False for name in ("bf16.enabled", "fp16.enabled") if filled.get(name) == "auto"}
    return filled


def model_of(read: SettingsReader) -> Model | None:
    """The model that the arguments name; None: no model."""
    name = read.get(_MODEL)
    if "$" in str(name):
        raise read.refusal(_MODEL, f"is '{name}', which the file does not tell: {args_hint(str(name), {})}, or --model")
    return None if name is None else named_model(str(name))


def length_of(read: SettingsReader) -> int | None:
    """Tokens per sequence by the arguments; None: not set."""
    length = _length_argument(read)
    return None if length is None else read.size(length)


def rank_of(read: SettingsReader) -> int:
    """The rank of the adapters by the arguments; 0: no adapters."""
    ranks = [read.size(name) for name in _RANKS if read.get(name) is not None]
    peft, lora = read.flag(_PEFT, bool(ranks)), read.flag(_LORA, bool(ranks))
    tunes = read.text(_TUNES, "")
    if tunes not in ("", "lora") or not (peft or lora or tunes) or (ranks and not (peft and lora)):
        return 0
    return ranks[0] if ranks else _PEFT_RANK if peft and not tunes else _FINETUNING_RANK


def _length_argument(read: SettingsReader) -> str | None:
    """The argument that sets the sequence length; None: there is none."""
    return next((argument for argument in _LENGTHS if read.get(argument) is not None), None)


def optimizer_of(read: SettingsReader) -> str:
    """The optimizer of the configuration, or the supported one closest to that of the arguments."""
    configured, name = read.text("optimizer.type", "").lower(), read.text(_OPTIMIZER, "adamw")
    if configured:
        return configured if configured in MOMENTS else "adamw"
    if re.search("adamw.*8bit", name):
        return "adamw-8bit"
    plain = name.removeprefix("paged_").partition("_")[0]
    return plain if plain in MOMENTS else "adamw"


def remarks(read: SettingsReader, optimizer: str, length: int | None) -> Iterator[str]:
    """Sentences on arguments that the prediction does not follow.

    Args:
        read: The settings.
        optimizer: The predicted optimizer.
        length: Tokens per sequence given by the user; None: by the arguments.
    """
    name = str(read.get(_OPTIMIZER, "adamw"))
    if read.get("optimizer.type") is None and not re.match(r"(paged_)?(adamw|sgd|lion_32bit|lion$)", name):
        yield f"{_OPTIMIZER} {name} is predicted as {optimizer}."
    for loop in read.texts(OPEN_LOOP):
        yield f"The training is in a loop that the file does not decide ({loop}): predicted is one run of it."
    if left_out := read.texts(LEFT_OUT):
        yield f"The file leaves these to their defaults: {' '.join(left_out)}."
    tunes = read.text(_TUNES, "full")
    if tunes not in ("full", "lora"):
        yield f"{_TUNES} {tunes} is predicted as full: its frozen layers take less."
    if read.flag(_LORA) and all(read.get(name) is None for name in _RANKS):
        yield f"{_LORA} has its program's rank: predicted is {_FINETUNING_RANK}; --lora gives another."
    for name in _QUANTIZES:
        if read.flag(name):
            yield f"{name}: frozen weights are predicted unquantised; give --quantize nf4 for those of 4 bits."
    argument = _length_argument(read)
    if argument is not None and length is None:
        yield f"Every sequence is predicted with the whole {argument}, as packed ones have; shorter ones take less."
    elif argument is not None and length != read.size(argument):
        yield f"Sequences are predicted with --sequence-length {length}, not with {argument} {read.size(argument)}."
