"""The objective of lists that are timed: the last end of all, host steps included, or the longest span."""

from __future__ import annotations

from debubble.kernels import borrowing
from debubble.search.annealing.layout import B, Floats, Ints, KernelLayout, W


@borrowing
def last_of(a: KernelLayout, x: Floats, n: Ints, d: int) -> tuple[float, int]:
    """A device's part in the objective, and the operation that it hangs on.

    That is the last one, from the first one's start on where the span counts; or the last weight gradient of a stage
    whose optimizer steps on the host.
    """
    length, last = x[a.free + d], n[a.compute + d]
    if a.span:
        return length - x[a.first + d], last
    if a.hosted:
        m, size = a.micro_batches, a.stages * a.micro_batches
        for stage in range(a.stages):
            if n[a.device_of + stage] == d and x[a.behind_weights + stage] > 0:
                op = W * size + stage * m + m - 1
                if x[a.end + op] < 0:
                    op += (B - W) * size
                stepped = x[a.end + op] + x[a.behind_weights + stage]
                if stepped > length:
                    length, last = stepped, op
    return length, last


@borrowing
def longest(a: KernelLayout, x: Floats, n: Ints) -> float:
    """The objective, once everything is timed."""
    result = 0.0
    for d in range(a.devices):
        result = max(result, last_of(a, x, n, d)[0])
    return result
