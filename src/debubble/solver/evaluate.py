"""The compiled evaluator: what `lower` and `simulate` say of lists of operations, without building a Program.

It walks the lists as the lanes would, with the same static admission (ir/admission.py) and the same arithmetic, and
stops as soon as the result cannot be better than a threshold.  Link groups are walked in the order of the lists'
progress, which may differ from lowering's order of arrival: results are simulated again before anyone sees them.

Everywhere `a` is the Layout, `x` the block of floats and `n` that of whole numbers.
"""

from __future__ import annotations

import numpy as np

from debubble.solver.jit import jit
from debubble.solver.resuming import mark
from debubble.solver.tables import Floats, Ints, Layout

INFINITY = np.inf
F, I, W, B, R, O, L = 0, 1, 2, 3, 4, 5, 6  # noqa: E741 - the order of tables.KINDS


@jit
def reset(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Set every lane to time 0, and count the compute time of every device."""
    size = a.stages * a.micro_batches
    x[a.end : a.end + 7 * size] = -1.0
    x[a.reserved : a.reserved + a.devices] = x[a.static : a.static + a.devices]
    x[a.last_freed : a.last_freed + a.devices] = 0.0
    x[a.link : a.link + a.devices * a.devices] = 0.0
    n[a.recomputed : a.recomputed + size] = 0
    n[a.cursor : a.cursor + a.devices] = 0
    n[a.compute : a.compute + a.devices] = -1
    n[a.transfer : a.transfer + 2 * a.devices] = -1
    n[a.oldest : a.oldest + a.devices] = 0
    n[a.known : a.known + a.devices] = 0
    n[a.newest : a.newest + a.devices] = 0
    n[a.marked + 1] = 0
    for d in range(a.devices):
        for index in range(lengths[d]):
            op = orders[d, index]
            if R * size <= op < O * size:
                n[a.recomputed + op - R * size] = 1
    for d in range(a.devices):
        work = 0.0
        for index in range(lengths[d]):
            op = orders[d, index]
            if op < O * size:
                work += x[a.time + n[a.recomputed + n[a.pair + op]] * 7 * size + op]
        x[a.rest + d] = work


@jit
def admit_compute(a: Layout, x: Floats, n: Ints, d: int, allocated: float) -> int:
    """The offload to wait for so that memory suffices; -1 for none, -2 if nothing helps."""
    size, waited = a.stages * a.micro_batches, -1
    while x[a.reserved + d] + allocated > x[a.limit + d] and n[a.oldest + d] < n[a.newest + d]:
        waited = n[a.queue + d * a.room + n[a.oldest + d]]
        x[a.reserved + d] -= x[a.freed + n[a.recomputed + n[a.pair + waited]] * 7 * size + waited]
        n[a.oldest + d] += 1
    return -2 if x[a.reserved + d] + allocated > x[a.limit + d] else waited


@jit
def admit_reload(a: Layout, x: Floats, n: Ints, d: int, allocated: float) -> tuple[int, bool]:
    """(the offload to wait for or -1, whether to wait for the last compute operation); -2 if nothing helps."""
    size, begin = a.stages * a.micro_batches, a.queue + d * a.room
    n[a.known + d] = max(n[a.known + d], n[a.oldest + d])
    accounted = 0.0
    for index in range(n[a.oldest + d], n[a.known + d]):
        op = n[begin + index]
        accounted += x[a.freed + n[a.recomputed + n[a.pair + op]] * 7 * size + op]
    needed = x[a.reserved + d] + x[a.last_freed + d] - accounted + allocated - x[a.limit + d]
    waited, last = -1, False
    while needed > 0 and n[a.known + d] < n[a.newest + d]:
        waited = n[begin + n[a.known + d]]
        needed -= x[a.freed + n[a.recomputed + n[a.pair + waited]] * 7 * size + waited]
        n[a.known + d] += 1
    if needed > 0 and x[a.last_freed + d] > 0:
        needed -= x[a.last_freed + d]
        x[a.last_freed + d] = 0.0
        last = True
    return (-2 if needed > 0 else waited), last


@jit
def walk_transfer(a: Layout, x: Floats, n: Ints, d: int, op: int) -> bool:
    """Time an O or L: its lane, its own F or O, and for L the compute operation before it and the memory."""
    size = a.stages * a.micro_batches
    pair = n[a.pair + op]
    offload = op < L * size
    variant = n[a.recomputed + pair] * 7 * size
    lane = a.transfer + n[a.lane + d] + (0 if offload or a.half_duplex else a.devices)
    begin, why = 0.0, n[lane]
    if why >= 0:
        begin = x[a.end + why]
    source = pair if offload else O * size + pair
    if x[a.end + source] > begin:
        begin, why = x[a.end + source], source
    if offload:
        n[a.queue + d * a.room + n[a.newest + d]] = op
        n[a.newest + d] += 1
    else:
        before = n[a.compute + d]
        if before >= 0 and x[a.start + before] > begin:
            begin, why = x[a.start + before], before
        allocated = x[a.allocated + variant + op]
        if x[a.limit + d] < INFINITY:
            waited, last = admit_reload(a, x, n, d, allocated)
            if waited == -2:
                return False
            if waited >= 0 and x[a.end + waited] > begin:
                begin, why = x[a.end + waited], waited
            if last and x[a.end + before] > begin:
                begin, why = x[a.end + before], before
        x[a.reserved + d] += allocated
    n[lane] = op
    x[a.start + op] = begin
    x[a.end + op] = begin + x[a.time + variant + op]
    n[a.cause + op] = why
    return True


@jit
def source_of(a: Layout, x: Floats, op: int) -> int:
    """The operation of another stage whose output an F, I or B needs; -1 if there is none."""
    size = a.stages * a.micro_batches
    if op < size:
        return op - a.micro_batches if op >= a.micro_batches else -1
    if op >= R * size or W * size <= op < B * size:
        return -1
    pair = op - (I if op < W * size else B) * size + a.micro_batches
    if pair >= size:
        return -1
    return I * size + pair if x[a.end + I * size + pair] >= 0 else B * size + pair


@jit
def walk_compute(a: Layout, x: Floats, n: Ints, d: int, op: int, source: int) -> bool:
    """Time an F, I, B, W or R: its lane, its data, its reload, and its memory."""
    size = a.stages * a.micro_batches
    pair = n[a.pair + op]
    variant = n[a.recomputed + pair] * 7 * size
    begin, why = 0.0, n[a.compute + d]
    is_first = why < 0
    if not is_first:
        begin = x[a.end + why]
    if source >= 0 and x[a.arrival + source] > begin:
        begin, why = x[a.arrival + source], source
    reload = L * size + pair
    if (I * size <= op < W * size or op >= B * size) and x[a.end + reload] > begin:
        begin, why = x[a.end + reload], reload
    allocated = x[a.allocated + variant + op]
    if allocated > 0 and x[a.limit + d] < INFINITY:
        waited = admit_compute(a, x, n, d, allocated)
        if waited == -2:
            return False
        if waited >= 0 and x[a.end + waited] > begin:
            begin, why = x[a.end + waited], waited
    if is_first:
        x[a.first + d] = begin
    freed, time = x[a.freed + variant + op], x[a.time + variant + op]
    x[a.last_freed + d] = freed
    x[a.reserved + d] = x[a.reserved + d] - freed + allocated
    x[a.rest + d] -= time
    n[a.compute + d] = op
    x[a.start + op] = begin
    x[a.end + op] = begin + time
    n[a.cause + op] = why
    x[a.arrival + op] = begin + time
    if x[a.message + op] >= 0:
        send(a, x, n, d, op)
    return True


@jit
def send(a: Layout, x: Floats, n: Ints, d: int, op: int) -> None:
    """Time the message behind a compute operation."""
    size = a.stages * a.micro_batches
    begin = x[a.end + op]
    if a.exclusive:
        stage = n[a.pair + op] // a.micro_batches
        peer = n[a.device_of + (stage + 1 if op < size else stage - 1)]
        link = a.link + d * a.devices + peer
        begin = max(begin, x[link])
        x[link] = begin + x[a.message + op]
    x[a.arrival + op] = begin + x[a.message + op]


@jit
def at_least(a: Layout, x: Floats, d: int, op: int) -> float:
    """What the objective is at least, once a compute operation is timed."""
    bound: float = x[a.end + op] + x[a.rest + d]
    if a.span:
        bound -= x[a.first + d]
    else:
        bound = max(bound, x[a.end + op] + x[a.tail + op])
    return bound


@jit
def length_of(a: Layout, x: Floats, n: Ints, d: int) -> float:
    """A device's part in the objective: its last end, from its first start where the span counts."""
    end: float = x[a.end + n[a.compute + d]]
    if a.span:
        end -= x[a.first + d]
    return end


@jit
def evaluate(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float) -> float:
    """Objective of the lists, or infinity if they deadlock, break a limit or come out above `threshold`.

    Leaves starts, ends and causes in the blocks.
    """
    reset(a, x, n, orders, lengths)
    return walk(a, x, n, orders, lengths, threshold)


@jit
def walk(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float) -> float:
    """The rest of an evaluation, from where the devices are."""
    size = a.stages * a.micro_batches
    remaining = (lengths - n[a.cursor : a.cursor + a.devices]).sum()
    upward = True
    while remaining > 0:
        before = remaining
        mark(a, x, n, remaining)
        for step in range(a.devices):
            d = step if upward else a.devices - 1 - step
            while n[a.cursor + d] < lengths[d]:
                op = orders[d, n[a.cursor + d]]
                if op >= O * size:
                    if not walk_transfer(a, x, n, d, op):
                        return INFINITY
                else:
                    source = source_of(a, x, op)
                    if source >= 0 and x[a.end + source] < 0:
                        break
                    if not walk_compute(a, x, n, d, op, source) or at_least(a, x, d, op) > threshold:
                        return INFINITY
                n[a.cursor + d] += 1
                remaining -= 1
        if remaining == before:
            return INFINITY
        upward = not upward
    return longest(a, x, n)


@jit
def longest(a: Layout, x: Floats, n: Ints) -> float:
    """The objective, once everything is timed."""
    result = 0.0
    for d in range(a.devices):
        result = max(result, length_of(a, x, n, d))
    return result
