"""Evaluation with shared links to the host: operations in the order in which they become ready.

Devices of a link group take their link by arrival (ir/lowering/contention.py), so that a device cannot be walked ahead
of the others.  What an operation waits for on its own device follows from the list alone: `follow_list` notes it.  Then
the lanes go on one operation at a time, the one first that is ready first.
"""

from __future__ import annotations

import numpy as np

from debubble.kernels import borrowing, inlined
from debubble.search.annealing.incremental import START, copy_numbers, delay, mark
from debubble.search.annealing.layout import (
    MARKS,
    NEEDED,
    RELOADED,
    ROW,
    SENT,
    B,
    F,
    Floats,
    I,
    Ints,
    KernelLayout,
    L,
    O,
)
from debubble.search.annealing.rules import admit_compute, admit_reload, longest, neighbour, sent

INFINITY = np.inf
COMPUTE, DOWN, UP = range(3)
"""The lanes of a device."""
TO_COME = -2.0
"""End of a reload that is in the list and has none yet."""


@inlined
def lane_of(a: KernelLayout, op: int) -> int:
    """The lane of an operation; both directions of a half-duplex link are one."""
    size = a.stages * a.micro_batches
    return COMPUTE if op < O * size else DOWN if op < L * size or a.half_duplex else UP


@borrowing
def follow_list(a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int) -> bool:
    """Note which operation follows each of a device's list on its lane, and what it waits for to have memory.

    Returns False if memory does not suffice; what follows what is noted to the end also then.
    """
    fits = True
    size, limit = a.stages * a.micro_batches, x[a.limit + d]
    reserved, last_freed, last = x[a.static + d], 0.0, -1
    n[a.oldest + d] = n[a.known + d] = n[a.newest + d] = 0
    x[a.accounted + d] = 0.0
    # The last operation of each lane so far: what follows it is written there.
    compute = down = up = -1
    n[a.head + 3 * d : a.head + 3 * d + 3] = -1
    for index in range(length):
        op = orders[d, index]
        row = n[a.facts + 4 * op + ROW]
        lane = lane_of(a, op)
        before = compute if lane == COMPUTE else down if lane == DOWN else up
        if before < 0:
            n[a.head + 3 * d + lane] = op
        else:
            n[a.follow + before] = op
        n[a.follow + op], n[a.place + op], n[a.offload + op] = -1, index, -1
        allocated = x[a.allocated + row]
        if lane == COMPUTE:
            compute = op
            if allocated > 0 and reserved + allocated > limit:
                reserved, n[a.offload + op] = admit_compute(a, x, n, d, reserved, limit - allocated)
                fits = fits and reserved + allocated <= limit
            last, last_freed = op, x[a.freed + row]
            reserved += allocated - last_freed
            continue
        if lane == DOWN:
            down = op
        else:
            up = op
        if op < L * size:
            n[a.queue + d * a.queued + n[a.newest + d]] = op
            n[a.newest + d] += 1
            continue
        if x[a.end + op] < 0:
            x[a.end + op] = TO_COME
        n[a.behind + op], n[a.freeing + op] = last, 0
        needed = reserved + last_freed + allocated - limit
        if needed > 0:
            needed, n[a.offload + op] = admit_reload(a, x, n, d, needed)
            if needed > 0:
                fits = fits and needed <= last_freed
                n[a.freeing + op], last_freed = 1, 0.0
        reserved += allocated
    return fits


@inlined
def go_to_heads(a: KernelLayout, n: Ints, d: int) -> None:
    """Find what the lanes of a device do next, behind what they did last."""
    for at in range(3 * d, 3 * d + 3):
        before = n[a.previous + at]
        n[a.next + at] = n[a.head + at] if before < 0 else n[a.follow + before]


@inlined
def forget(a: KernelLayout, x: Floats, n: Ints, d: int) -> int:
    """Take back the times of what a device has still to do; return how many operations that is."""
    reloads, count = L * a.stages * a.micro_batches, 0
    for lane in range(3):
        op = n[a.next + 3 * d + lane]
        while op >= 0:
            x[a.end + op] = TO_COME if op >= reloads else -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
            op = n[a.follow + op]
            count += 1
    return count


