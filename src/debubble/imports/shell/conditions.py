"""Conditions of a shell script: `[ ]`, `test` and `[[ ]]`.  Source: the Bash Reference Manual, section 6.4."""

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
    """Tell whether a condition of `[ ]` or `[[ ]]` holds; None: the file does not tell."""
    for joint, either in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            at = words.index(joint)
            first, second = (holds(part, variables, patterns=patterns) for part in (words[:at], words[at + 1 :]))
            if either in (first, second):
                return either
            return None if None in (first, second) else not either
    if words[:1] == ["!"]:
        inner = holds(words[1:], variables, patterns=patterns)
        return None if inner is None else not inner
    if words[:1] == ["("] and words[-1:] == [")"]:
        return holds(words[1:-1], variables, patterns=patterns)
    match list(words):
        case []:
            return False
        case [one]:
            return _is_filled(one, variables)
        case ["-z", one]:
            filled = _is_filled(one, variables)
            return None if filled is None else not filled
        case ["-n", one]:
            return _is_filled(one, variables)
        case ["-v", name]:
            return name in variables.values
        case [left, sign, right]:
            return _compared(left, sign, right, variables, patterns=patterns)
        case _:
            return None


def _is_filled(word: str, variables: ShellVariables) -> bool | None:
    """Tell whether a word has letters; a variable that the script does not set has none."""
    text = variables.text_of(word)
    if is_known(text):
        return bool(text)
    return False if re.fullmatch(r"\$(\w+|\{\w+\})", text) else None


def _text_of(word: str, variables: ShellVariables) -> str:
    """The text of a word; that of an option which the script was not given is empty."""
    name = re.fullmatch(r"\"?\$\{?(\w+)\}?\"?", word)
    return "" if name is not None and name[1] in variables.not_given else variables.text_of(word)


def _compared(left: str, sign: str, right: str, variables: ShellVariables, *, patterns: bool) -> bool | None:
    first, second = (_text_of(word, variables) for word in (left, right))
    if sign in ("=", "==", "!=") and "" in (first, second):
        filled = _is_filled(left if second == "" else right, variables)
        return None if filled is None else filled == (sign == "!=")
    if not (is_known(first) and is_known(second)):
        return None
    if sign in ("=", "==", "!="):
        same = fnmatchcase(first, second) if patterns and not re.search("['\"]", right) else first == second
        return same if sign != "!=" else not same
    if sign == "=~":
        return matches(second, first)
    numbers = variables.sum_of(first), variables.sum_of(second)
    if sign not in _COMPARISONS or numbers[0] is None or numbers[1] is None:
        return None
    return _COMPARISONS[sign](numbers[0], numbers[1])
