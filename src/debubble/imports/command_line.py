"""The command line that starts a job, as its user gives it with `--args`.

Environment variables come first, as in a shell, then the script's arguments.  Settings that the file lacks or that the
user overrides are also given as arguments: `--args 'TP=4 PP=8 --vocab-size 128256'`.
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
    """The environment variables and the arguments after them."""

    variables: Mapping[str, str]
    words: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str | None) -> CommandLine:
        """Parse the user's text; raises InputError if a quotation in it is not closed."""
        try:
            words = shlex.split(text or "")
        except ValueError as error:
            raise InputError(f"--args is no command line: {error}.") from error
        variables: dict[str, str] = {}
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0])) is not None:
            variables[assignment[1]] = assignment[2]
            words = words[1:]
        return CommandLine(variables, tuple(words))

    def override(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Expand variables in settings, and override settings by arguments such as `--training.seq_len 4096`."""
        expanded = {name: self.expand(value) for name, value in settings.items()}
        return {**expanded, **{name: _value(value) for name, value in self._named().items()}}

    def expand(self, value: Any) -> Any:
        """Replace variables such as `${PP:4}` in a value by their values, or by their defaults if they are unset."""
        if isinstance(value, list):
            return [self.expand(item) for item in value]
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


def args_hint(unknown: str, names: Mapping[str, str]) -> str:
    """Advice on how to give a value that the script does not set with `--args`.

    Args:
        unknown: Text with the unset variables, such as `$TP` or `[ $2 = 7B ]`.
        names: Variable -> position of the script argument that it is set to.
    """
    variables = variables_in(unknown)
    if any(name.isdigit() or name in names for name in variables):
        last = max(map(int, names.values()), default=0)
        by_number = {int(number): name for name, number in names.items()}
        order = " ".join(by_number.get(number, f"${number}") for number in range(1, last + 1))
        return "give the script's arguments with --args" + (f", in this order: {order}" if order else " '1 8 ...'")
    return f"give it with --args '{variables[0] if variables else 'NAME'}=1'"


def variables_in(text: str) -> list[str]:
    """The names of variables, and positions of arguments, in a text of a script."""
    return list(_UNKNOWN.findall(_DECIDED.sub(r"\1", text)))


_DECIDED = re.compile(r"\$\(\w+: line \d+ decides by ([^()]*)\)")
"""The placeholder of the script reader for a variable that is set depending on other, unknown variables."""
# `$(NAME: line 3 decides)` is a placeholder for a variable; other `$(...)` are command substitutions.
_UNKNOWN = re.compile(r"\$(?:\((?=\w+: )|\{)?([A-Za-z_]\w*|\d+)")


def _value(text: str) -> Any:
    """Parse a text as YAML; return it unchanged if it is not YAML, such as `[0]*1+[1]*3`."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return text
