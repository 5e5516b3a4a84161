"""The cost of other values of every degree, such as tensor 4 where the plan has tensor 2.

The cost of a value is the step of the best plan that has it, or, if a pruned choice may be faster, the smallest bound
of the pruned choices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from debubble.ir.degrees import Degrees, DegreeValue

SHOWN_DEGREES = ("pipeline", "tensor", "context", "expert", "zero", "micro_batch_size")
"""Degrees whose values are compared; the data-parallel degree follows from the others."""


def other_values(
    best: Degrees,
    legal: Sequence[Degrees],
    *,
    steps: Mapping[Degrees, float],
    bounds: Mapping[Degrees, float],
    too_large: Collection[Degrees],
) -> tuple[DegreeValue, ...]:
    """The cost of every other legal value of every degree.

    Args:
        best: The recommended choice, whose values are omitted.
        legal: All legal choices.
        steps: Seconds of the best plan of each choice that was planned and fits.
        bounds: Lower bound in seconds on the quick plans of each pruned choice.
        too_large: Choices that no plan can fit.
    """

    def cost_of(degree: str, value: int) -> DegreeValue:
        choices = [choice for choice in legal if getattr(choice, degree) == value]
        step = min(steps.get(choice, math.inf) for choice in choices)
        bound = min((bounds.get(choice, math.inf) for choice in choices if choice not in steps), default=math.inf)
        known, pruned = step < math.inf and step <= bound, bound < step
        return DegreeValue(
            degree=degree, value=value, step_time=step if known else None, lower_bound=bound if pruned else None,
            too_large=all(choice in too_large for choice in choices),
        )  # fmt: skip

    return tuple(
        cost_of(degree, value)
        for degree in SHOWN_DEGREES
        for value in sorted({getattr(choice, degree) for choice in legal} - {getattr(best, degree)})
    )
