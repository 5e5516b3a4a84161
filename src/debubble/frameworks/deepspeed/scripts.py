"""Reads launch scripts of Transformers' Trainer, accelerate and LLaMA-Factory that train with DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from debubble.files import read_file
from debubble.frameworks.deepspeed.accelerate import is_accelerate
from debubble.frameworks.deepspeed.trainer_files import config_of, has_config, is_of_trainer, trainer_arguments
from debubble.imports.command_line import CommandLine
from debubble.imports.registry import Settings
from debubble.imports.settings import DEEPSPEED_ARGUMENTS, settings_of_script
from debubble.imports.shell.script_run import ScriptRun, StartedCommand
from debubble.imports.shell.scripts import follow
from debubble.ir import InputError

_ACCELERATE = "--config-file"
_YAML = (".yaml", ".yml")
_CHANGE = re.compile(r"([A-Za-z]\w*)=(.*)", re.DOTALL)
"""A change of an entry after LLaMA-Factory's file."""
_OF_MEGATRON = "--num-layers"


@dataclass(frozen=True)
class ScriptJob:
    """The arguments and files with which a launch script trains.

    Attributes:
        config: The DeepSpeed configuration, or accelerate's.
        arguments: The Trainer's arguments.
        loop: The line and the head of the loop around it whose number of runs is unknown; empty: none.
    """

    config: Settings
    arguments: Mapping[str, Any]
    loop: str = ""


def read_script(path: Path, command_line: CommandLine | None, read_config: Callable[[Path], Settings]) -> ScriptJob:
    """The configuration and arguments of the command that trains with DeepSpeed.

    Args:
        path: The script.
        command_line: The command line that starts it; None: unknown.
        read_config: Reads a DeepSpeed configuration in a file.

    Raises:
        InputError: if there is no such command, there are several, or its configuration is not there.
    """
    script = follow(read_file(path, "script").decode(errors="replace"), path, command_line)
    jobs: dict[int, ScriptJob] = {}
    for command in script.commands:
        job = _job(command, script, path, read_config)
        if job is not None and jobs.get(command.line, job) != job:
            raise InputError(
                f"{path} starts several trainings in line {command.line}: give a copy with the one that is meant."
            )
        jobs |= {} if job is None else {command.line: job}
    if len(jobs) > 1:
        lines = ", ".join(map(str, jobs))
        raise InputError(f"{path} starts several trainings (lines {lines}): give a copy with the one that is meant.")
    if not jobs:
        raise InputError(
            f"{path} starts nothing with --deepspeed FILE or with accelerate's --config_file FILE: give DeepSpeed's"
            " JSON, the model with --model, the length with --sequence-length, and the arguments of Transformers'"
            " Trainer with --args."
        )
    return jobs.popitem()[1]


def _job(
    command: StartedCommand, script: ScriptRun, path: Path, read_config: Callable[[Path], Settings]
) -> ScriptJob | None:
    """The job of a command; None: it does not train with DeepSpeed."""
    words = [piece for word in command.words for piece in _divided(word)]
    if _OF_MEGATRON in words:
        raise InputError(f"{path} starts Megatron-DeepSpeed: `debubble import megatron {path}` reads it.")
    config: Settings | None = None
    arguments = dict(CommandLine({}, tuple(words)).override({}))
    for name, value in pairwise([*words, ""]):
        if name.replace("_", "-") in (*DEEPSPEED_ARGUMENTS, _ACCELERATE) and value and not value.startswith("-"):
            config = settings_of_script(value, script.files, path)
            if not config:
                raise InputError(f"{path} has its configuration in {value}, which is not next to it: put it there.")
    for word in words:
        settings = settings_of_script(word, script.files, path) if word.endswith(_YAML) else {}
        if is_of_trainer(settings):
            config = config_of(settings, path, read_config) if has_config(settings) else config
            changed = {match[1]: match[2] for word in words if (match := _CHANGE.fullmatch(word)) is not None}
            arguments = {**trainer_arguments({**settings, **changed}, path), **arguments}
    if config is None or not (is_accelerate(config) or arguments):
        return None
    if is_of_trainer(arguments):
        arguments = trainer_arguments(arguments, path)
    return ScriptJob(config, arguments, command.loop)


def _divided(word: str) -> Iterator[str]:
    """A word such as `--deepspeed=ds.json` as name and value."""
    name, sign, value = word.partition("=")
    yield from (name, value) if sign and name.startswith("--") else (word,)
