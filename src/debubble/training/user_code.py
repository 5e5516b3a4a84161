"""Import of users' functions and classes, named as `module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from debubble.ir import InputError
from debubble.plans import Plan


class Dataset(Protocol):
    """A map-style dataset in torch's sense.

    An item is `length + 1` tokens, or a mapping with entries of a `Batch` (`input_ids` and `labels`, say) of `length`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def named(name: str, *, option: str) -> Any:
    """Import the object `module:name` of an option; the module may be in the current folder.

    Installed modules take precedence over that folder.  Raises InputError if there is no such object.
    """
    module, _, attribute = name.partition(":")
    try:
        with current_folder_last():
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{option} {name} cannot be loaded: {error}; give it as module:name.") from error


def named_dataset(name: str, *, option: str = "--dataset") -> Callable[[Plan], Dataset]:
    """The function that `module:function` names (see `named`).  Raises InputError if there is none."""
    function = named(name, option=option)
    if not callable(function):
        raise InputError(f"{option} {name} is no function: give one that takes the plan and returns a Dataset.")
    return function  # type: ignore[no-any-return]


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Append the current folder to the import path, with the lowest precedence."""
    before = sys.path.copy()
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
