"""Schedules in files of the user's own, named as `FILE.py:FUNCTION`."""

from __future__ import annotations

import inspect

from debubble.errors import InputError
from debubble.schedules.registry import ScheduleEntry, schedules
from debubble.user_files import UserFunction, user_function

_ARGUMENTS = ("devices", "micro_batches", "costs")


def named_schedule(text: str) -> str:
    """The name of a schedule of the library, from a text such as `1f1b:4` or `mine.py:order:4`, with its chunks.

    A function of a file is registered under its own name, or under that of its `@schedule`.

    Args:
        text: A name, returned as it is, or a file and a function.

    Raises:
        InputError: If there is no such file or function, or it is no schedule.
    """
    own = user_function(text, what="schedule")
    return text if own is None else f"{_registered(own)}{own.rest}"


def _registered(own: UserFunction) -> str:
    """The name under which a function of a file is registered."""
    known = next((name for name, entry in schedules.items() if entry.build is own.function), None)
    if known is not None:
        return known
    _check(own)
    if own.name in schedules:
        raise InputError(f"There is a schedule '{own.name}' already: give the function in {own.file} another name.")
    chunks = inspect.signature(own.function).parameters.get("chunks")
    default = chunks.default if chunks is not None and isinstance(chunks.default, int) else 1
    schedules.add(own.name, ScheduleEntry(own.name, own.function, str(own.file), "", "", default))
    return own.name


def _check(own: UserFunction) -> None:
    """Raise InputError for what cannot be called as a schedule is."""
    try:
        inspect.signature(own.function).bind(**dict.fromkeys(_ARGUMENTS))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{own.file}:{own.name} is no schedule, which is a function of {', '.join(_ARGUMENTS[:-1])} and"
            f" {_ARGUMENTS[-1]} that returns a db.Schedule."
        ) from error
