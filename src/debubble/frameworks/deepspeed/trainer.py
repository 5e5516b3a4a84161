"""The arguments of Transformers' Trainer, which fill in what a DeepSpeed configuration leaves to them.

Source: transformers 5.24, training_args.py and integrations/deepspeed.py (HfTrainerDeepSpeedConfig).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.costs.step import MOMENTS
from debubble.imports.command_line import CommandLine
from debubble.imports.settings import SettingsReader
from debubble.ir import InputError
from debubble.models import Model, named_model

CHECKPOINTING = "--gradient_checkpointing"
_LENGTH, _MODEL, _OPTIMIZER = "--max_length", "--model_name_or_path", "--optim"
_FILLED = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Argument of the Trainer -> the configuration's entry that it fills in."""
_OWN = {
    "gradient_checkpointing": CHECKPOINTING, "max_length": _LENGTH, "max_seq_length": _LENGTH,
    "model_max_length": _LENGTH, "model_name_or_path": _MODEL, "optim": _OPTIMIZER,
}  # fmt: skip
"""Argument of the Trainer -> the name of its setting, where a configuration has no entry for it."""
HARMLESS = """
    logging_* save_* eval_* evaluation_strategy report_to run_name do_* remove_unused_columns dataloader_*
    num_train_epochs overwrite_output_dir lr_scheduler_* ddp_timeout hub_* push_to_hub deepspeed dataset_* torch_dtype
"""
"""The arguments that cost neither time nor memory of a step."""


def with_trainer(config: Mapping[str, Any], path: Path, given: CommandLine | None) -> dict[str, Any]:
    """A configuration's settings, changed and filled in by the arguments of the job's command line.

    Raises:
        InputError: if the Trainer refuses the configuration, as it says otherwise.
    """
    settings = dict(config)
    if given is None:
        return settings
    filled = given.changed(settings)
    for name in given.changed({}):
        argument = name.replace("-", "_")
        if argument in _FILLED:
            entry, value = _FILLED[argument], filled.pop(name)
            said = config.get(entry, "auto")
            if said not in ("auto", value):
                raise InputError(
                    f"{path}: {entry} is {said}, and --{argument} {value}, which the Trainer refuses: let the entry be"
                    " 'auto', or give the same."
                )
            filled[entry] = value
        elif argument in _OWN:
            filled[_OWN[argument]] = filled.pop(name)
    return filled


def model_of(read: SettingsReader) -> Model | None:
    """The model that the arguments name; None: they name none."""
    name = read.get(_MODEL)
    return None if name is None else named_model(str(name))


def length_of(read: SettingsReader) -> int | None:
    """Tokens per sequence by the arguments; None: they do not say."""
    return None if read.get(_LENGTH) is None else read.size(_LENGTH)


def optimizer_of(read: SettingsReader) -> str:
    """The configuration's optimizer, or the nearest one to that of the arguments."""
    own = read.get("optimizer.type")
    name = str(read.get(_OPTIMIZER, "adamw"))
    if own is not None:
        return str(own).lower()
    if re.search("adamw.*8bit", name):
        return "adamw-8bit"
    plain = name.removeprefix("paged_").partition("_")[0]
    return plain if plain in MOMENTS else "adamw"


def remarks(read: SettingsReader, optimizer: str, length: int | None) -> Iterator[str]:
    """Sentences on arguments that are predicted otherwise.

    Args:
        read: The settings.
        optimizer: The optimizer that is predicted.
        length: Tokens per sequence that the user gives; None: as the arguments say.
    """
    name = str(read.get(_OPTIMIZER, "adamw"))
    if read.get("optimizer.type") is None and not re.match(r"(paged_)?(adamw|sgd|lion_32bit|lion$)", name):
        yield f"{_OPTIMIZER} {name} is predicted as {optimizer}."
    if length is None and read.get(_LENGTH) is not None:
        yield f"Every sequence is predicted with the whole {_LENGTH}, as packed ones have; shorter ones take less."
