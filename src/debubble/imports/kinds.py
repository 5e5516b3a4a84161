"""The kinds of values that entries of a configuration have: whole numbers, switches, words, and lists of them.

A value of another kind is none of what a framework's code expects, whatever Python makes of it: "yes" is true, and so
is "no".  Some parsers convert words, as pydantic's do, and are followed in the entries that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_TRUE, _FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
"""The words, in small letters, that pydantic reads as true and as false."""


@dataclass(frozen=True)
class ValueKind(Generic[T]):
    """One kind of values.

    Attributes:
        other: Words on a value of another kind, such as `no whole number`.
        read: A value as one of this kind; None: it is of another.
        convert: What a parser that converts makes of a value, where that is more than `read`.
    """

    other: str
    read: Callable[[Any], T | None]
    convert: Callable[[Any], T | None] | None = None

    def of(self, value: Any, *, converts: bool) -> T | None:
        """A value as one of this kind, or None.

        Args:
            value: As the file has it.
            converts: Whether the framework's parser converts words.
        """
        return self.convert(value) if converts and self.convert is not None else self.read(value)


def shown(value: Any) -> str:
    """A value as files have it: null, true and false in place of Python's own words."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def meant(word: object, names: Collection[str]) -> str:
    """Words that ask whether one of these names is meant; none if none is near."""
    folded = {name.lower(): name for name in names}
    near = get_close_matches(str(word).lower(), folded, 1)
    return f" (did you mean {folded[near[0]]}?)" if near else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _converted_whole(value: Any) -> int | None:
    if isinstance(value, int):
        return int(value)
    number = _converted_number(value)
    return int(number) if number is not None and number.is_integer() else None


def _number(value: Any) -> float | None:
    return None if isinstance(value, bool | str) else _converted_number(value)


def _converted_number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _converted_switch(value: Any) -> bool | None:
    word = str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _list_of(kind: Callable[[Any], T | None]) -> Callable[[Any], list[T] | None]:
    def read(value: Any) -> list[T] | None:
        items = [kind(each) for each in value] if isinstance(value, list | tuple) else [None]
        found = [each for each in items if each is not None]
        return found if len(found) == len(items) else None

    return read


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


WHOLE = ValueKind("no whole number", _whole, _converted_whole)
NUMBER = ValueKind("no number", _number, _converted_number)
SWITCH = ValueKind("neither true nor false", _switch, _converted_switch)
WORD = ValueKind("no word", _word)
WHOLES = ValueKind("no list of whole numbers", _list_of(_whole))
WORDS = ValueKind("no list of words", _list_of(_word))
STAGES = ValueKind("no list of lists of names", _list_of(_list_of(_word)))
