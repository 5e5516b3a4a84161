"""What the ranks add up over a step before its gradients may be used: their squared norm, and the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True)
class Tally:
    """Sums over some devices.  An inf or NaN in any gradient makes `squares` one."""

    squares: float = 0.0
    """Sum of the squares of all gradients, in double precision."""
    loss: float = 0.0
    ahead: int = 0
    """Devices that have stepped before the sums were whole."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.squares + other.squares, self.loss + other.loss, self.ahead + other.ahead)

    @staticmethod
    def of(tallies: Iterable[Tally]) -> Tally:
        """The sum, from left to right: in the same order it is the same to the bit."""
        return reduce(Tally.__add__, tallies, Tally())

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def finite(self) -> bool:
        """Whether no gradient has an inf or NaN."""
        return math.isfinite(self.squares)

    def scale(self, max_norm: float) -> float:
        """What gradients are multiplied by, as in torch's `clip_grad_norm_`: 1 if their norm is small enough.

        It only falls as more devices are added.  With an inf or NaN there is nothing to multiply.
        """
        return min(1.0, max_norm / (self.norm + 1e-6)) if self.finite else 1.0

    def harmless(self, max_norm: float) -> bool:
        """Whether gradients may be used as they are, for all that is known."""
        return self.finite and self.scale(max_norm) == 1.0
