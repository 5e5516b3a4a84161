"""The YAML files of AMD Primus that extend others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from debubble.imports.settings import read_settings
from debubble.ir import InputError

_MAX_BASES = 20
_WORDS = ("includes", "bases", "extends")
"""Entries that name the files that a file extends, weakest first; until the end of 2025 they were the first two."""


def file_of(name: str, folder: str, path: Path) -> Path | None:
    """The file of a base configuration, next to an experiment or in its checkout; None if it is in neither.

    Args:
        name: The configuration, with or without its ending.
        folder: The folder of such configurations in a checkout.
        path: The experiment.
    """
    folders = [path.parent, *(each / folder for each in path.absolute().parents)]
    files = (each / f"{name.removesuffix('.yaml')}.yaml" for each in folders)
    return next((file for file in files if file.is_file() and file != path), None)


def with_bases(file: Path, known: Callable[[str], Mapping[str, Any] | None], depth: int = 0) -> dict[str, Any]:
    """The settings of a file, in place of those of the files that it extends.

    Args:
        file: The file.
        known: The settings of a file that is not there, by its name; None: they are not known.
        depth: How many files extend this one.

    Raises:
        InputError: if a file that it extends is neither there nor known.
    """
    own = dict(read_settings(file))
    bases = [base for word in _WORDS for base in _names(own.pop(word, None), word)]
    whole: dict[str, Any] = {}
    for base in bases if depth < _MAX_BASES else ():
        name = file.parent / base
        settings = with_bases(name, known, depth + 1) if name.is_file() else known(name.stem)
        if settings is None:
            raise InputError(f"{file} extends {base}, which is not there: put it there.")
        whole |= settings
    return {**whole, **own}


def _names(value: object, word: str) -> list[str]:
    """The files that an entry names, one or a list, those first that the others replace."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)] if value else []
    return names if word == "extends" else names[::-1]
