"""The words of a shell script, which is read and never run.

Variables that the script sets, and sums of them, are put in; whatever else the shell would work out stays as it is
written.  Conditions are taken to hold.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from debubble.ir import InputError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_ARRAY = re.compile(r"(\b[A-Za-z_]\w*\+?=\()(?=[^\s(])")
"""The beginning of an array whose first word follows at once."""
_REDIRECTION = re.compile(r"(?<!\S)[\d&]?>>?\s*(&\d|[^\s;|&]+)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")


def script_words(text: str, path: Path) -> list[str]:
    """The words of a script, with its variables and `;` for ends of lines.

    A value that is several arguments in quotes becomes these.

    Raises:
        InputError: If a quotation is not closed.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    lines = _REDIRECTION.sub(" ", text.replace("\\\n", " ")).replace("\n", "\n ; ")
    whole_sums = _ARITHMETIC.sub(lambda match: "".join(match[0].split()), lines)
    for word in _split(_ARRAY.sub(r"\1 ", whole_sums), path, punctuation=";|&"):
        assigned = _ASSIGNED.fullmatch(word)
        value = _with_values(assigned[2] if assigned else word, variables)
        if assigned is None:
            last_of_array = value.endswith(")") and value != ")" and "(" not in value
            words += [value[:-1], ")"] if last_of_array else [value]
        elif re.search(r"(^|\s)--\w", value):
            words += [";", *_split(value, path), ";"]
        else:
            variables[assigned[1]] = value
            words.append(";")
    return words


def _split(text: str, path: Path, *, punctuation: str = "") -> list[str]:
    """The words of a text; punctuation outside of quotes is a word of its own."""
    words = shlex.shlex(text, posix=True, punctuation_chars=punctuation)
    words.whitespace_split = True
    try:
        return list(words)
    except ValueError as error:
        raise InputError(f"{path} cannot be read as a shell script: {error}.") from error


def _with_values(word: str, variables: Mapping[str, str]) -> str:
    """The word with the variables and sums that are known."""

    def value_of_sum(match: re.Match[str]) -> str:
        known = _NAME.sub(lambda name: variables.get(name[1], name[0]), match[1])
        try:
            return str(_number(ast.parse(known, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    summed = _ARITHMETIC.sub(value_of_sum, word)
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), summed)


def _number(expression: ast.expr) -> int:
    """The value of a sum, product or quotient of whole numbers; raises ValueError if it is none."""
    match expression:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_number(left), _number(right))
        case _:
            raise ValueError


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
