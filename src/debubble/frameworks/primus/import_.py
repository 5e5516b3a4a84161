"""Imports AMD Primus experiments, which override Megatron-LM's arguments in base configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from debubble.frameworks.megatron.arguments import Arguments, is_off
from debubble.frameworks.megatron.bridge import argument
from debubble.frameworks.megatron.changes import conflicts, notes, required, switches
from debubble.frameworks.megatron.import_ import HARMLESS as OF_MEGATRON
from debubble.frameworks.megatron.import_ import job_of, with_arguments
from debubble.frameworks.primus.bases import file_of, with_bases
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults, framework_defaults
from debubble.imports.job import ImportedJob
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, UserFacts, imports
from debubble.ir import InputError

_TRAINERS = ("modules.pre_trainer.", "modules.post_trainer.", "modules.sft_trainer.")
_BASES = {"trainers": "primus/configs/modules/megatron", "models": "primus/configs/models/megatron"}
"""Kinds of base configurations -> their folder in a checkout."""
_OTHER_FRAMEWORKS = {
    "torchtitan": "`debubble import torchtitan` reads it",
    "megatron_bridge": "import the configuration that Megatron-Bridge saves with `debubble import megatron`",
}
"""Primus's other frameworks -> how to import their experiments."""
_LORA = "--lora."
_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads")


def read_experiment(path: Path, command_line: CommandLine | None = None) -> Mapping[str, Any]:
    """The overrides as arguments, `--name` -> value, and the names of the base configurations.

    Raises:
        InputError: if the file is not an experiment.
    """
    line = command_line or CommandLine({})
    settings = {name: line.expand(value) for name, value in with_bases(path, _known_base).items()}
    trainer = next((name for name in _TRAINERS if any(entry.startswith(name) for entry in settings)), _TRAINERS[0])
    prefix = f"{trainer}overrides."
    overrides = {
        _name(name.removeprefix(prefix)): None if value is None else argument(value)
        for name, value in settings.items()
        if name.startswith(prefix) and (value is None or value is False or not is_off(name.removeprefix(prefix), value))
    }
    if not overrides:
        raise InputError(f"{path} has no modules.pre_trainer.overrides, as Primus's experiments have.")
    framework = settings.get(f"{trainer}framework", "megatron")
    if framework != "megatron":
        advice = _OTHER_FRAMEWORKS.get(str(framework), "plan the job with `debubble plan`")
        raise InputError(f"{path} is for Primus's framework '{framework}', and only megatron's are read: {advice}.")
    named = {"trainers": settings.get(f"{trainer}config"), "models": settings.get(f"{trainer}model")}
    bases = {kind: name for kind, name in named.items() if name is not None}
    remaining = {name: value for name, value in settings.items() if not name.startswith(("modules.", "platform."))}
    return with_arguments({**_with_adapters(overrides), **bases, **remaining}, command_line)


def _name(entry: str) -> str:
    return f"--{entry.replace('_', '-')}"


def _with_adapters(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides with adapters by Megatron-Bridge's names, or without adapters if they are off."""
    adapters = {name.removeprefix(_LORA): value for name, value in overrides.items() if name.startswith(_LORA)}
    remaining = {name: value for name, value in overrides.items() if not name.startswith(_LORA)}
    if adapters.pop("enabled", False) is not True:
        return remaining
    named = {f"peft.{name.lower().replace('-', '_')}": value for name, value in adapters.items()}
    return {**remaining, "peft._target_": "LoRA", **named}


def _base(kind: str, name: str, path: Path) -> Mapping[str, Any] | None:
    """A base configuration: a file next to the experiment or in its checkout, or Primus's own of that name."""
    file = file_of(name, _BASES[kind], path)
    if file is not None:
        settings = with_bases(file, _known_base)
        return {_name(entry): argument(value) for entry, value in settings.items() if value is not None}
    known = framework_defaults("primus")[kind].get(name.removesuffix(".yaml"))
    return None if known is None else {**(_language_model() if kind == "models" else {}), **_arguments(known)}


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: argument(value) for name, value in settings.items()}


def _entries(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the entries of a file."""
    return {name.removeprefix("--").replace("-", "_"): value for name, value in arguments.items()}


def _language_model() -> dict[str, Any]:
    """The base configuration of all models."""
    return _arguments(framework_defaults("primus")["language_model"])


def _known_base(name: str) -> Mapping[str, Any] | None:
    """The entries of one of Primus's own models, if its file does not exist."""
    known = {"language_model": {}, **framework_defaults("primus")["models"]}.get(name)
    return None if known is None else _entries({**_language_model(), **known})


DEFAULTS = Defaults("Primus", {"peft.dim": 32, "--add-bias-linear": False})
"""Primus's defaults, besides those of the trainer and the model that an experiment names."""
HARMLESS = "work_group user_name workspace trainable sink_level file_sink_level stderr_sink_level"
"""Entries that cost neither time nor memory of a step, besides Megatron-LM's."""


def primus(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of an experiment with its base configurations."""
    trainer = _base("trainers", read.text("trainers", "pre_trainer"), read.path)
    name = read.text("models", "")
    model = _base("models", name, read.path) if name else None
    if trainer is None:
        raise InputError(
            f"{read.path} extends the trainer {read.get('trainers')}, which is neither next to it nor one of Primus's:"
            " put it there."
        )
    settings = dict(read.settings)
    if model is None:
        settings |= {"model": name.removesuffix(".yaml")} if name else {}
        model = {entry: value for entry, value in _language_model().items() if entry not in _SIZES}
    arguments = Arguments(
        settings, read.path, replace(read.defaults, values={**read.defaults.values, **trainer, **model}), read.harmless
    )
    for kind in _BASES:
        arguments.get(kind)
    return job_of(arguments, facts, target="primus")


imports.add(
    "primus",
    Importer(
        name="primus", read_job=primus, settings=read_experiment, file="plan.yaml", conflicts=conflicts,
        with_arguments=read_experiment, required=required, notes=notes, switches=switches, defaults=DEFAULTS,
        harmless=f"{OF_MEGATRON} {HARMLESS}",
    ),
)  # fmt: skip
