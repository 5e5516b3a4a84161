"""User-defined schedules, named as `FILE.py:FUNCTION`: the file is executed because the user names it."""

from __future__ import annotations

import inspect

from debubble.errors import InputError
from debubble.schedules.registry import ScheduleEntry, schedules
from debubble.user_files import UserFunction, user_function

_ARGUMENTS = ("devices", "micro_batches", "costs")


def named_schedule(text: str) -> str:
    """The registered name of a schedule, with its chunks, from a text such as `1f1b:4` or `mine.py:order:4`.

    A function in a file is registered under its own name, or under the name of its `@schedule`.

    Args:
        text: A name, returned unchanged, or a file and a function.

    Raises:
        InputError: If there is no such file or function, or it is not a schedule.
    """
    entry = user_function(text, kind="schedule")
    return text if entry is None else f"{_registered(entry)}{entry.rest}"


def _registered(entry: UserFunction) -> str:
    """The name under which a function of a file is registered."""
    known = next((name for name, schedule in schedules.items() if schedule.build is entry.function), None)
    if known is not None:
        return known
    _check(entry)
    if entry.name in schedules:
        raise InputError(f"There is a schedule '{entry.name}' already: give the function in {entry.file} another name.")
    chunks = inspect.signature(entry.function).parameters.get("chunks")
    default = chunks.default if chunks is not None and isinstance(chunks.default, int) else 1
    schedules.add(entry.name, ScheduleEntry(entry.name, entry.function, str(entry.file), "", "", default))
    return entry.name


def _check(entry: UserFunction) -> None:
    """Raise InputError for what cannot be called as a schedule is."""
    try:
        inspect.signature(entry.function).bind(**dict.fromkeys(_ARGUMENTS))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{entry.file}:{entry.name} is no schedule, which is a function of {', '.join(_ARGUMENTS[:-1])} and"
            f" {_ARGUMENTS[-1]} that returns a db.Schedule."
        ) from error
