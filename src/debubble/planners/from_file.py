"""Planners in user files, named as `FILE.py:FUNCTION`."""

from __future__ import annotations

import inspect

from debubble.errors import InputError
from debubble.planners.registry import PlannerEntry, planners
from debubble.user_files import user_function

FILE_PLANNERS: list[str] = []
"""The files and functions that were named, which other processes that plan name too."""


def named_planner(text: str) -> str:
    """The name of a planner, from itself or a text such as `mine.py:plan`.

    A function of a file is registered under that of its `@planner`, or under its own name.

    Args:
        text: A name, returned as it is, or a file and a function.

    Raises:
        InputError: If there is no such file or function, or it is no planner.
    """
    entry = user_function(text, kind="planner")
    if entry is None:
        return text
    known = next((name for name, planner in planners.items() if planner.function is entry.function), None)
    if known is None:
        try:
            inspect.signature(entry.function).bind(None)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{entry.file}:{entry.name} is no planner, which is a function of a Problem that returns a Solution."
            ) from error
        if entry.name in planners:
            raise InputError(
                f"There is a planner '{entry.name}' already: give the function in {entry.file} another name."
            )
        known = entry.name
        planners.add(known, PlannerEntry(known, entry.function, paper=str(entry.file), searches=False))
    FILE_PLANNERS.append(f"{entry.file.resolve()}:{entry.name}")
    return known
