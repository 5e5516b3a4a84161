"""User-defined schedules, named as `FILE.py:FUNCTION`: the file is executed because the user names it."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from debubble.errors import InputError
from debubble.files import read_file
from debubble.ir import Schedule
from debubble.schedules.registry import ScheduleEntry, schedules

_NAMED = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)(?P<chunks>:.*)?")
_ARGUMENTS = ("devices", "micro_batches", "costs")


def named_schedule(text: str) -> str:
    """The registered name of a schedule, with its chunks, from a text such as `1f1b:4` or `mine.py:order:4`.

    A function in a file is registered under its own name, or under the name of its `@schedule`.

    Args:
        text: A name, returned unchanged, or a file and a function.

    Raises:
        InputError: If there is no such file or function, or it is not a schedule.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        if text.endswith((".py", ".py:")):
            raise InputError(f"{text.rstrip(':')} is a file of Python: name its function, {text.rstrip(':')}:NAME.")
        return text
    name = _registered(f"{match['file']}:{match['function']}", Path(match["file"]), match["function"])
    return f"{name}{match['chunks'] or ''}"


def _registered(label: str, file: Path, function: str) -> str:
    """Register a function of a file if necessary, and return its name."""
    build = getattr(_module(file.resolve()), function, None)
    if build is None:
        raise InputError(f"{file} has no function '{function}'.")
    known = next((name for name, entry in schedules.items() if entry.build is build), None)
    if known is not None:
        return known
    _check(label, build)
    if function in schedules:
        raise InputError(f"There is a schedule '{function}' already: give the function in {file} another name.")
    chunks = inspect.signature(build).parameters.get("chunks")
    default = chunks.default if chunks is not None and isinstance(chunks.default, int) else 1
    schedules.add(function, ScheduleEntry(function, build, str(file), "", "", default))
    return function


def _check(label: str, build: Callable[..., Schedule]) -> None:
    """Raise InputError if a function cannot be called like a schedule."""
    try:
        inspect.signature(build).bind(**dict.fromkeys(_ARGUMENTS))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{label} is no schedule, which is a function of {', '.join(_ARGUMENTS[:-1])} and {_ARGUMENTS[-1]} that"
            " returns a db.Schedule."
        ) from error


@cache
def _module(file: Path) -> ModuleType:
    """The module of a file, executed once; raises InputError if that fails."""
    read_file(file, "schedule")
    name = f"debubble_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise InputError(f"{file} cannot be run: {type(error).__name__}: {error}.") from error
    return module
