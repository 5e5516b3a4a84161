"""What the other values of every degree would cost: the best choice of each value, as far as a search knows it.

A search answers which degrees are fastest; whoever asks why it is not tensor 4 wants the best choice with it.  Its step
is that of its best plan; where that of a choice that was pruned may be shorter, it is the least of their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from debubble.ir.degrees import Degrees, DegreeValue

SHOWN_DEGREES = ("pipeline", "tensor", "context", "expert", "zero", "micro_batch_size")
"""Degrees whose values are told apart; the number of replicas follows from the others."""


def other_values(
    best: Degrees,
    legal: Sequence[Degrees],
    *,
    steps: Mapping[Degrees, float],
    bounds: Mapping[Degrees, float],
    too_large: Collection[Degrees],
) -> tuple[DegreeValue, ...]:
    """The other legal values of every degree.

    Args:
        best: The choice whose values are left out.
        legal: All legal choices.
        steps: Seconds of the best plan of each choice that was planned and fits.
        bounds: Seconds that a quick plan of a choice takes at least, of those that were pruned.
        too_large: Choices that no plan can fit.
    """

    def of(degree: str, value: int) -> DegreeValue:
        choices = [each for each in legal if getattr(each, degree) == value]
        step = min(steps.get(each, math.inf) for each in choices)
        bound = min((bounds.get(each, math.inf) for each in choices if each not in steps), default=math.inf)
        known, pruned = step < math.inf and step <= bound, bound < step
        return DegreeValue(
            degree=degree, value=value, step_time=step if known else None, lower_bound=bound if pruned else None,
            too_large=all(each in too_large for each in choices),
        )  # fmt: skip

    return tuple(
        of(degree, value)
        for degree in SHOWN_DEGREES
        for value in sorted({getattr(each, degree) for each in legal} - {getattr(best, degree)})
    )
