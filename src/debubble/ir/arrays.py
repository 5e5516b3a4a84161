"""Arrays of numbers that stay exact, and lists of edges between instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]
"""An array of int64, of float64, or of Python's own numbers (fractions, and whole numbers too large for int64)."""

_LARGE = 2**62
"""Sums of absolute values below it can neither overflow int64 nor, times of a step, come near to it."""


class Edges(NamedTuple):
    """The waits of all instructions: instruction i has those at `first[i]` to `first[i + 1]` of the other arrays.

    Attributes:
        first: Where the waits of each instruction begin, and the count of all; one entry more than instructions.
        other: Per wait, the instruction that is waited for.
        moment: Per wait, the moment of the other that ends it: its place in MOMENTS.
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
        """The edges turned round: per instruction, those that wait for it."""
        return edges(len(self.first) - 1, self.other, self.after, self.moment)


def edges(count: int, after: Ints, other: Ints, moment: Ints) -> Edges:
    """The edges of `count` instructions; those of one instruction stay in the order given."""
    order = np.argsort(after, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(after, minlength=count))))
    return Edges(first, other[order], moment[order])


def entries(table: Numbers, at: Ints) -> Numbers:
    """`table.ravel()[at]`, as int64 or float64 if that is exact for these entries, else as Python's own numbers."""
    flat = table.ravel()
    used = np.zeros(len(flat), dtype=np.bool_)
    used[at] = True
    numbers = flat[used].tolist()
    kind = _dtype(numbers, len(at))
    if kind is object:
        taken: Numbers = flat[at]
        return taken
    compact: Numbers = np.zeros(len(flat), dtype=kind)
    compact[used] = numbers
    return compact[at]


def exact(numbers: Sequence[Any]) -> Numbers:
    """Numbers as an array, of int64 or float64 if that is exact, else of Python's own."""
    kind = _dtype(numbers, len(numbers))
    if kind is not object:
        return np.array(numbers, dtype=kind)
    result = np.empty(len(numbers), dtype=object)
    result[:] = numbers
    return result


def _dtype(numbers: Sequence[Any], count: int) -> type:
    """The type of `count` numbers out of these: whole numbers stay exact in sums, also next to floats."""
    types = {*map(type, numbers)}
    if types <= {float}:
        return float
    if not types <= {int, float}:
        return object
    largest = max(abs(number) for number in numbers if type(number) is int)
    if types == {int}:
        return np.int64 if largest * count < _LARGE else object
    return float if largest * count < 2**53 else object
