"""The kernel's rules for memory, messages and the objective, shared by all ways to follow the lists.

Admission is static: its rules are those of ir/lowering/admission.py and do not depend on times.
"""

from __future__ import annotations

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit_without_refcounts
from debubble.search.annealing.layout import ROW, B, KernelLayout, W

INFINITY = np.inf


@inlined
def freed_by(a: KernelLayout, x: Floats, n: Ints, offload: int) -> float:
    """Bytes that an offload frees at its end."""
    freed: float = x[a.freed + n[a.facts + 4 * offload + ROW]]
    return freed


@inlined
def admit_compute(
    a: KernelLayout, x: Floats, n: Ints, d: int, reserved: float, max_reserved: float
) -> tuple[float, int]:
    """Wait for offloads until at most `max_reserved` bytes are reserved.

    Returns the reserved bytes and the last offload to wait for, or -1.
    """
    waited = -1
    while reserved > max_reserved and n[a.oldest + d] < n[a.queue_end + d]:
        waited = n[a.queue + d * a.max_offloads + n[a.oldest + d]]
        freed = freed_by(a, x, n, waited)
        reserved -= freed
        if n[a.unclaimed + d] > n[a.oldest + d]:
            x[a.counted_bytes + d] -= freed
        n[a.oldest + d] += 1
    return reserved, waited


@inlined
def admit_reload(a: KernelLayout, x: Floats, n: Ints, d: int, needed: float) -> tuple[float, int]:
    """Wait for offloads until a reload fits that needs `needed` more bytes; it may use what earlier reloads waited for.

    Returns the bytes still needed and the last offload to wait for, or -1.
    """
    if n[a.unclaimed + d] < n[a.oldest + d]:
        n[a.unclaimed + d] = n[a.oldest + d]
    needed -= x[a.counted_bytes + d]
    waited = -1
    while needed > 0 and n[a.unclaimed + d] < n[a.queue_end + d]:
        waited = n[a.queue + d * a.max_offloads + n[a.unclaimed + d]]
        freed = freed_by(a, x, n, waited)
        needed -= freed
        x[a.counted_bytes + d] += freed
        n[a.unclaimed + d] += 1
    return needed, waited


@inlined
def consumer_stage(a: KernelLayout, op: int) -> int:
    """The stage that consumes the result of a forward or a backward; its own stage if none does."""
    m = a.micro_batches
    size = a.stages * m
    stage = op % size // m
    if op < size:
        return min(stage + 1, a.stages - 1)
    return max(stage - 1, 0)


@inlined
def send_message(a: KernelLayout, x: Floats, n: Ints, d: int, op: int, free: float, message: float) -> float:
    """Send an operation's message, on an exclusive link after the previous one; returns its arrival."""
    if message < 0 or not a.exclusive:
        return free + max(message, 0.0)
    link = a.link + d * a.devices + n[a.device_of + consumer_stage(a, op)]
    arrival: float = max(free, x[link]) + message
    x[link] = arrival
    return arrival


@jit_without_refcounts
def step_on_hosts(a: KernelLayout, x: Floats, n: Ints) -> None:
    """Time the optimizer steps on hosts, once everything else is timed.

    A stage's gradients are sent after its last weight gradient, one stage at a time per device; links serve them first
    come, first served.  A device's host steps one stage at a time.
    """
    for d in range(a.devices):
        lane = a.last_transfer + n[a.lane + d]
        last = n[a.previous_op + 3 * d + 1] if a.by_arrival else n[lane]
        x[a.device_sent + d] = x[a.end + last] if last >= 0 else 0.0
        n[a.device_sent_cause + d] = last
        x[a.link_free + n[a.lane + d]] = x[a.end + n[lane]] if n[lane] >= 0 else 0.0
        n[a.link_cause + n[a.lane + d]] = n[lane]
        x[a.host_free + d], n[a.host_cause + d] = 0.0, -1
    for stage in range(a.stages):
        x[a.step_end + stage] = -1.0
    while True:
        stage, ready, cause = _next_gradients(a, x, n)
        if stage < 0:
            return
        d = n[a.device_of + stage]
        link = n[a.lane + d]
        if x[a.link_free + link] > ready:
            ready, cause = x[a.link_free + link], n[a.link_cause + link]
        sent = ready + x[a.gradients + stage]
        x[a.device_sent + d] = x[a.link_free + link] = sent
        n[a.device_sent_cause + d] = n[a.link_cause + link] = cause
        if x[a.host_free + d] > sent:
            sent, cause = x[a.host_free + d], n[a.host_cause + d]
        x[a.step_end + stage] = x[a.host_free + d] = sent + x[a.host_step + stage]
        n[a.step_cause + stage] = n[a.host_cause + d] = cause


@inlined
def _next_gradients(a: KernelLayout, x: Floats, n: Ints) -> tuple[int, float, int]:
    """The stage whose gradients request a link next, when, and the operation that causes it; -1 if all are sent.

    A device's gradients are sent in the order of its list; ties between devices go to the lower index.
    """
    first, earliest, first_cause, first_device, first_end = -1, INFINITY, -1, -1, INFINITY
    m, size = a.micro_batches, a.stages * a.micro_batches
    for stage in range(a.stages):
        if x[a.after_weights + stage] <= 0 or x[a.step_end + stage] >= 0:
            continue
        d, cause = n[a.device_of + stage], W * size + stage * m + m - 1
        if x[a.end + cause] < 0:
            cause += (B - W) * size
        ready = end = x[a.end + cause]
        if x[a.device_sent + d] > ready:
            ready, cause = x[a.device_sent + d], n[a.device_sent_cause + d]
        later_end = d == first_device and end > first_end
        if ready > earliest or (ready == earliest and (d > first_device or later_end)):
            continue
        first, earliest, first_cause, first_device, first_end = stage, ready, cause, d, end
    return first, earliest, first_cause


@jit_without_refcounts
def device_objective(a: KernelLayout, x: Floats, n: Ints, d: int) -> tuple[float, int]:
    """A device's end (for the span: minus its first start) with its step on the host, and the operation causing it."""
    length, last = x[a.compute_end + d], n[a.last_compute + d]
    if a.span:
        return length - x[a.first_start + d], last
    if a.has_host_steps:
        for stage in range(a.stages):
            if n[a.device_of + stage] == d and x[a.step_end + stage] > length:
                length, last = x[a.step_end + stage], n[a.step_cause + stage]
    return length, last


@jit_without_refcounts
def objective_value(a: KernelLayout, x: Floats, n: Ints) -> float:
    """The objective once all operations are timed."""
    if a.has_host_steps:
        step_on_hosts(a, x, n)
    result = 0.0
    for d in range(a.devices):
        result = max(result, device_objective(a, x, n, d)[0])
    return result
