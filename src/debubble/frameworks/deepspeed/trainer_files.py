"""Reads the files with arguments of Transformers' Trainer that name a DeepSpeed configuration.

Source: transformers 5.24, hf_argparser.py and training_args.py; LLaMA-Factory 0.9, hparams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.frameworks.deepspeed.trainer import LEFT_OUT
from debubble.imports.registry import Settings
from debubble.imports.shell.script_run import named_file
from debubble.ir import InputError

_CONFIG = "deepspeed"
_MARKS = ("per_device_train_batch_size", "model_name_or_path", "output_dir")
_AXOLOTL = "base_model"
"""The entry that every file of axolotl has, whose other names differ."""
_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
_FACTORY_MARKS = ("finetuning_type", "stage", "cutoff_len", "template")
_FACTORY_DEFAULTS = {"finetuning_type": "lora", "cutoff_len": 2048}
_STAGE, _RETAINS = "stage", "disable_gradient_checkpointing"
_STAGES = ("pt", "sft")


def is_of_trainer(settings: Settings) -> bool:
    """Tell whether these are arguments of the Trainer."""
    return any(name in settings for name in _MARKS) and _AXOLOTL not in settings


def has_config(settings: Settings) -> bool:
    """Tell whether the Trainer's arguments have or name a DeepSpeed configuration."""
    return any(name == _CONFIG or name.startswith(f"{_CONFIG}.") for name in settings)


def is_trainer_file(settings: Settings) -> bool:
    """Tell whether a file has the Trainer's arguments and has or names a DeepSpeed configuration."""
    return is_of_trainer(settings) and has_config(settings)


def trainer_arguments(settings: Settings, path: Path) -> dict[str, Any]:
    """The Trainer's arguments in a file, with the defaults of the Trainer or of LLaMA-Factory.

    Raises:
        InputError: if a step does more than train.
    """
    arguments = {name: value for name, value in settings.items() if name.partition(".")[0] != _CONFIG}
    is_factory = any(name in settings for name in _FACTORY_MARKS)
    defaults = {**_DEFAULTS, **(_FACTORY_DEFAULTS if is_factory else {})}
    left_out = [f"--{name} {value}" for name, value in defaults.items() if name not in settings]
    arguments = {**defaults, **arguments, LEFT_OUT: left_out}
    if not is_factory:
        return arguments
    if (stage := arguments.pop(_STAGE, "sft")) not in _STAGES:
        raise InputError(
            f"{path}: {_STAGE} is {stage}, whose steps do more than train on the next token: to predict that alone,"
            f" give a copy with {_STAGE}: sft."
        )
    checkpoints = not arguments.pop(_RETAINS, False)
    return {"gradient_checkpointing": checkpoints, **arguments}


def config_of(settings: Settings, path: Path, read_config: Callable[[Path], Settings]) -> Mapping[str, Any]:
    """The DeepSpeed configuration that the Trainer's file has or names; raises InputError if it is not there."""
    named = settings.get(_CONFIG)
    if named is None:
        return dict(_nested(settings))
    file = named_file(str(named), path)
    if file is None:
        raise InputError(f"{path} has DeepSpeed's configuration in {named}, which is not next to it: put it there.")
    return read_config(file)


def _nested(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        section, _, entry = name.partition(".")
        if section == _CONFIG:
            yield entry, value
