"""What the other values of every degree would cost: the best choice of each value, as far as a search knows it.

A search answers which degrees are fastest; whoever asks why it is not tensor 4 wants the best choice with it.  Its step
is that of its best plan; where that of a choice that was pruned may be shorter, it is the least of their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from debubble.ir.degrees import Degrees, DegreeValue

SHOWN_DEGREES = ("pipeline", "tensor", "context", "expert", "zero", "micro_batch_size")
"""Degrees whose values are told apart; the number of replicas follows from the others."""


def other_values(
    best: Degrees, legal: Sequence[Degrees], steps: Mapping[Degrees, float], bounds: Mapping[Degrees, float]
) -> tuple[DegreeValue, ...]:
    """The other legal values of every degree.

    Args:
        best: The choice whose values are left out.
        legal: All legal choices.
        steps: Seconds of the best plan of each choice that was planned and fits.
        bounds: Seconds that a quick plan of a choice takes at least, of those that were pruned.
    """
    return tuple(_values(best, legal, steps, bounds))


def _values(
    best: Degrees, legal: Sequence[Degrees], steps: Mapping[Degrees, float], bounds: Mapping[Degrees, float]
) -> Iterator[DegreeValue]:
    for degree in SHOWN_DEGREES:
        for value in sorted({getattr(each, degree) for each in legal} - {getattr(best, degree)}):
            choices = [each for each in legal if getattr(each, degree) == value]
            step = min(steps.get(each, math.inf) for each in choices)
            bound = min((bounds.get(each, math.inf) for each in choices if each not in steps), default=math.inf)
            known, least = step < math.inf and step <= bound, min(step, bound)
            yield DegreeValue(
                degree=degree,
                value=value,
                step_time=step if known else None,
                lower_bound=None if known or least == math.inf else least,
            )
