"""Memory as precedence, where nothing is moved or recomputed: which backwards each forward has to wait for.

Micro-batches that are alike may keep their order within every kind (an exchange argument: give the names anew in the
order of the starts).  What a device with one stage holds when its forward j starts is then j + 1 activations less what
its first `a` backwards for inputs and its first `b` ones for weights have freed, b <= a <= j: the forward waits for one
of a few minimal pairs (a, b).  The pairs are the corners of a staircase; where W frees everything there is one, b = j +
1 - limit, and where I does there is one, a = j + 1 - limit.

A solver reasons far better with "after this backward or after that one" than with areas under a limit: p = 8, m = 32
without offload is proven in seconds.
"""

from __future__ import annotations

import math

from debubble.ir import Number


def staircase(*, room: Number, kept: Number, input_frees: Number, weight_frees: Number, forwards: int) -> list[Pairs]:
    """For each of so many forwards, the minimal (a, b); none for one that never fits.

    `room`: bytes for activations; `kept`: what a forward adds; the other two: what an I and a W take away at their end.
    """
    return [_corners(kept * (j + 1) - room, input_frees, weight_frees, j) for j in range(forwards)]


Pairs = list[tuple[int, int]]


def _corners(excess: Number, input_frees: Number, weight_frees: Number, finished: int) -> Pairs:
    """The minimal (a, b), b <= a <= finished, that free `excess` bytes."""
    corners: Pairs = []
    for a in range(finished + 1):
        b = _least(excess - a * input_frees, weight_frees)
        if b <= a and (not corners or b < corners[-1][1]):
            corners.append((a, int(b)))
        if b == 0:
            break
    return corners


def _least(excess: Number, each: Number) -> float:
    """How often `each` must be freed."""
    if excess <= 0:
        return 0
    return math.ceil(excess / each - 1e-9) if each else math.inf
