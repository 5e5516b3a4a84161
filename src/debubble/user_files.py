"""Functions in user files, named as `FILE.py:FUNCTION`: the file is run because the user names it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from debubble.errors import InputError
from debubble.files import read_file

_NAMED = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)(?P<rest>:.*)?")


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A function in a user file.

    Attributes:
        file: The file.
        name: The function's name.
        function: The function.
        rest: What follows the name in the text, such as `:4`.
    """

    file: Path
    name: str
    function: Callable[..., Any]
    rest: str


def user_function(text: str, *, kind: str) -> UserFunction | None:
    """The function that a text such as `mine.py:order:4` names; None if it names no file.

    Args:
        text: A name, or a file and a function.
        kind: What the function should be, in words.

    Raises:
        InputError: If there is no such file or function, or the file cannot be run.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        if text.endswith((".py", ".py:")):
            raise InputError(f"{text.rstrip(':')} is a file of Python: name its function, {text.rstrip(':')}:NAME.")
        return None
    file, name = Path(match["file"]), match["function"]
    function = getattr(_module(file.resolve(), kind), name, None)
    if function is None:
        raise InputError(f"{file} has no function '{name}'.")
    return UserFunction(file=file, name=name, function=function, rest=match["rest"] or "")


@cache
def _module(file: Path, kind: str) -> ModuleType:
    """The module of a file, run once; raises InputError if it cannot be."""
    read_file(file, kind)
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
