"""Command-line arguments in a shell script, which is read and never run, or in the list that Megatron-LM logs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.files import read_file
from debubble.ir import InputError

_LOGGED = re.compile(r"^\s*(\w+) \.{2,} (.*?)\s*$", re.MULTILINE)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
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
    arguments = dict(_logged(logged)) if len(logged) >= _DUMP else _named(_words(text, path))
    if not arguments:
        raise InputError(
            f"{path} has no arguments such as --num-layers 32, nor the list of them that Megatron-LM logs."
        )
    return arguments


def _logged(lines: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Arguments as `name .... value`; those that are off are left out."""
    for name, value in lines:
        if value not in ("None", "False", "[]"):
            listed = value.startswith("[") and tuple(word.strip(" '\"") for word in value.strip("[]").split(","))
            yield f"--{name.replace('_', '-')}", True if value == "True" else listed or value


def _words(text: str, path: Path) -> list[str]:
    """The words of a script, with its variables and `;` for ends of lines.

    A value that is several arguments in quotes becomes these.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for word in _split(text.replace("\\\n", " ").replace("\n", "\n ; "), path):
        assigned = _ASSIGNED.fullmatch(word)
        value = _filled(assigned[2] if assigned else word, variables)
        if assigned is None:
            words.append(value)
        elif re.search(r"(^|\s)--\w", value):
            words += [";", *_split(value, path), ";"]
        else:
            variables[assigned[1]] = value
            words.append(";")
    return words


def _split(text: str, path: Path) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{path} cannot be read as a shell script: {error}.") from error


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), word)


def _named(words: list[str]) -> dict[str, Any]:
    """The arguments, the last of each name, with the words behind it."""
    arguments: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            arguments[name] = (value,) if value else ()
        elif word in (")", ";", "|", "&", "&&", "\\") or word.endswith("("):
            name = None
        elif name is not None:
            arguments[name] += (word,)
    return {name: _plain(values) for name, values in arguments.items()}


def _plain(values: tuple[str, ...]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values
