"""Incremental evaluation: only what a move has changed is evaluated again.

While it follows the lists an evaluation leaves marks: the state of all devices at some moments.  Lists that begin alike
have the same times up to the last mark before their first difference, so that the next evaluation begins there.  Where
the lists are alike again and the devices are in the state that they were in at a mark, all that follows is known too.
The evaluation that was last accepted is kept; what another one overwrites is put back if it is not accepted.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined
from debubble.search.annealing.layout import MARKS, SENT, B, I, KernelLayout, L, O

SAME = -2
"""Nothing differs."""
START = -1
"""Nothing can be used again."""


@borrowing
def copy_numbers(block: Floats | Ints, source: int, to: int, count: int) -> None:
    """Copy some numbers of a block to another place in it, which must not overlap the first."""
    here, there = block[source : source + count], block[to : to + count]
    for index in range(count):
        there[index] = here[index]


@borrowing
def mark(a: KernelLayout, x: Floats, n: Ints, remaining: int) -> bool:
    """Note the state of the devices, and say so, at the beginning and some way after the last mark."""
    count = n[a.marked + 1]
    total = 5 * a.stages * a.micro_batches
    if count == MARKS or (count > 0 and (total - remaining) * (MARKS - 1) < count * total):
        return False
    floats, ints = a.device_floats, a.device_ints
    to = a.mark_floats + (MARKS + count) * floats
    copy_numbers(x, a.reserved, to, floats)
    to = a.mark_ints + (MARKS + count) * ints
    copy_numbers(n, a.cursor, to, ints)
    n[a.mark_left + MARKS + count] = remaining
    n[a.marked + 1] = count + 1
    return True


@borrowing
def delay(a: KernelLayout, x: Floats, n: Ints) -> float:
    """Average how much later the devices are than in the accepted evaluation; 0 while their lists differ."""
    total = 0.0
    for d in range(a.devices):
        last = n[a.compute + d]
        if n[a.cursor + d] < n[a.shared + d]:
            return 0.0
        if last >= 0:
            total += x[a.end + last] - x[a.kept_times + last]
    return total / a.devices


@borrowing
def keep(a: KernelLayout, x: Floats, n: Ints, at: int) -> None:
    """Keep an evaluation that began at mark `at`, in place of the one that it continued from."""
    copy_numbers(x, a.end, a.kept_times, a.times)
    copy_numbers(n, a.cause, a.kept_causes, a.causes)
    copy_numbers(x, a.reserved, a.last_floats, a.device_floats)
    copy_numbers(n, a.cursor, a.last_ints, a.device_ints)
    end, met, kept = n[a.marked + 1], n[a.marked + 2], 0
    if met >= 0:
        kept = min(n[a.marked] - met, MARKS - end)
        for k in range(kept):
            index = k if end < met else kept - 1 - k
            copy_mark(a, x, n, met + index, end + index)
    for index in range(at + 1, end):
        copy_mark(a, x, n, MARKS + index, index)
    n[a.marked] = end + kept
    n[a.stale : a.stale + a.devices] = 0


@borrowing
def copy_mark(a: KernelLayout, x: Floats, n: Ints, source: int, to: int) -> None:
    """Put a mark in another's place."""
    if source == to:
        return
    floats, ints = a.device_floats, a.device_ints
    there, here = a.mark_floats + to * floats, a.mark_floats + source * floats
    copy_numbers(x, here, there, floats)
    there, here = a.mark_ints + to * ints, a.mark_ints + source * ints
    copy_numbers(n, here, there, ints)
    n[a.mark_left + to] = n[a.mark_left + source]


@borrowing
def put_back(a: KernelLayout, x: Floats, n: Ints) -> None:
    """Undo an evaluation: go back to the one kept."""
    copy_numbers(x, a.kept_times, a.end, a.times)
    copy_numbers(n, a.kept_causes, a.cause, a.causes)


@borrowing
def common_mark(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints) -> int:
    """The last kept mark before any difference between the lists; START for none, SAME if they do not differ.

    Notes where the lists differ first, and from where on they are alike again.
    """
    at, same, alike = n[a.marked] - 1, True, 1
    for d in range(a.devices):
        index, end, tried_end = 0, lengths[d], tried_lengths[d]
        if end != tried_end:
            alike = 0
        while index < end and index < tried_end and orders[d, index] == tried[d, index]:
            index += 1
        n[a.shared + d], n[a.differs + d] = 0, -1
        if index == end and index == tried_end:
            continue
        same = False
        n[a.differs + d] = index
        while at >= 0 and n[a.mark_ints + at * a.device_ints + d] > index:
            at -= 1
        while end > index and tried_end > index and orders[d, end - 1] == tried[d, tried_end - 1]:
            end -= 1
            tried_end -= 1
        n[a.shared + d] = tried_end
    n[a.alike] = alike
    return SAME if same else at


