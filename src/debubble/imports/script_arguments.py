"""Finds the training command among the commands of a script, and reads its arguments by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from debubble.imports.harmless import is_harmless
from debubble.imports.shell.script_run import TRAINING_ARGUMENTS, ScriptRun, StartedCommand
from debubble.imports.training_scripts import SCRIPT, is_family_script, is_other_script, swift_command
from debubble.ir import InputError

_UNKNOWN_WORD = re.compile(r"\$(\w+|\{\w+(\[[@*]\])?\}|@|\*|\((?!\().*\))", re.DOTALL)
"""A word that consists of an unknown variable or command output."""
_ARGUMENT_VARIABLES = re.compile(r"\[[@*]\]|^\$[@*]$|args|options|opts|flags|extra|params|cmd", re.IGNORECASE)
"""Names of variables that contain arguments rather than the value of one."""


def training_command(script: ScriptRun, path: Path, overridden: Collection[str] = ()) -> StartedCommand:
    """The command that starts the training; if there is none, one made of all variables with options.

    Args:
        script: The interpreted script.
        path: Its file.
        overridden: Names of arguments that the user gives, whatever the script's are.

    Raises:
        InputError: if several commands train with different arguments.
    """
    training = [command for command in script.commands if _trains(command.words)]
    if not training:
        with_options = [command.words for command in script.commands if any(map(_is_name, command.words))]
        return StartedCommand(tuple(word for words in (*script.assigned, *with_options) for word in words), 0)
    named = {command.line: named_arguments(command.words) for command in training}
    for command in training:
        _check_repeated(named_arguments(command.words), named[command.line], command.line, path, overridden)
    main = max(named, key=lambda line: len(named[line]))
    conflicting = [
        line
        for line, arguments in named.items()
        if any(named[main].get(name, arguments[name]) != arguments[name] for name in TRAINING_ARGUMENTS & {*arguments})
    ]
    if conflicting:
        lines = ", ".join(map(str, sorted({main, *conflicting})))
        raise InputError(f"{path} starts several trainings (lines {lines}): give a copy with the one that is meant.")
    return next(command for command in training if command.line == main)


def _check_repeated(
    arguments: Mapping[str, Any], last: Mapping[str, Any], line: int, path: Path, overridden: Collection[str]
) -> None:
    """Raise InputError if a command of a loop or function trains with other arguments than at its last time."""
    names = (name for name in {**last, **arguments} if last.get(name) != arguments.get(name) and name not in overridden)
    changed = [name for name in names if not is_harmless(name, arguments.get(name), "")]
    if changed:
        values = " and ".join(str(command.get(changed[0], "none")) for command in (arguments, last))
        raise InputError(
            f"{path} starts several trainings (line {line}, with {changed[0]} {values}): give the arguments of the one"
            f" that is meant, as in --args '{' '.join(f'{name} N' for name in changed)}', or a copy with it alone."
        )


def _trains(words: Sequence[str]) -> bool:
    """Tell whether a command starts a training; ms-swift commands may have arguments in a file, or only convert."""
    swift = swift_command(words)
    return (
        bool(TRAINING_ARGUMENTS & _names(words) or swift in ("megatron sft", "megatron pt"))
        and swift != "megatron export"
    )


def named_arguments(words: Iterable[str]) -> dict[str, Any]:
    """Argument name -> the words after its last occurrence; unknown variables that contain arguments are keys too."""
    arguments: dict[str, Any] = {}
    name: str | None = None
    for word in _split_words(words):
        if _is_name(word):
            name, _, value = word.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            arguments[name] = (value,) if value else ()
        elif _UNKNOWN_WORD.fullmatch(word) and (name is None or arguments[name] or _ARGUMENT_VARIABLES.search(word)):
            arguments[word] = ()
        elif name is not None:
            arguments[name] += (word,)
        if word.endswith(".py") and _names_models(Path(word).stem):
            arguments[SCRIPT] = (word,)
    return {name: _unpacked(values) for name, values in arguments.items()}


def _names_models(name: str) -> bool:
    """Tell whether a training script's name identifies its models beyond being GPTs."""
    return is_other_script(name) or is_family_script(name)


def _split_words(words: Iterable[str]) -> Iterable[str]:
    """The words, with words that contain an option name and blanks split at the blanks."""
    for word in words:
        yield from word.split() if word.lstrip().startswith("--") and re.search(r"\s", word) else (word,)


def _names(words: Sequence[str]) -> set[str]:
    return {f"--{w[2:].replace('_', '-').partition('=')[0]}" for w in _split_words(words) if _is_name(w)}


def _is_name(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _unpacked(values: tuple[str, ...]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values
