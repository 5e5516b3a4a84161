"""AMD Primus: the overrides of an experiment, which are Megatron-LM's arguments and a few of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from debubble.imports.job import ImportedJob
from debubble.imports.megatron import conflicts, job_of
from debubble.imports.megatron_arguments import Arguments
from debubble.imports.megatron_bridge import argument
from debubble.imports.registry import UserFacts, importer
from debubble.imports.settings import SettingsReader, read_settings
from debubble.ir import InputError

_TRAINER = "modules.pre_trainer."


def read_experiment(path: Path) -> Mapping[str, Any]:
    """The overrides as arguments, `--name` -> value, and the model as `model`; False for those that are off.

    Raises:
        InputError: if the file is no experiment.
    """
    settings = read_settings(path)
    prefix = f"{_TRAINER}overrides."
    overrides = {
        f"--{name.removeprefix(prefix).replace('_', '-')}": _with_default(argument(value))
        for name, value in settings.items()
        if name.startswith(prefix) and value not in (None, {})
    }
    if not overrides:
        raise InputError(f"{path} has no modules.pre_trainer.overrides, as Primus's experiments have.")
    framework = _with_default(settings.get(f"{_TRAINER}framework", "megatron"))
    if framework != "megatron":
        raise InputError(f"{path} is for Primus's framework '{framework}'; only experiments of megatron are read.")
    model = _with_default(settings.get(f"{_TRAINER}model"))
    return overrides if model is None else {**overrides, "model": str(model).removesuffix(".yaml").replace("_", "-")}


def _with_default(value: Any) -> Any:
    """A word in which a variable of the environment, such as `${PP:4}`, has what is taken where it is not set."""
    return re.sub(r"\$\{\w+:([^}]*)\}", r"\1", value) if isinstance(value, str) else value


@importer("primus", settings=read_experiment, file="plan.yaml", conflicts=conflicts)
def primus(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """The job of an experiment, with the model that it names if debubble knows it."""
    return job_of(Arguments(read.settings, read.path, read.defaults), given, target="primus")