@inlined
def look(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int) -> None:
    """Note when a lane's next operation is ready, once everything that it waits for has an end."""
    at = 3 * d + lane
    op = n[a.next + at]
    if op < 0 or x[a.ready + at] < INFINITY:
        return
    facts = a.facts + 4 * op
    begin, why = 0.0, -1
    source = n[facts + NEEDED]
    if x[source] < 0:
        return
    if lane == COMPUTE:
        begin, why = x[a.free + d], n[a.compute + d]
        reload = n[facts + RELOADED]
        if x[reload] == TO_COME:
            return
        if x[source] > begin:
            begin, why = x[source], source - a.arrival
        if x[reload] > begin:
            begin, why = x[reload], reload - a.end
    else:
        if n[a.previous + at] >= 0:
            begin, why = x[a.end + n[a.previous + at]], n[a.previous + at]
        if x[source] > begin:
            begin, why = x[source], source - a.end
        if op >= L * a.stages * a.micro_batches and n[a.behind + op] >= 0:
            behind = n[a.behind + op]
            end = x[a.end + behind]
            if end < 0:
                return
            after = end if n[a.freeing + op] else end - x[a.time + n[a.facts + 4 * behind + ROW]]
            if after > begin:
                begin, why = after, behind
    offload = n[a.offload + op]
    if offload >= 0:
        if x[a.end + offload] < 0:
            return
        if x[a.end + offload] > begin:
            begin, why = x[a.end + offload], offload
    x[a.ready + at], n[a.ready_why + at] = begin, why


@inlined
def transfer(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int, op: int) -> None:
    """Give a transfer that is ready its turn on the link."""
    at = 3 * d + lane
    link = a.transfer + n[a.lane + d] + (a.devices if lane == UP else 0)
    begin, why = x[a.ready + at], n[a.ready_why + at]
    before = n[link]
    if before >= 0 and x[a.end + before] > begin:
        begin, why = x[a.end + before], before
    n[link] = op
    x[a.end + op] = begin + x[a.time + n[a.facts + 4 * op + ROW]]
    n[a.cause + op] = why


@inlined
def compute(a: KernelLayout, x: Floats, n: Ints, d: int, op: int, threshold: float) -> bool:
    """Start a compute operation that is ready; False if the whole comes out above the threshold."""
    row = n[a.facts + 4 * op + ROW]
    begin = x[a.ready + 3 * d]
    if n[a.compute + d] < 0:
        x[a.first + d] = begin
    time = x[a.time + row]
    free = begin + time
    x[a.spent + d] += time
    rest = x[a.work + d] - x[a.spent + d]
    least = free + rest - x[a.first + d] if a.span else free + max(rest, x[a.tail + row])
    if least > threshold:
        return False
    x[a.free + d] = x[a.end + op] = free
    n[a.cause + op], n[a.compute + d] = n[a.ready_why + 3 * d], op
    x[n[a.facts + 4 * op + SENT]] = sent(a, x, n, d, op, free, x[a.message + row])
    return True


@inlined
def begin_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, latest: float
) -> float:
    """The objective of lists that are walked from their beginning; infinite as in `evaluate`."""
    x[a.clock] = -1.0
    n[a.previous : a.previous + 3 * a.devices] = -1
    n[a.stale : a.stale + a.devices] = 1
    for d in range(a.devices):
        if not follow_list(a, x, n, orders, lengths[d], d):
            return INFINITY
    look_at_all(a, x, n)
    return walk_by_arrival(a, x, n, lengths.sum(), lengths.sum(), threshold, latest)


