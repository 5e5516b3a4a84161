"""Job files: the MODEL, its devices and the options of a run as TOML, in place of a command line.

A key is an option's name, with `_` or `-`; options of the command line override it, and so does `sweep --over`.  Keys
that belong to another of the commands that take job files are left alone, so that one file serves all of them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.errors import InputError
from debubble.files import parse, read_file, write_whole
from debubble.registry import unknown_name

if TYPE_CHECKING:
    from debubble.plans import Plan

JOB_COMMANDS = ("plan", "fits", "simulate", "sweep")
"""The commands that take a job file in place of a MODEL."""
DEGREES = ("pipeline", "tensor", "data", "context", "expert", "expert_tensor", "zero", "micro_batch_size", "slices")
"""Keys of the degrees."""
PLACES = "debubble.job_file"
"""Entry of a context's `meta`: name of a parameter -> the file and the entry that it comes from."""
_KINDS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    list[str]: ((list,), "a list of texts"),
    Path: ((str,), "a path"),
}
"""Type of an option -> the types of entries that it takes, and words for them; others take texts and numbers."""
FILES = ("model", "cluster", "profile")
"""Keys whose values may name files, which are looked for next to the job file too."""


def with_job_file(arguments: Sequence[str], ctx: Any, parameters: Sequence[Any]) -> list[str]:
    """The arguments with a job file's model in its place; its other entries become the context's defaults.

    The context's object tells the options of other commands.  Raises InputError if the file cannot be read, has no
    model, or has a key that no command knows.
    """
    place = _job_file(arguments, parameters) if ctx.command.name in JOB_COMMANDS else None
    if place is None:
        return [*arguments]
    file = Path(arguments[place])
    entries = read_job(file)
    names = _options(parameters)
    if others := entries.keys() - names.keys() - {"model"}:
        known = ctx.obj(JOB_COMMANDS)
        for key in sorted(others - known):
            raise InputError(f"{file}: {_unknown_entry(key, _written(file)[key], sorted(known))}")
    types = {parameter.name: parameter.type_descriptor.annotation for parameter in parameters}
    for key in sorted(names.keys() & entries.keys()):
        allowed, words = _KINDS.get(types[names[key]], ((str, int, float), "a text"))
        value = entries[key]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            shown = json.dumps(value, default=str, ensure_ascii=False)
            raise InputError(f"{file}: {_written(file)[key]} must be {words}, not {shown}.")
    varied = _varied(arguments)
    entries.pop(varied, None)
    ctx.default_map = {names[key]: value for key, value in entries.items() if key in names}
    if varied == "model":
        return [*arguments[:place], *arguments[place + 1 :]]
    if "model" not in entries:
        raise InputError(f'The job file {file} has no model: write model = "llama3-8b", or see `debubble init`.')
    written, called = _written(file), {argument.partition("=")[0].removeprefix("--") for argument in arguments}
    ctx.meta[PLACES] = {
        names[key]: f"{file}: {written[key]} = {json.dumps(entries[key])}"
        for key in names.keys() & entries.keys() - called
    }
    return [*arguments[:place], str(entries["model"]), *arguments[place + 1 :]]


def _varied(arguments: Sequence[str]) -> str:
    """The option whose values a sweep has (`--over NAME=...`), without its dashes; empty: there is none."""
    words = " ".join(arguments).replace("--over=", "--over ").split()
    over = next((value for name, value in pairwise(words) if name == "--over"), "")
    return over.partition("=")[0].removeprefix("--").replace("_", "-")


def read_job(file: Path) -> dict[str, Any]:
    """The entries of a job file by the names of options, with the places of the files next to it."""
    entries = {key.replace("_", "-"): value for key, value in _read(file).items()}
    for key in FILES:
        if isinstance(entries.get(key), str) and (file.parent / entries[key]).exists():
            entries[key] = str(file.parent / entries[key])
    return entries


def _read(file: Path) -> dict[str, Any]:
    """The entries of a job file as they are written."""
    content = read_file(file, "job file").decode(errors="replace")
    return parse(tomllib.loads, content, f"The job file {file} is not TOML")


def _written(file: Path) -> dict[str, str]:
    """Name of an option -> the entry of a job file, as it is written there."""
    return {key.replace("_", "-"): key for key in _read(file)}


def _unknown_entry(key: str, written: str, known: Sequence[str]) -> InputError:
    """The error for an entry that no command knows, in the spelling of the file."""
    dashes = "-" in written
    return unknown_name(
        written if dashes else key.replace("-", "_"), known if dashes else _underscored(known), kind="entry"
    )


def _underscored(names: Sequence[str]) -> list[str]:
    return [name.replace("-", "_") for name in names]


def job_text(entries: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """A job file's content: the entries that have a value, each after its note; None: it is commented out."""
    lines = [
        "# A job of debubble: `debubble plan` plans it, `debubble fits` says what takes the memory.  An option of the",
        "# command line overrides the entry of the same name.",
    ]
    for name, value in entries.items():
        note = notes.get(name)
        lines += ["", f"# {note}"] if note else []
        lines.append(f"# {name} = ..." if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def save_job(plan: Plan, file: Path) -> None:
    """Write the job file of a model's plan, and next to it the model or the cluster if they have no name."""
    from debubble.costs import Cluster
    from debubble.models import models

    assert plan.model is not None
    assert plan.cluster is not None
    config, devices = plan.model.config, plan.cluster.to_dict()
    model = next((name for name, other in models.items() if other.config == config), None)
    if model is None:
        model = _save_next_to(file, "model", config)
    cluster = str(devices["devices"])
    if Cluster.parse(cluster) != plan.cluster:
        cluster = _save_next_to(file, "cluster", devices)
    options = {
        f.name: getattr(plan.options, f.name)
        for f in fields(plan.options)
        if getattr(plan.options, f.name) != f.default and f.name not in DEGREES
    }
    given = {
        "model": model, "cluster": cluster, "global_batch": plan.degrees.global_batch, **options,
        **({} if plan.target is None else {"for": plan.target}),
        **{name: value for name in DEGREES if (value := getattr(plan.degrees, name, None)) is not None},
    }  # fmt: skip
    notes = {"pipeline": "The job's own degrees: those that are left out are searched.", "for": "Who runs the plan."}
    write_whole(file, job_text(given, notes).encode())


def _save_next_to(file: Path, what: str, content: Mapping[str, Any]) -> str:
    place = file.with_name(f"{file.stem}-{what}.json")
    write_whole(place, json.dumps(content, indent=1).encode())
    return place.name


def _job_file(arguments: Sequence[str], parameters: Sequence[Any]) -> int | None:
    """The place of the first argument that is no option, nor its value, if it ends in .toml."""
    takes_value = {name: not getattr(each, "is_flag", False) for each in parameters for name in each.opts}
    is_value = False
    for place, argument in enumerate(arguments):
        if is_value:
            is_value = False
        elif argument.startswith("-") and argument != "-":
            is_value = "=" not in argument and takes_value.get(argument, False)
        else:
            return place if argument.endswith(".toml") else None
    return None


def _options(parameters: Sequence[Any]) -> dict[str, str]:
    """Name of an option without its dashes -> name of its parameter."""
    return {
        name.removeprefix("--"): each.name for each in parameters for name in each.opts if name.startswith("--")
    }  # fmt: skip
