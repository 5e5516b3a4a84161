"""Reads AMD Primus experiments for torchtitan, whose overrides and models are torchtitan's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from debubble.frameworks.primus.bases import file_of, with_bases
from debubble.imports.command_line import CommandLine
from debubble.ir import InputError

_TRAINER = "modules.pre_trainer."
_MODELS, _TRAINERS = "primus/configs/models/torchtitan", "primus/configs/modules/torchtitan"
"""The folders of models and trainers in a checkout."""
_DEFAULTS = {"activation_checkpoint.mode": "none", "compile.enable": True}
"""Defaults of Primus's trainer that differ from torchtitan's.  Source: configs/modules/torchtitan/pre_trainer.yaml."""
_NAME = re.compile(r"(llama3|llama4|deepseek_v3|gpt_oss|qwen3)(?:\.\d)?_([^_-]+)(-fp8)?")
"""Primus's model names: a model of torchtitan, its flavor, and whether it computes in fp8."""
_LOWER = ("llama4", "gpt_oss")
"""Models whose flavors torchtitan writes in lower case."""


def is_experiment(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings are those of an experiment of Primus."""
    return any(name.startswith(_TRAINER) for name in settings)


def read_experiment(settings: Mapping[str, Any], path: Path, command_line: CommandLine) -> dict[str, Any]:
    """An experiment as torchtitan's settings; raises InputError if it is for another framework."""
    expanded = {name: command_line.expand(value) for name, value in settings.items()}
    framework = expanded.get(f"{_TRAINER}framework")
    if framework != "torchtitan":
        raise InputError(
            f"{path} is for Primus's framework '{framework}': `debubble import primus` reads those for megatron."
        )
    prefix = f"{_TRAINER}overrides."
    overrides = {name.removeprefix(prefix): value for name, value in expanded.items() if name.startswith(prefix)}
    trainer = _trainer(str(expanded.get(f"{_TRAINER}config", "pre_trainer")), path)
    return {**trainer, **_model(str(expanded.get(f"{_TRAINER}model", "")), path), **overrides}


def _no_base(name: str) -> None:
    """The settings of a base configuration that does not exist: unknown."""


def _trainer(name: str, path: Path) -> Mapping[str, Any]:
    """The settings of a trainer, from a file next to the experiment or in its checkout, or Primus's defaults."""
    file = file_of(name, _TRAINERS, path)
    settings = _DEFAULTS if file is None else with_bases(file, _no_base)
    return {entry: value for entry, value in settings.items() if "." in entry and value is not None}


def _model(name: str, path: Path) -> Mapping[str, Any]:
    """The settings of a model, from a file next to the experiment or in its checkout, or by Primus's name for it."""
    file = file_of(name, _MODELS, path)
    if file is not None:
        return with_bases(file, _no_base)
    known = _NAME.fullmatch(name.removesuffix(".yaml"))
    if known is None:
        return {}
    flavor = known[2].lower() if known[1] in _LOWER else re.sub("b$", "B", known[2])
    return {
        "model.name": known[1],
        "model.flavor": flavor,
        **({"model.converters": ["quantize.linear.float8"]} if known[3] else {}),
    }