@borrowing
def go_on_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints, at: int,
    threshold: float, latest: float,
) -> tuple[float, int]:  # fmt: skip
    """The objective of lists that are as the accepted ones up to a mark of theirs, and the mark that it went on from.

    That is an earlier one where an operation that is next now would have taken its turn before the mark; START: from
    none.
    """
    for d in range(a.devices):
        if n[a.stale + d]:
            # It need not fit: what a micro-batch keeps may be that of the new list already.
            follow_list(a, x, n, orders, lengths[d], d)
            n[a.stale + d] = 0
    whole = tried_lengths.sum()
    remaining = whole - lengths.sum() + go_to_mark(a, x, n, at)
    for d in range(a.devices):
        if lengths[d] == tried_lengths[d] and alike(orders, tried, lengths[d], d):
            continue
        n[a.stale + d] = 1
        for lane in range(3):
            op = n[a.next + 3 * d + lane]
            while op >= 0:
                # What is a reload in both lists is noted again.
                x[a.end + op] = -1.0
                op = n[a.follow + op]
        if not follow_list(a, x, n, tried, tried_lengths[d], d):
            return INFINITY, at
    while look_at_all(a, x, n) <= x[a.clock]:
        at -= 1
        if at < 0:
            return INFINITY, START
        remaining = go_to_mark(a, x, n, at)
    return walk_by_arrival(a, x, n, remaining, whole, threshold, latest), at


@inlined
def alike(orders: Ints, tried: Ints, length: int, d: int) -> bool:
    """Tell whether a device's lists of this length are alike."""
    index = 0
    while index < length and orders[d, index] == tried[d, index]:
        index += 1
    return index == length


@borrowing
def go_to_mark(a: KernelLayout, x: Floats, n: Ints, at: int) -> int:
    """Put all devices at a kept mark; return how many operations are still to come."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + at * floats
    copy_numbers(x, state, a.reserved, floats)
    state = a.mark_ints + at * ints
    copy_numbers(n, state, a.cursor, ints)
    n[a.marked + 1] = at + 1
    remaining = 0
    for d in range(a.devices):
        # The mark may be older than what now follows it.
        go_to_heads(a, n, d)
        remaining += forget(a, x, n, d)
    return remaining


@borrowing
def look_at_all(a: KernelLayout, x: Floats, n: Ints) -> float:
    """Look at all lanes of all devices; return when the first operation of a device with a new list is ready."""
    first = INFINITY
    for d in range(a.devices):
        if n[a.stale + d]:
            go_to_heads(a, n, d)
        for lane in range(3):
            x[a.ready + 3 * d + lane] = INFINITY
            look(a, x, n, d, lane)
        note_soonest(a, x, d)
        if n[a.stale + d]:
            first = min(first, x[a.soonest + d])
    return first


@inlined
def note_soonest(a: KernelLayout, x: Floats, d: int) -> None:
    """Note when the first lane of a device is ready."""
    at = a.ready + 3 * d
    x[a.soonest + d] = min(x[at], x[at + 1], x[at + 2])


@borrowing
def walk_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, remaining: int, whole: int, threshold: float, latest: float
) -> float:
    """The rest of an evaluation, given up where it is late as in `evaluate.walk`."""
    size = a.stages * a.micro_batches
    n[a.marked + 2] = -1
    while remaining > 0:
        if (whole - remaining) * MARKS >= (n[a.marked + 1] + 1) * whole:
            marked = mark(a, x, n, remaining)
            if marked and delay(a, x, n) * remaining > latest * whole:
                return INFINITY
        d, first = 0, INFINITY
        for other in range(a.devices):
            if x[a.soonest + other] < first:
                d, first = other, x[a.soonest + other]
        if first == INFINITY:
            return INFINITY
        x[a.clock] = first
        lane = COMPUTE if x[a.ready + 3 * d] == first else DOWN if x[a.ready + 3 * d + DOWN] == first else UP
        at = 3 * d + lane
        op = n[a.next + at]
        if lane == COMPUTE:
            if not compute(a, x, n, d, op, threshold):
                return INFINITY
        else:
            transfer(a, x, n, d, lane, op)
        n[a.next + at], n[a.previous + at] = n[a.follow + op], op
        n[a.cursor + d] = max(n[a.cursor + d], n[a.place + op] + 1)
        x[a.ready + at] = INFINITY
        for other in range(3):
            look(a, x, n, d, other)
        note_soonest(a, x, d)
        kind = op // size
        if kind in (F, I, B):
            there = n[a.device_of + neighbour(a, op)]
            if there != d:
                look(a, x, n, there, COMPUTE)
                note_soonest(a, x, there)
        remaining -= 1
    return longest(a, x, n)
