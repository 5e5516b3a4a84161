"""Static admission in the kernel: for which offloads an operation waits so that memory suffices.

The rules are those of ir/lowering/admission.py, and know no times.
"""

from __future__ import annotations

from debubble.kernels import inlined
from debubble.search.annealing.layout import ROW, Floats, Ints, KernelLayout


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
