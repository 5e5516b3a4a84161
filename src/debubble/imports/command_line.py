"""The command line that a job is started with, as its user gives it with `--args`.

Variables of the environment come first, as in a shell, then a script's own arguments.  Settings that the file leaves
out, or that the user changes, are arguments too: `--args 'TP=4 PP=8 --vocab-size 128256'`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from debubble.ir import InputError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-?([^{}]*))?\}|([A-Za-z_]\w*))")


@dataclass(frozen=True)
class CommandLine:
    """The variables of the environment, and the words after them."""

    variables: Mapping[str, str]
    words: tuple[str, ...] = ()

    @staticmethod
    def of(text: str | None) -> CommandLine:
        """Parse the words that a user gives; raises InputError if a quotation in them does not end."""
        try:
            words = shlex.split(text or "")
        except ValueError as error:
            raise InputError(f"--args is no command line: {error}.") from error
        variables: dict[str, str] = {}
        while words and (given := _ASSIGNMENT.fullmatch(words[0])) is not None:
            variables[given[1]] = given[2]
            words = words[1:]
        return CommandLine(variables, tuple(words))

    def changed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with the values of variables, and of arguments such as `--training.seq_len 4096`."""
        filled = {name: self.filled(value) for name, value in settings.items()}
        return {**filled, **{name: _value(value) for name, value in self._named().items()}}

    def filled(self, value: Any) -> Any:
        """A value in which variables such as `${PP:4}` have theirs, or what is taken where nobody sets them."""
        if isinstance(value, list):
            return [self.filled(each) for each in value]
        if not isinstance(value, str) or "$" not in value:
            return value
        text = _VARIABLE.sub(self._value_of, value)
        return _value(text) if text != value and _VARIABLE.fullmatch(value) else text

    def _value_of(self, variable: re.Match[str]) -> str:
        value = self.variables.get(variable[1] or variable[3], variable[2])
        return variable[0] if value is None else value

    def _named(self) -> dict[str, str]:
        named: dict[str, str] = {}
        name = ""
        for word in self.words:
            if word.startswith("--"):
                name, _, value = word.removeprefix("--").partition("=")
                named[name] = value or "true"
            elif name:
                named[name] = word
        return named


def how_to_give(unknown: str, names: Mapping[str, str]) -> str:
    """Words on how the command line gives something that a script does not tell.

    Args:
        unknown: Words with the variables that nobody set, such as `$TP` or `[ $2 = 7B ]`.
        names: Variable -> the number of the script's argument that it is set to.
    """
    variables = variables_in(unknown)
    if any(name.isdigit() or name in names for name in variables):
        last = max(map(int, names.values()), default=0)
        by_number = {int(number): name for name, number in names.items()}
        order = " ".join(by_number.get(number, f"${number}") for number in range(1, last + 1))
        return "give the script's arguments with --args" + (f", in this order: {order}" if order else " '1 8 ...'")
    return f"give it with --args '{variables[0] if variables else 'NAME'}=1'"


def variables_in(text: str) -> list[str]:
    """The variables and the arguments' numbers that words of a script have."""
    return list(_UNKNOWN.findall(_DECIDED.sub(r"\1", text)))


_DECIDED = re.compile(r"\$\(\w+: line \d+ decides by ([^()]*)\)")
"""What the reader of scripts makes of a variable that a condition on others sets."""
# A substituted command is no variable; `$(NAME: line 3 decides)` is what the reader makes of one.
_UNKNOWN = re.compile(r"\$(?:\((?=\w+: )|\{)?([A-Za-z_]\w*|\d+)")


def _value(text: str) -> Any:
    """Read a text as YAML; return it as it is where it is none, such as `[0]*1+[1]*3`."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
