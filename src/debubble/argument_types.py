"""Runtime checks of the argument types of public functions against their annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from itertools import zip_longest
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from debubble.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    Path: "a path",
    Mapping: "a mapping",
    Sequence: "a list",
    Callable: "a function",
}
"""Type -> its name in messages."""
_MAX_LETTERS = 60
"""Maximum length of a value that a message repeats."""


def with_checked_types(*, but: Sequence[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it checks the types of its arguments.

    Classes, unions and the origins of generic types are checked; other annotations accept everything.

    Args:
        but: Arguments that the function checks itself.

    Raises:
        InputError: In the decorated function, for an argument of a wrong type.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind in _POSITIONAL]
        variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            hints = _hints(function)
            for name, value in (*zip_longest(names[: len(args)], args, fillvalue=variadic), *kwargs.items()):
                if name in hints and name not in but:
                    check_type(name, value, hints[name])
            return function(*args, **kwargs)

        return checked

    return decorate


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@cache
def _hints(function: Callable[..., object]) -> Mapping[str, Any]:
    """The annotations of a function, resolved at its first call, when its module is complete."""
    return get_type_hints(function)


def check_type(name: str, value: object, hint: Any) -> None:
    """Raise InputError if an argument does not match an annotation."""
    options = _options(hint)
    if not any(_is_of(value, option) for option in options):
        *kinds, last = dict.fromkeys(_words(option) for option in options if option is not NoneType)
        words = f"{', '.join(kinds)} or {last}" if kinds else last
        raise InputError(f"{name} must be {words}, not {_shown(value)}.")


@cache
def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(option for member in get_args(hint) for option in _options(member))
    return (hint,)


def _is_of(value: object, hint: Any) -> bool:
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    origin = get_origin(hint) or hint
    return hint is Any or not isinstance(origin, type) or isinstance(value, origin)


def _words(hint: Any) -> str:
    origin = get_origin(hint) or hint
    name = str(getattr(origin, "__name__", origin))
    return _WORDS.get(origin) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _shown(value: object) -> str:
    """The value if it is short, else its type."""
    words = repr(value)
    plain = isinstance(value, str | int | float | NoneType) and len(words) <= _MAX_LETTERS
    return words if plain else f"a {type(value).__name__}"
