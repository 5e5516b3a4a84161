"""The learning rate of each step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, floor: float = 0.1) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then a cosine down to `floor` x peak at the last of `steps`.

    Steps count from 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
