"""The horizontal axis of a sweep's pictures: positions and labels of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from debubble.costs.devices.cluster import parse_size
from debubble.planners.sweep import Sweep


def axis_places(sweep: Sweep) -> list[float]:
    """Positions of the values on the axis, 0 to 1: to scale if they are numbers, else evenly spaced.

    The scale is logarithmic if all ratios of values are powers of two.
    """
    numbers = _numbers(sweep) or [float(place) for place in range(len(sweep.points))]
    if min(numbers) > 0:
        logs = [math.log2(number) for number in numbers]
        if all(math.isclose(log - logs[0], round(log - logs[0]), abs_tol=1e-9) for log in logs):
            numbers = logs
    low = min(numbers)
    span = max(numbers) - low or 1.0
    return [(number - low) / span for number in numbers]


def axis_labels(sweep: Sweep, xs: Sequence[float], *, letter_width: float) -> list[str]:
    """The values as labels at these positions; empty where one would overlap the label to its left.

    Args:
        sweep: The sweep.
        xs: Positions of its values.
        letter_width: Largest width of a letter, in the unit of the positions.
    """
    words = [str(point.value) for point in sweep.points]
    end, shown = -math.inf, [""] * len(xs)
    for x, place in sorted(zip(xs, range(len(xs)), strict=True)):
        half = letter_width * len(words[place]) / 2
        if x - half >= end:
            shown[place], end = words[place], x + half + letter_width
    return shown


def _numbers(sweep: Sweep) -> list[float] | None:
    """The values as numbers: sizes in bytes, clusters of one device type by count; None: they are not numeric."""
    values = [point.value for point in sweep.points]
    if sweep.over == "memory_limit":
        values = [parse_size(value) for value in values if value is not None]
    elif sweep.over == "cluster":
        counts = [re.fullmatch(r"(\d+)x([^+]+)", str(value)) for value in values]
        names = {None if count is None else count[2] for count in counts}
        values = [int(count[1]) for count in counts if count is not None and len(names) == 1]
    is_numeric = len(values) == len(sweep.points) and all(isinstance(value, int | float) for value in values)
    return [float(value) for value in values] if is_numeric and len({*values}) > 1 else None
