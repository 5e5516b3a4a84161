"""Settings of configuration files: YAML, JSON and TOML as one flat mapping, `a.b.c` -> value."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from debubble.files import read_file
from debubble.ir import InputError

_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


def read_settings(path: Path) -> Mapping[str, Any]:
    """The settings of a file, by their paths.

    Raises:
        InputError: if it cannot be read, or is none of the formats.
    """
    if path.suffix not in _READERS:
        raise InputError(f"{path} is no configuration that is read here; there are: {', '.join(_READERS)}.")
    try:
        tree = _READERS[path.suffix](read_file(path, "configuration").decode())
    except (ValueError, yaml.YAMLError) as error:
        what = str(error).splitlines()[0]
        raise InputError(f"{path} is no {path.suffix[1:].upper()}: {what}.") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} has no settings by name.")
    return dict(_flat(tree))


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Reader:
    """Settings that are asked for by type."""

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self._settings, self._path = settings, path

    def get(self, name: str, default: Any = None) -> Any:
        """A setting as it stands there; `default` where it is missing or null."""
        value = self._settings.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; raises InputError if it is missing without a default, or is none."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            said = "is missing" if value is None else f"is {value!r}, which is no whole number"
            raise InputError(f"{self._path}: {name} {said}.")
        return value

    def matching(self, words: Sequence[str], *, read: Sequence[str]) -> list[str]:
        """Names of settings with one of the words in them, but for those that were read."""
        return sorted(name for name in self._settings if name not in read and any(word in name for word in words))