@inlined
def resume(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, at: int) -> None:
    """Put all devices at a kept mark of the lists' evaluation."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + at * floats
    copy_numbers(x, state, a.reserved, floats)
    state = a.mark_ints + at * ints
    copy_numbers(n, state, a.cursor, ints)
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            op = orders[d, index]
            x[a.end + op] = -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
    n[a.marked + 1] = at + 1


@inlined
def met(a: KernelLayout, x: Floats, n: Ints, remaining: int) -> bool:
    """Tell whether all that follows is what followed at a kept mark, and note which."""
    if not n[a.alike]:
        return False
    k = n[a.marked + 1]
    # The marks of both evaluations are equally far apart.
    while k > 0 and n[a.mark_left + k - 1] <= remaining:
        k -= 1
    while k < n[a.marked] and n[a.mark_left + k] > remaining:
        k += 1
    if k >= n[a.marked] or n[a.mark_left + k] != remaining:
        return False
    if same_state(a, x, n, k) and same_times(a, x, n):
        n[a.marked + 2] = k
        return True
    return False


@inlined
def same_state(a: KernelLayout, x: Floats, n: Ints, k: int) -> bool:
    """Tell whether the devices are where they were at a kept mark, and only what followed then is to come."""
    floats, ints = a.mark_floats + k * a.device_floats, a.mark_ints + k * a.device_ints - a.cursor
    for d in range(a.devices):
        at = n[a.cursor + d]
        if at != n[ints + a.cursor + d] or at < n[a.shared + d]:
            return False
    for index in range(a.device_floats):
        if x[a.reserved + index] != x[floats + index]:
            return False
    kept_queue = a.kept_causes + a.queue - a.cause
    for d in range(a.devices):
        oldest, newest = n[a.oldest + d], n[a.newest + d]
        if oldest != n[ints + a.oldest + d] or newest != n[ints + a.newest + d]:
            return False
        if n[a.known + d] != n[ints + a.known + d]:
            return False
        for index in range(d * a.queued + oldest, d * a.queued + newest):
            op = n[a.queue + index]
            if op != n[kept_queue + index] or x[a.end + op] != x[a.kept_times + op]:
                return False
    for index in range(2 * a.devices):
        op = n[a.transfer + index]
        if op != n[ints + a.transfer + index] or (op >= 0 and x[a.end + op] != x[a.kept_times + op]):
            return False
    return True


@inlined
def same_times(a: KernelLayout, x: Floats, n: Ints) -> bool:
    """Tell whether all that operations to come wait for has its time of the accepted evaluation."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    to_kept = a.kept_times - a.end
    for pair in range(size):
        if x[a.end + I * size + pair] >= 0 or x[a.end + B * size + pair] >= 0:
            continue
        if pair + m < size and changed(x, a.arrival + size + pair + m, to_kept):
            return False
        if x[a.end + pair] < 0:
            if pair >= m and changed(x, a.arrival + pair - m, to_kept):
                return False
            continue
        offload = a.end + O * size + pair
        if changed(x, offload, to_kept) or changed(x, a.end + L * size + pair, to_kept):
            return False
        if x[offload] < 0 and x[offload + to_kept] >= 0 and changed(x, a.end + pair, to_kept):
            return False
    return True


@borrowing
def changed(x: Floats, index: int, to_kept: int) -> bool:
    """Tell whether a time is known, and another than in the accepted evaluation."""
    different: bool = x[index] >= 0 and x[index] != x[index + to_kept]
    return different


@inlined
def go_to_end(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Take over what followed in the evaluation kept."""
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            op = orders[d, index]
            sent = n[a.facts + 4 * op + SENT]
            x[a.end + op] = x[a.kept_times + op]
            x[sent] = x[a.kept_times + sent - a.end]
            n[a.cause + op] = n[a.kept_causes + op]
        for index in range(a.queue + d * a.queued + n[a.newest + d], a.queue + (d + 1) * a.queued):
            n[index] = n[a.kept_causes + index - a.cause]
    copy_numbers(x, a.last_floats, a.reserved, a.device_floats)
    copy_numbers(n, a.last_ints, a.cursor, a.device_ints)
