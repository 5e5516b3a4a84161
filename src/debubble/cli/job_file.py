"""Job files: TOML files with the MODEL, its devices and the options of a run, in place of a command line.

A key is an option's name, with `_` or `-`.  Options of the command line, and `sweep --over`, override keys.  Options
that only other commands with job files have are ignored, so that one file serves all of them.
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
"""Entries that are degrees."""
ENTRY_SOURCES = "debubble.job_file"
"""Key of a context's `meta` for the file and entry that set each parameter."""
_ENTRY_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    list[str]: ((list,), "a list of texts"),
    Path: ((str,), "a path"),
}
"""TOML types, and words for them, by the option's Python type; other options take texts and numbers."""
FILES = ("model", "cluster", "profile")
"""Entries that may be file names, relative to the working directory or the job file."""

RUN_FROM_FILES = frozenset({"planner", "schedule"})
"""Options that run a Python file.  A job file may be another person's, so it cannot name one."""


def with_job_file(arguments: Sequence[str], ctx: Any, parameters: Sequence[Any]) -> list[str]:
    """Replace a job file argument by its model, and make its other entries the context's defaults.

    The context's object returns the options of other commands.  Raises InputError if the file cannot be read, has no
    model, or has an entry that no command knows.
    """
    index = _job_file(arguments, parameters) if ctx.command.name in JOB_COMMANDS else None
    if index is None:
        return [*arguments]
    file = Path(arguments[index])
    entries = read_job(file)
    names = _options(parameters)
    if unknown := entries.keys() - names.keys() - {"model"}:
        known = ctx.obj(JOB_COMMANDS)
        for key in sorted(unknown - known):
            raise InputError(f"{file}: {_unknown_entry(key, _written(file)[key], sorted(known))}")
    for key in RUN_FROM_FILES & entries.keys():
        if ".py:" in (name := str(entries[key])):
            raise InputError(f"{file}: {key} names a file to run, which only the command line does: --{key} {name}.")
    types = {parameter.name: parameter.type_descriptor.annotation for parameter in parameters}
    for key in sorted(names.keys() & entries.keys()):
        allowed, words = _ENTRY_TYPES.get(types[names[key]], ((str, int, float), "a text"))
        value = entries[key]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            shown = json.dumps(value, default=str, ensure_ascii=False)
            raise InputError(f"{file}: {_written(file)[key]} must be {words}, not {shown}.")
    swept = _swept_option(arguments)
    entries.pop(swept, None)
    ctx.default_map = {names[key]: value for key, value in entries.items() if key in names}
    if swept == "model":
        return [*arguments[:index], *arguments[index + 1 :]]
    if "model" not in entries:
        raise InputError(f'The job file {file} has no model: write model = "llama3-8b", or see `debubble init`.')
    written, called = _written(file), {argument.partition("=")[0].removeprefix("--") for argument in arguments}
    ctx.meta[ENTRY_SOURCES] = {
        names[key]: f"{file}: {written[key]} = {json.dumps(entries[key])}"
        for key in names.keys() & entries.keys() - called
    }
    return [*arguments[:index], str(entries["model"]), *arguments[index + 1 :]]


def _swept_option(arguments: Sequence[str]) -> str:
    """The option that a sweep varies (`--over NAME=...`), without dashes; empty if there is none."""
    words = " ".join(arguments).replace("--over=", "--over ").split()
    over = next((value for name, value in pairwise(words) if name == "--over"), "")
    return over.partition("=")[0].removeprefix("--").replace("_", "-")


def read_job(file: Path) -> dict[str, Any]:
    """Read a job file's entries by option name, with paths of files next to it."""
    entries = {key.replace("_", "-"): value for key, value in _read(file).items()}
    for key in FILES:
        if isinstance(entries.get(key), str) and (file.parent / entries[key]).exists():
            entries[key] = str(file.parent / entries[key])
    return entries


def _read(file: Path) -> dict[str, Any]:
    """Read the entries of a job file."""
    content = read_file(file, "job file").decode(errors="replace")
    return parse(tomllib.loads, content, f"The job file {file} is not TOML")


def _written(file: Path) -> dict[str, str]:
    """The spelling of a job file's entries, by option name."""
    return {key.replace("_", "-"): key for key in _read(file)}


def _unknown_entry(key: str, written: str, known: Sequence[str]) -> InputError:
    """The error for an unknown entry, in the file's spelling."""
    if "-" in written:
        return unknown_name(written, known, kind="entry")
    name, *names = (dashed.replace("-", "_") for dashed in (key, *known))
    return unknown_name(name, names, kind="entry")


def job_text(entries: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """A job file's content: entries after their notes; those with None are commented out."""
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
    """Write the job file of a model's plan, and files next to it for a model or cluster without a known name."""
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
    entries = {
        "model": model, "cluster": cluster, "global_batch": plan.degrees.global_batch, **options,
        **({} if plan.target is None else {"for": plan.target}),
        **{name: value for name in DEGREES if (value := getattr(plan.degrees, name, None)) is not None},
    }  # fmt: skip
    notes = {"pipeline": "The job's own degrees: those that are left out are searched.", "for": "Who runs the plan."}
    write_whole(file, job_text(entries, notes).encode())


def _save_next_to(file: Path, kind: str, content: Mapping[str, Any]) -> str:
    path = file.with_name(f"{file.stem}-{kind}.json")
    write_whole(path, json.dumps(content, indent=1).encode())
    return path.name


def _job_file(arguments: Sequence[str], parameters: Sequence[Any]) -> int | None:
    """The index of the first positional argument, if it ends in .toml."""
    takes_value = {name: not getattr(p, "is_flag", False) for p in parameters for name in p.opts}
    is_value = False
    for index, argument in enumerate(arguments):
        if is_value:
            is_value = False
        elif argument.startswith("-") and argument != "-":
            is_value = "=" not in argument and takes_value.get(argument, False)
        else:
            return index if argument.endswith(".toml") else None
    return None


def _options(parameters: Sequence[Any]) -> dict[str, str]:
    """Parameter names by option name without dashes."""
    return {
        name.removeprefix("--"): p.name for p in parameters for name in p.opts if name.startswith("--")
    }  # fmt: skip
