"""Planners in files of the user's own, named as `FILE.py:FUNCTION`."""

from __future__ import annotations

import inspect

from debubble.errors import InputError
from debubble.planners.registry import PlannerEntry, planners
from debubble.user_files import user_function

NAMED: list[str] = []
"""The files and functions that were named, which other processes that plan name too."""


def named_planner(text: str) -> str:
    """The name of a planner, from itself or a text such as `mine.py:plan`.

    A function of a file is registered under that of its `@planner`, or under its own name.

    Args:
        text: A name, returned as it is, or a file and a function.

    Raises:
        InputError: If there is no such file or function, or it is no planner.
    """
    own = user_function(text, what="planner")
    if own is None:
        return text
    known = next((name for name, entry in planners.items() if entry.function is own.function), None)
    if known is None:
        try:
            inspect.signature(own.function).bind(None)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{own.file}:{own.name} is no planner, which is a function of a Problem that returns a Solution."
            ) from error
        if own.name in planners:
            raise InputError(f"There is a planner '{own.name}' already: give the function in {own.file} another name.")
        known = own.name
        planners.add(known, PlannerEntry(known, own.function, paper=str(own.file), searches=False))
    NAMED.append(f"{own.file.resolve()}:{own.name}")
    return known
