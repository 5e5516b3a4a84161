"""Functions and classes of the user's own, named as `module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from debubble.ir import InputError


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


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Let imports find modules in the current folder that are nowhere else."""
    before = sys.path.copy()
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
