"""The arguments of the training that a script starts: the one of its commands that has them, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from debubble.imports.shell.script_run import TRAINING_ARGUMENTS, ScriptRun, Started
from debubble.imports.training_scripts import SCRIPT, is_family_script, is_other_script, swift_command
from debubble.ir import InputError

_UNSET = re.compile(r"\$(\w+|\{\w+(\[[@*]\])?\}|@|\*|\((?!\().*\))", re.DOTALL)
"""A word that is nothing but a variable or a command's output that the script does not tell."""
_ARGUMENT_VARIABLES = re.compile(r"\[[@*]\]|^\$[@*]$|args|options|opts|flags|extra|params|cmd", re.IGNORECASE)
"""Parts of the names of variables that hold arguments, and no value of one."""


def training_command(script: ScriptRun, path: Path) -> Started:
    """The command that trains; one with the words of all variables where none does.

    Raises:
        InputError: if several commands train with other arguments.
    """
    training = [command for command in script.commands if _trains(command.words)]
    if not training:
        with_options = [command.words for command in script.commands if any(map(_is_name, command.words))]
        return Started(tuple(word for words in (*script.assigned, *with_options) for word in words), 0)
    named = {command.line: named_arguments(command.words) for command in training}
    most = max(named, key=lambda line: len(named[line]))
    others = [
        line
        for line, arguments in named.items()
        if any(named[most].get(name, value) != value for name, value in arguments.items() if name in TRAINING_ARGUMENTS)
    ]
    if others:
        lines = ", ".join(map(str, sorted({most, *others})))
        raise InputError(f"{path} starts several trainings (lines {lines}): give a copy with the one that is meant.")
    return next(command for command in training if command.line == most)


def _trains(words: Sequence[str]) -> bool:
    """Tell whether a command trains, by its arguments; ms-swift's may have them in a file, or convert a checkpoint."""
    swift = swift_command(words)
    return (
        bool(TRAINING_ARGUMENTS & _names(words) or swift in ("megatron sft", "megatron pt"))
        and swift != "megatron export"
    )


def named_arguments(words: Iterable[str]) -> dict[str, Any]:
    """The arguments, the last of each name, with the words after it; variables that nobody sets by themselves."""
    arguments: dict[str, Any] = {}
    name: str | None = None
    for word in _divided(words):
        if _is_name(word):
            name, _, value = word.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            arguments[name] = (value,) if value else ()
        elif _UNSET.fullmatch(word) and (name is None or arguments[name] or _ARGUMENT_VARIABLES.search(word)):
            arguments[word] = ()
        elif name is not None:
            arguments[name] += (word,)
        if word.endswith(".py") and _names_models(Path(word).stem):
            arguments[SCRIPT] = (word,)
    return {name: _plain(values) for name, values in arguments.items()}


def _names_models(name: str) -> bool:
    """Tell whether a training script's name tells more of its models than that they are GPTs."""
    return is_other_script(name) or is_family_script(name)


def _divided(words: Iterable[str]) -> Iterable[str]:
    """The words, where those of several words that begin with a name are several."""
    for word in words:
        yield from word.split() if word.lstrip().startswith("--") and re.search(r"\s", word) else (word,)


def _names(words: Sequence[str]) -> set[str]:
    return {f"--{w[2:].replace('_', '-').partition('=')[0]}" for w in _divided(words) if _is_name(w)}


def _is_name(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _plain(values: tuple[str, ...]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values
