"""Types of configuration values: integers, numbers, booleans, strings, and lists of them.

Values of another type are rejected rather than coerced as Python would: bool("no") is true.  Where a framework's parser
converts strings, as pydantic does, its conversion is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_TRUE, _FALSE = ("true", "yes", "on", "t", "y", "1"), ("false", "no", "off", "f", "n", "0")
"""The lower-case strings that pydantic converts to true and to false."""


@dataclass(frozen=True)
class ValueKind(Generic[T]):
    """A type of values.

    Attributes:
        other: Description of a value of another type, such as `no whole number`.
        read: Returns a value of this type, None for another.
        convert: Like `read`, with the conversions of pydantic; None: there are none.
    """

    other: str
    read: Callable[[Any], T | None]
    convert: Callable[[Any], T | None] | None = None

    def parse(self, value: Any, *, converts: bool) -> T | None:
        """The value as this type, or None.

        Args:
            value: The value in the file.
            converts: Whether the framework's parser converts strings.
        """
        return self.convert(value) if converts and self.convert is not None else self.read(value)


def as_yaml(value: Any) -> str:
    """A value as written in YAML: null, true and false in place of Python's None, True and False."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def suggest(word: object, names: Collection[str]) -> str:
    """A `(did you mean NAME?)` for the nearest of the names; empty if none is near."""
    folded = {name.lower(): name for name in names}
    near = get_close_matches(str(word).lower(), folded, 1)
    return f" (did you mean {folded[near[0]]}?)" if near else ""


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _converted_integer(value: Any) -> int | None:
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


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _converted_boolean(value: Any) -> bool | None:
    word = str(int(value) if isinstance(value, float) and value.is_integer() else value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _list_of(kind: Callable[[Any], T | None]) -> Callable[[Any], list[T] | None]:
    def read(value: Any) -> list[T] | None:
        items = [kind(item) for item in value] if isinstance(value, list | tuple) else [None]
        matching = [item for item in items if item is not None]
        return matching if len(matching) == len(items) else None

    return read


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


INTEGER = ValueKind("no whole number", _integer, _converted_integer)
NUMBER = ValueKind("no number", _number, _converted_number)
BOOLEAN = ValueKind("neither true nor false", _boolean, _converted_boolean)
STRING = ValueKind("no word", _string)
INTEGERS = ValueKind("no list of whole numbers", _list_of(_integer))
STRINGS = ValueKind("no list of words", _list_of(_string))
STAGES = ValueKind("no list of lists of names", _list_of(_list_of(_string)))
