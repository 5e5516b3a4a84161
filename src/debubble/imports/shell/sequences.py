"""Brace expansion and the output of `seq`.  Source: Bash Reference Manual, section 3.5.1; seq(1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from debubble.imports.shell.syntax import end_of_quoted

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_MAX_ITEMS = 10_000
_NUMBER = re.compile(r"-?\d{1,9}")


def expanded_braces(word: str) -> list[str]:
    """The words of a word with braces such as `a{1..3}` or `{x,y}`; those in quotes and variables stay."""
    for begin in _unquoted(word, "{"):
        end = _closing(word, begin)
        items = _items(word[begin + 1 : end]) if end else []
        if items:
            middles = [expanded for item in items for expanded in expanded_braces(item)]
            endings = expanded_braces(word[end + 1 :])
            if len(middles) * len(endings) > _MAX_ITEMS:
                return [word]
            return [word[:begin] + middle + ending for middle in middles for ending in endings]
    return [word]


def counted(arguments: list[str]) -> list[str] | None:
    """The numbers that `seq` prints for its arguments; None: unknown, or not whole numbers."""
    if not 1 <= len(arguments) <= 3 or not all(map(_NUMBER.fullmatch, arguments)):
        return None
    first, *_, last = (1, *map(int, arguments)) if len(arguments) == 1 else tuple(map(int, arguments))
    return _numbers(first, last, int(arguments[1]) if len(arguments) == 3 else 1)


def _numbers(first: int, last: int, step: int) -> list[str] | None:
    if step == 0 or abs(last - first) // abs(step) > _MAX_ITEMS:
        return None
    return list(map(str, range(first, last + (1 if step > 0 else -1), step)))


def _items(text: str) -> list[str]:
    """The words for which braces with this text stand; empty if they stand for themselves."""
    if (match := _RANGE.fullmatch(text)) is not None:
        first, last = int(match[1]), int(match[2])
        step = abs(int(match[3] or 1)) or 1
        return _numbers(first, last, step if first <= last else -step) or []
    commas = list(_unquoted(text, ","))
    bounds = [-1, *commas, len(text)]
    return [text[begin + 1 : end] for begin, end in pairwise(bounds)] if commas else []


def _unquoted(word: str, sign: str) -> Iterator[int]:
    """The indices of a sign outside of quotes, expansions and, unless it opens them, inner braces."""
    pos = depth = 0
    while pos < len(word):
        if word[pos] == "\\":
            pos += 2
        elif word[pos] in "'\"`" or (word[pos] == "$" and word[pos + 1 : pos + 2] in ("(", "{")):
            pos = end_of_quoted(word, pos)
        else:
            if word[pos] == sign and (sign == "{" or depth == 0):
                yield pos
            depth += (word[pos] == "{") - (word[pos] == "}")
            pos += 1


def _closing(word: str, begin: int) -> int:
    """The index of the brace that closes the one at `begin`; 0: there is none."""
    return next((begin + 1 + end for end in _unquoted(word[begin + 1 :], "}")), 0)
