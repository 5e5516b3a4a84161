"""Settings of configuration files, and command-line arguments, each as one flat mapping.

YAML, JSON and TOML are read as `a.b.c` -> value.  Arguments stand in a shell script, which is read and never run, or in
the list that Megatron-LM logs.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from debubble.files import parse, read_file
from debubble.imports.shell import script_words
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
    refusal = f"{path} is no {path.suffix[1:].upper()}"
    text = parse(bytes.decode, read_file(path, "configuration"), refusal)
    # PyYAML lets what its constructors of dates and numbers raise pass.
    tree = parse(_READERS[path.suffix], text, refusal, yaml.YAMLError, AttributeError)
    if not isinstance(tree, dict):
        raise InputError(f"{path} has no settings by name.")
    return dict(_flat(tree))


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_constants(path: Path) -> dict[str, Any]:
    """The constants of a Python file that debubble wrote, which is not run.

    Raises:
        InputError: if it cannot be read, or is no such file.
    """
    try:
        return {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(read_file(path, "recipe")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no recipe of debubble's, whose settings are constants.") from error


def unread(left: Iterable[str], costly: re.Pattern[str]) -> Iterator[str]:
    """Sentences on the settings that nobody asked for: those that change time or memory of a step, and the others.

    Args:
        left: Their names.
        costly: Words in the names of those that may cost something.
    """
    names = sorted(left)
    may_cost = [name for name in names if costly.search(name)]
    if may_cost:
        yield f"Not read: {' '.join(may_cost)}."
    free = [name for name in names if name not in may_cost]
    if free:
        more = f" and {len(free) - _NAMED} more" if len(free) > _NAMED else ""
        yield f"Taken to cost neither time nor memory: {' '.join(free[:_NAMED])}{more}."


_NAMED = 12
"""Settings that are named in a sentence: a log lists hundreds."""


class SettingsReader:
    """Settings that are asked for by type, and know which of them were."""

    def __init__(self, settings: Mapping[str, Any], path: Path) -> None:
        self.settings, self.path = settings, path
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A setting as it stands there; `default` where it is missing, null or `none`."""
        self._asked.add(name)
        value = self.settings.get(name)
        return default if value in (None, "none", "None") else value

    def text(self, name: str, default: str) -> str:
        """A word; raises InputError if the setting is none."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise InputError(f"{self.path}: {name} is {value!r}, which is no word.")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """What a word stands for, such as `torch.bfloat16`; raises InputError if it is none of the choices."""
        word = self.text(name, default).removeprefix("torch.")
        if word not in choices:
            raise InputError(f"{self.path}: {name} is '{word}', and only {', '.join(choices)} are priced.")
        return choices[word]

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; raises InputError if it is missing without a default, or is none."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            said = "is missing" if value is None else f"is {value!r}, which is no whole number"
            if value == "auto":
                said = "is 'auto', which your trainer fills in: write the number into a copy of the file"
            raise InputError(f"{self.path}: {name} {said}.")
        return value

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.settings

    def assume(self, name: str, *values: Any, default: Any = None) -> Iterator[str]:
        """A sentence if a setting has none of the values that the prediction counts on.

        Args:
            name: The setting.
            values: What the prediction counts on.
            default: The framework's own value where the setting is missing; None: one that is counted on.
        """
        value = self.get(name, values[0] if default is None else default)
        if value not in values:
            yield f"{name} is {value}, and the prediction counts on {values[0]}."

    def skip(self, prefix: str) -> None:
        """Count all settings that begin so as asked for: something else says what they say."""
        self._asked.update(name for name in self.settings if name.startswith(prefix))

    @property
    def left(self) -> list[str]:
        """Names of the settings that nobody asked for."""
        return [name for name in self.settings if name not in self._asked]

    def size(self, name: str, default: int | None = None, *, instead: int | None = None) -> int:
        """A positive whole number; raises InputError if it is missing without a default, or is none.

        Args:
            name: The setting.
            default: Its value where it is missing.
            instead: What the user gives in its place, whatever it is; None: nothing.
        """
        if instead is not None:
            self._asked.add(name)
            return instead
        value = self.number(name, default)
        if value < 1:
            raise InputError(f"{self.path}: {name} is {value}, which is no number of anything.")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, none if it is missing; raises InputError if the setting is anything else."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise InputError(f"{self.path}: {name} is {value!r}, which is no list of whole numbers.")
        return value


_LOGGED = re.compile(r"^\s*(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
_DUMP = 10
"""Lines of a log that make it the list of a run's arguments."""


def read_arguments(path: Path) -> Mapping[str, Any]:
    """The arguments in a file, `--name` -> True, a word, or a tuple of words.

    Variables that the script sets are put in; words with others stay as they are.

    Raises:
        InputError: if the file cannot be read, or has no arguments.
    """
    text = read_file(path, "script").decode(errors="replace")
    logged = _LOGGED.findall(text)
    arguments = dict(_logged_arguments(logged)) if len(logged) >= _DUMP else _named_arguments(script_words(text, path))
    if not arguments:
        raise InputError(
            f"{path} has no arguments such as --num-layers 32, nor the list of them that Megatron-LM logs."
        )
    return arguments


def _logged_arguments(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Arguments as `name .... value`; those that are off are left out."""
    for name, value in lines:
        if value not in ("None", "False", "[]"):
            listed = value.startswith("[") and tuple(word.strip(" '\"") for word in value.strip("[]").split(","))
            yield f"--{name.replace('_', '-')}", True if value == "True" else listed or value


def _named_arguments(words: list[str]) -> dict[str, Any]:
    """The arguments, the last of each name, with the words behind it."""
    arguments: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            arguments[name] = (value,) if value else ()
        elif word in (")", "\\") or word.endswith("(") or not word.strip(";|&"):
            name = None
        elif name is not None:
            arguments[name] += (word,)
    return {name: _plain(values) for name, values in arguments.items()}


def _plain(values: tuple[str, ...]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values
