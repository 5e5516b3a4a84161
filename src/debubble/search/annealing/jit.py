"""The compiler of the search kernel: numba where it is installed, else plain Python running the same source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

C = TypeVar("C", bound=Callable[..., object])

try:
    from numba import njit as _njit
except ImportError:
    _njit = None  # type: ignore[assignment]


def jit(function: C) -> C:
    """Compile the function when it is first called, and keep the result on disk."""
    return function if _njit is None else cast("C", _njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: C) -> C:
    """The same, copied into its callers: passing a Layout takes longer than what a short function does."""
    if _njit is None:
        return function
    return cast("C", _njit(cache=True, nogil=True, error_model="numpy", inline="always")(function))
