"""Functions and classes of the user's own, named as `module:name`."""

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
    """A map-style dataset, as torch calls it.

    An item is `length + 1` tokens, or a mapping with entries of a `Batch` (`input_ids` and `labels`, say) of `length`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def named(name: str, *, option: str) -> Any:
    """Import what `module:name`, given with this option, names; the module may be in the current folder.

    What is installed goes before what is in that folder.  Raises InputError if there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        with current_folder_last():
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{option} {name} cannot be loaded: {error}; give it as module:name.") from error


def named_dataset(name: str, *, option: str = "--dataset") -> Callable[[Plan], Dataset]:
    """The function that `module:function` names (see `named`).  Raises InputError if there is none."""
    found = named(name, option=option)
    if not callable(found):
        raise InputError(f"{option} {name} is no function: give one that takes the plan and returns a Dataset.")
    return found  # type: ignore[no-any-return]


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Let imports find modules in the current folder that are nowhere else."""
    before = sys.path.copy()
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
