"""Reads YAML files of AMD Primus, which extend base configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from debubble.imports.settings import read_settings
from debubble.ir import InputError

_MAX_BASES = 20
_BASE_ENTRIES = ("includes", "bases", "extends")
"""Entries that list base files, in order of increasing precedence; until the end of 2025 there were the first two."""


def file_of(name: str, folder: str, path: Path) -> Path | None:
    """The file of a base configuration, next to an experiment or in its checkout; None if it is in neither.

    Args:
        name: The configuration, with or without suffix.
        folder: The folder of such configurations in a checkout.
        path: The experiment.
    """
    folders = [path.parent, *(parent / folder for parent in path.absolute().parents)]
    files = (parent / f"{name.removesuffix('.yaml')}.yaml" for parent in folders)
    return next((file for file in files if file.is_file() and file != path), None)


def with_bases(file: Path, known: Callable[[str], Mapping[str, Any] | None], depth: int = 0) -> dict[str, Any]:
    """The settings of a file, merged over those of its base files.

    Args:
        file: The file.
        known: Returns the settings of a base file that does not exist, by its name; None: unknown.
        depth: Depth of the recursion.

    Raises:
        InputError: if a base file neither exists nor is known.
    """
    settings = dict(read_settings(file))
    bases = [base for entry in _BASE_ENTRIES for base in _names(settings.pop(entry, None), entry)]
    inherited: dict[str, Any] = {}
    for base in bases if depth < _MAX_BASES else ():
        name = file.parent / base
        base_settings = with_bases(name, known, depth + 1) if name.is_file() else known(name.stem)
        if base_settings is None:
            raise InputError(f"{file} extends {base}, which is not there: put it there.")
        inherited |= base_settings
    return {**inherited, **settings}


def _names(value: object, word: str) -> list[str]:
    """The base files that an entry names (one or a list), in order of increasing precedence."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)] if value else []
    return names if word == "extends" else names[::-1]
