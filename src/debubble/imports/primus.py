"""AMD Primus: the overrides of an experiment, which are Megatron-LM's arguments and a few of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from debubble.imports.job import Job
from debubble.imports.megatron import job_of
from debubble.imports.registry import Given, Settings, importer
from debubble.imports.settings import read_settings
from debubble.ir import InputError

_TRAINER = "modules.pre_trainer."


def read_experiment(path: Path) -> Mapping[str, Any]:
    """The overrides as arguments, `--name` -> value, and the model as `model`; those that are off are left out.

    Raises:
        InputError: if the file is no experiment.
    """
    settings = read_settings(path)
    overrides = {
        f"--{name.removeprefix(f'{_TRAINER}overrides.').replace('_', '-')}": _argument(value)
        for name, value in settings.items()
        if name.startswith(f"{_TRAINER}overrides.") and value not in (None, False, {})
    }
    if not overrides:
        raise InputError(f"{path} has no modules.pre_trainer.overrides, as Primus's experiments have.")
    model = settings.get(f"{_TRAINER}model")
    return overrides if model is None else {**overrides, "model": model.removesuffix(".yaml").replace("_", "-")}


_DEFAULT = re.compile(r"\$\{\w+:([^}]*)\}")
"""A variable of the environment with what is taken where it is not set."""


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return _DEFAULT.sub(r"\1", value)
    if isinstance(value, list):
        return tuple(map(str, value))
    return True if value is True else str(value)


@importer("primus", settings=read_experiment, file="plan.yaml")
def primus(settings: Settings, path: Path, given: Given) -> Job:
    """The job of an experiment, with the model that it names if debubble knows it."""
    return job_of(settings, path, given, target="primus")
