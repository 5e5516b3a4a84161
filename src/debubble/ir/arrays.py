"""Arrays of numbers with exact sums, and the edges between instructions as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]
"""An array of int64, of float64, or of Python objects (fractions, and integers too large for int64)."""

_INT64_SUM_LIMIT = 2**62
"""Numbers whose absolute values add up to less are stored as int64, in which sums cannot overflow."""


class Edges(NamedTuple):
    """The waits of all instructions in CSR form: those of instruction i are at `first[i]` to `first[i + 1]`.

    Attributes:
        first: Index of each instruction's first wait, and the number of all waits at the end.
        other: Per wait, the instruction that is waited for.
        moment: Per wait, the moment of the other instruction that ends it, as an index in MOMENTS.
    """

    first: Ints
    other: Ints
    moment: Ints

    @property
    def after(self) -> Ints:
        """The waiting instruction of each edge."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def reversed(self) -> Edges:
        """The edges in reverse: per instruction, those that wait for it."""
        return edges(len(self.first) - 1, self.other, self.after, self.moment)


def edges(count: int, after: Ints, other: Ints, moment: Ints) -> Edges:
    """The edges of `count` instructions; those of one instruction keep their order."""
    order = np.argsort(after, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(after, minlength=count))))
    return Edges(first, other[order], moment[order])


def entries(table: Numbers, indices: Ints) -> Numbers:
    """`table.ravel()[indices]`, as int64 or float64 if that is exact for these entries, else as Python objects."""
    flat = table.ravel()
    used = np.zeros(len(flat), dtype=np.bool_)
    used[indices] = True
    numbers = flat[used].tolist()
    dtype = _dtype(numbers, len(indices))
    if dtype is object:
        objects: Numbers = flat[indices]
        return objects
    compact: Numbers = np.zeros(len(flat), dtype=dtype)
    compact[used] = numbers
    return compact[indices]


def exact(numbers: Sequence[Any]) -> Numbers:
    """Numbers as an array, of int64 or float64 if that is exact, else of Python objects."""
    dtype = _dtype(numbers, len(numbers))
    if dtype is not object:
        return np.array(numbers, dtype=dtype)
    result = np.empty(len(numbers), dtype=object)
    result[:] = numbers
    return result


def _dtype(numbers: Sequence[Any], count: int) -> type:
    """The dtype for `count` numbers out of these in which sums of integers stay exact, also together with floats."""
    types = {*map(type, numbers)}
    if types <= {float}:
        return float
    if not types <= {int, float}:
        return object
    largest = max(abs(number) for number in numbers if type(number) is int)
    if types == {int}:
        return np.int64 if largest * count < _INT64_SUM_LIMIT else object
    return float if largest * count < 2**53 else object
