"""Whether a switch has made steps faster: medians, and how far they would differ by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TOLERANCE = 0.01
"""Share of a step by which two measurements of the same schedule may differ however quiet the machine is."""
CONFIDENCE = 2.0
"""Standard errors beyond which a difference is no chance."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Seconds per step before and after a switch."""

    before: float
    after: float
    noise: float
    """Seconds by which the two would differ by chance."""

    @property
    def gain(self) -> float:
        """Share of a step that was saved; negative if it takes longer."""
        return 1 - self.after / self.before

    @property
    def worse(self) -> bool:
        """Whether steps take longer, by more than chance."""
        return self.after - self.before > max(self.noise, TOLERANCE * self.before)


def effect(before: Sequence[float], after: Sequence[float]) -> Effect:
    """Compare the seconds of some steps before a switch with those of some steps after it.

    A few slow steps (another process, a checkpoint) move neither medians nor their spread.
    """
    return Effect(
        before=median(before),
        after=median(after),
        noise=CONFIDENCE * math.hypot(standard_error(before), standard_error(after)),
    )


def standard_error(values: Sequence[float]) -> float:
    """Of the median, from the median deviation, as of a normal distribution."""
    middle = median(values)
    sigma = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * sigma / math.sqrt(len(values))
