"""The rules of the kernel's devices: memory, messages, and the objective, however their lists are walked.

Admission is static: the rules are those of ir/lowering/admission.py, and know no times.
"""

from __future__ import annotations

from debubble.kernels import borrowing, inlined
from debubble.search.annealing.layout import ROW, B, Floats, Ints, KernelLayout, W


@inlined
def freed_by(a: KernelLayout, x: Floats, n: Ints, offload: int) -> float:
    """Bytes that an offload frees at its end."""
    freed: float = x[a.freed + n[a.facts + 4 * offload + ROW]]
    return freed


@inlined
def admit_compute(a: KernelLayout, x: Floats, n: Ints, d: int, reserved: float, most: float) -> tuple[float, int]:
    """(what is reserved, the last offload to wait for or -1) once as many have ended that no more than `most` is."""
    waited = -1
    while reserved > most and n[a.oldest + d] < n[a.newest + d]:
        waited = n[a.queue + d * a.queued + n[a.oldest + d]]
        freed = freed_by(a, x, n, waited)
        reserved -= freed
        if n[a.known + d] > n[a.oldest + d]:
            x[a.accounted + d] -= freed
        n[a.oldest + d] += 1
    return reserved, waited


@inlined
def admit_reload(a: KernelLayout, x: Floats, n: Ints, d: int, needed: float) -> tuple[float, int]:
    """(what is still needed, the last offload to wait for or -1) where memory lacks `needed` for a reload.

    It may count on what earlier reloads waited for.
    """
    if n[a.known + d] < n[a.oldest + d]:
        n[a.known + d] = n[a.oldest + d]
    needed -= x[a.accounted + d]
    waited = -1
    while needed > 0 and n[a.known + d] < n[a.newest + d]:
        waited = n[a.queue + d * a.queued + n[a.known + d]]
        freed = freed_by(a, x, n, waited)
        needed -= freed
        x[a.accounted + d] += freed
        n[a.known + d] += 1
    return needed, waited


@inlined
def neighbour(a: KernelLayout, op: int) -> int:
    """The stage that uses the result of a forward or a backward; itself if none does."""
    m = a.micro_batches
    size = a.stages * m
    stage = op % size // m
    if op < size:
        return min(stage + 1, a.stages - 1)
    return max(stage - 1, 0)


@inlined
def sent(a: KernelLayout, x: Floats, n: Ints, d: int, op: int, free: float, message: float) -> float:
    """Send the message behind an operation, after the one before it on an exclusive link; return when it arrives."""
    if message < 0 or not a.exclusive:
        return free + max(message, 0.0)
    link = a.link + d * a.devices + n[a.device_of + neighbour(a, op)]
    arrival: float = max(free, x[link]) + message
    x[link] = arrival
    return arrival


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
