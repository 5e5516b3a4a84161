"""Evaluates conditions of shell scripts: `[ ]`, `test` and `[[ ]]`.  Source: Bash Reference Manual, section 6.4."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from debubble.imports.shell.words import ShellVariables, is_known, matches

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def holds(words: Sequence[str], variables: ShellVariables, *, patterns: bool) -> bool | None:
    """Tell whether a condition of `[ ]` or `[[ ]]` holds; None: it depends on unknown values."""
    for joint, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            index = words.index(joint)
            operands = (words[:index], words[index + 1 :])
            results = [holds(operand, variables, patterns=patterns) for operand in operands]
            return decisive if decisive in results else None if None in results else not decisive
    if words[:1] == ["!"]:
        inner = holds(words[1:], variables, patterns=patterns)
        return None if inner is None else not inner
    if words[:1] == ["("] and words[-1:] == [")"]:
        return holds(words[1:-1], variables, patterns=patterns)
    match list(words):
        case []:
            return False
        case [word]:
            return _is_filled(word, variables)
        case ["-z", word]:
            filled = _is_filled(word, variables)
            return None if filled is None else not filled
        case ["-n", word]:
            return _is_filled(word, variables)
        case ["-v", name]:
            return name in variables.values
        case [first, sign, second]:
            return _compared(first, sign, second, variables, patterns=patterns)
        case _:
            return None


def _is_filled(word: str, variables: ShellVariables) -> bool | None:
    """Tell whether a word is nonempty; a variable that the script does not set is empty."""
    text = variables.text_of(word)
    if is_known(text):
        return bool(text)
    return False if re.fullmatch(r"\$(\w+|\{\w+\})", text) else None


def _text_of(word: str, variables: ShellVariables) -> str:
    """The text of a word; variables of options that the script was not given are empty."""
    name = re.fullmatch(r"\"?\$\{?(\w+)\}?\"?", word)
    return "" if name is not None and name[1] in variables.not_given else variables.text_of(word)


def _compared(first: str, sign: str, second: str, variables: ShellVariables, *, patterns: bool) -> bool | None:
    """The result of a comparison; None: an operand is unknown."""
    first_text, second_text = (_text_of(word, variables) for word in (first, second))
    if sign in ("=", "==", "!=") and "" in (first_text, second_text):
        filled = _is_filled(first if second_text == "" else second, variables)
        return None if filled is None else filled == (sign == "!=")
    if not (is_known(first_text) and is_known(second_text)):
        return None
    if sign in ("=", "==", "!="):
        as_pattern = patterns and not re.search("['\"]", second)
        same = fnmatchcase(first_text, second_text) if as_pattern else first_text == second_text
        return same if sign != "!=" else not same
    if sign == "=~":
        return matches(second_text, first_text)
    numbers = variables.sum_of(first_text), variables.sum_of(second_text)
    if sign not in _COMPARISONS or numbers[0] is None or numbers[1] is None:
        return None
    return _COMPARISONS[sign](numbers[0], numbers[1])
