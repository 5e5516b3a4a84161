"""The rules of the kernel's devices: memory, messages, and the objective, however their lists are followed.

Admission is static: the rules are those of ir/lowering/admission.py, and know no times.
"""

from __future__ import annotations

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined
from debubble.search.annealing.layout import ROW, B, KernelLayout, W

INFINITY = np.inf


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
    """Send the message after an operation, after the one before it on an exclusive link; return when it arrives."""
    if message < 0 or not a.exclusive:
        return free + max(message, 0.0)
    link = a.link + d * a.devices + n[a.device_of + neighbour(a, op)]
    arrival: float = max(free, x[link]) + message
    x[link] = arrival
    return arrival


@borrowing
def step_on_hosts(a: KernelLayout, x: Floats, n: Ints) -> None:
    """Time the steps on hosts, once everything else is timed.

    A stage's gradients leave after its last weight gradient and, as transfers do, ask for the link one after the other
    on each device; they take it by arrival.  A device's host steps one stage at a time.
    """
    for d in range(a.devices):
        lane = a.transfer + n[a.lane + d]
        own = n[a.previous + 3 * d + 1] if a.by_arrival else n[lane]
        x[a.gone + d] = x[a.end + own] if own >= 0 else 0.0
        n[a.gone_why + d] = own
        x[a.link_gone + n[a.lane + d]] = x[a.end + n[lane]] if n[lane] >= 0 else 0.0
        n[a.link_why + n[a.lane + d]] = n[lane]
        x[a.host_free + d], n[a.host_why + d] = 0.0, -1
    for stage in range(a.stages):
        x[a.stepped + stage] = -1.0
    while True:
        stage, ready, why = _next_gradients(a, x, n)
        if stage < 0:
            return
        d = n[a.device_of + stage]
        link = n[a.lane + d]
        if x[a.link_gone + link] > ready:
            ready, why = x[a.link_gone + link], n[a.link_why + link]
        gone = ready + x[a.gradients + stage]
        x[a.gone + d] = x[a.link_gone + link] = gone
        n[a.gone_why + d] = n[a.link_why + link] = why
        if x[a.host_free + d] > gone:
            gone, why = x[a.host_free + d], n[a.host_why + d]
        x[a.stepped + stage] = x[a.host_free + d] = gone + x[a.host_step + stage]
        n[a.stepped_why + stage] = n[a.host_why + d] = why


@inlined
def _next_gradients(a: KernelLayout, x: Floats, n: Ints) -> tuple[int, float, int]:
    """The stage whose gradients ask for a link next, when, and the operation that this hangs on; -1 if all have gone.

    A device's go in the order of its list; of two that ask at once the device that comes first has its turn first.
    """
    first, least, hangs_on, first_device, first_end = -1, INFINITY, -1, -1, INFINITY
    m, size = a.micro_batches, a.stages * a.micro_batches
    for stage in range(a.stages):
        if x[a.after_weights + stage] <= 0 or x[a.stepped + stage] >= 0:
            continue
        d, why = n[a.device_of + stage], W * size + stage * m + m - 1
        if x[a.end + why] < 0:
            why += (B - W) * size
        ready = end = x[a.end + why]
        if x[a.gone + d] > ready:
            ready, why = x[a.gone + d], n[a.gone_why + d]
        later_end = d == first_device and end > first_end
        if ready > least or (ready == least and (d > first_device or later_end)):
            continue
        first, least, hangs_on, first_device, first_end = stage, ready, why, d, end
    return first, least, hangs_on


@borrowing
def last_of(a: KernelLayout, x: Floats, n: Ints, d: int) -> tuple[float, int]:
    """A device's part in the objective, and the operation that it hangs on.

    That is the last one, from the first one's start on where the span counts; or what a step on the host hangs on.
    """
    length, last = x[a.free + d], n[a.compute + d]
    if a.span:
        return length - x[a.first + d], last
    if a.hosted:
        for stage in range(a.stages):
            if n[a.device_of + stage] == d and x[a.stepped + stage] > length:
                length, last = x[a.stepped + stage], n[a.stepped_why + stage]
    return length, last


@borrowing
def longest(a: KernelLayout, x: Floats, n: Ints) -> float:
    """The objective, once everything is timed."""
    if a.hosted:
        step_on_hosts(a, x, n)
    result = 0.0
    for d in range(a.devices):
        result = max(result, last_of(a, x, n, d)[0])
    return result
