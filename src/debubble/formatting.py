"""Formatting of times, sizes and counts for people, and the version of answers for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from textwrap import TextWrapper

from debubble.errors import InputError, readable
from debubble.ir import Number

ANSWER_VERSION = 2
"""Version of the keys of all JSON answers: see `cli/answers.py`."""


def time_words(time: Number, *, seconds: bool) -> str:
    """A time in s, ms or µs; an abstract time as it is."""
    value = float(time)
    if not seconds:
        return f"{value:.6g}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def size_words(size: Number | None) -> str:
    """Bytes, or an abstract size; `-` for None."""
    return "-" if size is None else readable(float(size))


def percent(value: Number, total: Number, *, digits: int = 1) -> str:
    """A fraction as a percentage."""
    share = round(100 * float(value) / float(total), digits) + 0.0  # turns -0.0 into 0.0
    return f"{share:.{digits}f}%"


def mfu_words(mfu: float | None) -> str:
    """Model FLOPs utilization as a percentage; `-` if the devices' peak is not known."""
    return "-" if mfu is None else percent(mfu, 1)


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def wrapped(text: str, width: int) -> str:
    """Wrap every line of a text at a width; continuations of an indented line are indented further."""
    lines = text.split("\n")
    return "\n".join(_wrapper(width, " " * (len(line) - len(line.lstrip()))).fill(line) for line in lines)


def _wrapper(width: int, indent: str) -> TextWrapper:
    """The wrapper for a line with this indent."""
    further = indent and f"{indent}  "
    return TextWrapper(width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def cores_words(cores: int) -> str:
    """`1 core`, `2 cores`."""
    return f"{cores} core{'s' * (cores != 1)}"


def days_words(days: float) -> str:
    """Days, or hours if there are few: `12.5 days`, `3.3 hours`."""
    return f"{days:,.1f} days" if days >= MIN_DAYS else f"{24 * days:,.1f} hours"


MIN_DAYS = 2
"""Durations below this number of days are shown in hours."""


def read_count(text: str, name: str) -> float:
    """Parse a number such as `300B`, `1.5T` or `1e12`; `name` is the subject of the error message.

    Raises InputError if it is not a positive number.
    """
    number, scale = (text[:-1], SCALES[text[-1].upper()]) if text[-1:].upper() in SCALES else (text, 1.0)
    with suppress(ValueError):
        if 0 < (count := float(number) * scale) < math.inf:
            return count
    raise InputError(f"{name} must be a positive number, such as 300B, 1.5T or 1e12, not {text}.")


SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Suffix of a count -> its factor."""


def count_words(count: float) -> str:
    """A large number with three digits and a word: `20 billion`."""
    sizes = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
    size, word = next(((size, f" {word}") for size, word in sizes if count >= size), (1.0, ""))
    return f"{count / size:.3g}{word}"
