"""Incremental evaluation: only what a move has changed is evaluated again.

An evaluation saves marks: snapshots of the state of all devices.  Lists with a common prefix have the same times up to
the last mark before their first difference, so the next evaluation starts there.  Once the lists are in their common
suffix and the devices are in the same state as at a mark, the rest is known too.  The last accepted evaluation is
stored; what a rejected one has overwritten is restored.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit_without_refcounts
from debubble.search.annealing.layout import MARKS, SENT, B, I, KernelLayout, L, O

SAME = -2
"""The lists do not differ."""
START = -1
"""No mark can be reused: evaluate from the start."""


@jit_without_refcounts
def copy_range(block: Floats | Ints, source: int, target: int, count: int) -> None:
    """Copy a range of a block to another position in it, which must not overlap."""
    source_view, target_view = block[source : source + count], block[target : target + count]
    for index in range(count):
        target_view[index] = source_view[index]


@jit_without_refcounts
def save_mark(a: KernelLayout, x: Floats, n: Ints, remaining: int) -> bool:
    """Save a mark at the start and at regular distances; tells whether one was saved."""
    count = n[a.mark_counts + 1]
    total = 5 * a.stages * a.micro_batches
    if count == MARKS or (count > 0 and (total - remaining) * (MARKS - 1) < count * total):
        return False
    floats, ints = a.device_floats, a.device_ints
    target = a.mark_floats + (MARKS + count) * floats
    copy_range(x, a.reserved, target, floats)
    target = a.mark_ints + (MARKS + count) * ints
    copy_range(n, a.cursor, target, ints)
    n[a.mark_remaining + MARKS + count] = remaining
    n[a.mark_counts + 1] = count + 1
    return True


@jit_without_refcounts
def mean_delay(a: KernelLayout, x: Floats, n: Ints) -> float:
    """The devices' mean delay relative to the accepted evaluation; 0 while their lists differ."""
    total = 0.0
    for d in range(a.devices):
        last = n[a.last_compute + d]
        if n[a.cursor + d] < n[a.suffix_start + d]:
            return 0.0
        if last >= 0:
            total += x[a.end + last] - x[a.accepted_times + last]
    return total / a.devices


@jit_without_refcounts
def accept(a: KernelLayout, x: Floats, n: Ints, mark: int) -> None:
    """Store an evaluation that started from a mark as the accepted one."""
    copy_range(x, a.end, a.accepted_times, a.time_count)
    copy_range(n, a.cause, a.accepted_causes, a.cause_count)
    copy_range(x, a.reserved, a.accepted_end_floats, a.device_floats)
    copy_range(n, a.cursor, a.accepted_end_ints, a.device_ints)
    end, met_mark, retained = n[a.mark_counts + 1], n[a.mark_counts + 2], 0
    if met_mark >= 0:
        retained = min(n[a.mark_counts] - met_mark, MARKS - end)
        for k in range(retained):
            index = k if end < met_mark else retained - 1 - k
            copy_mark(a, x, n, met_mark + index, end + index)
    for index in range(mark + 1, end):
        copy_mark(a, x, n, MARKS + index, index)
    n[a.mark_counts] = end + retained
    n[a.stale : a.stale + a.devices] = 0


@jit_without_refcounts
def copy_mark(a: KernelLayout, x: Floats, n: Ints, source: int, target: int) -> None:
    """Copy a mark."""
    if source == target:
        return
    floats, ints = a.device_floats, a.device_ints
    target_begin, source_begin = a.mark_floats + target * floats, a.mark_floats + source * floats
    copy_range(x, source_begin, target_begin, floats)
    target_begin, source_begin = a.mark_ints + target * ints, a.mark_ints + source * ints
    copy_range(n, source_begin, target_begin, ints)
    n[a.mark_remaining + target] = n[a.mark_remaining + source]


@jit_without_refcounts
def revert(a: KernelLayout, x: Floats, n: Ints) -> None:
    """Undo an evaluation: restore the accepted one."""
    copy_range(x, a.accepted_times, a.end, a.time_count)
    copy_range(n, a.accepted_causes, a.cause, a.cause_count)


@jit_without_refcounts
def last_common_mark(
    a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, candidate: Ints, candidate_lengths: Ints
) -> int:
    """The last accepted mark before any difference between the lists; START if none, SAME if they do not differ.

    Also stores each device's first difference and the start of its common suffix.
    """
    mark, identical, comparable = n[a.mark_counts] - 1, True, 1
    for d in range(a.devices):
        index, end, candidate_end = 0, lengths[d], candidate_lengths[d]
        if end != candidate_end:
            comparable = 0
        while index < end and index < candidate_end and orders[d, index] == candidate[d, index]:
            index += 1
        n[a.suffix_start + d], n[a.first_difference + d] = 0, -1
        if index == end and index == candidate_end:
            continue
        identical = False
        n[a.first_difference + d] = index
        while mark >= 0 and n[a.mark_ints + mark * a.device_ints + d] > index:
            mark -= 1
        while end > index and candidate_end > index and orders[d, end - 1] == candidate[d, candidate_end - 1]:
            end -= 1
            candidate_end -= 1
        n[a.suffix_start + d] = candidate_end
    n[a.comparable] = comparable
    return SAME if identical else mark


@inlined
def resume_from_mark(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, mark: int) -> None:
    """Set all devices to the state of an accepted mark."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + mark * floats
    copy_range(x, state, a.reserved, floats)
    state = a.mark_ints + mark * ints
    copy_range(n, state, a.cursor, ints)
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            op = orders[d, index]
            x[a.end + op] = -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
    n[a.mark_counts + 1] = mark + 1


@inlined
def rejoins_accepted(a: KernelLayout, x: Floats, n: Ints, remaining: int) -> bool:
    """Tell whether the rest equals that after an accepted mark, whose index is stored."""
    if not n[a.comparable]:
        return False
    k = n[a.mark_counts + 1]
    # The marks of both evaluations are equally far apart.
    while k > 0 and n[a.mark_remaining + k - 1] <= remaining:
        k -= 1
    while k < n[a.mark_counts] and n[a.mark_remaining + k] > remaining:
        k += 1
    if k >= n[a.mark_counts] or n[a.mark_remaining + k] != remaining:
        return False
    if same_state(a, x, n, k) and same_times(a, x, n):
        n[a.mark_counts + 2] = k
        return True
    return False


@inlined
def same_state(a: KernelLayout, x: Floats, n: Ints, k: int) -> bool:
    """Tell whether the devices are in the state of accepted mark `k`, within the common suffixes of their lists."""
    floats, ints = a.mark_floats + k * a.device_floats, a.mark_ints + k * a.device_ints - a.cursor
    for d in range(a.devices):
        position = n[a.cursor + d]
        if position != n[ints + a.cursor + d] or position < n[a.suffix_start + d]:
            return False
    for index in range(a.device_floats):
        if x[a.reserved + index] != x[floats + index]:
            return False
    accepted_queue = a.accepted_causes + a.queue - a.cause
    for d in range(a.devices):
        oldest, newest = n[a.oldest + d], n[a.queue_end + d]
        if oldest != n[ints + a.oldest + d] or newest != n[ints + a.queue_end + d]:
            return False
        if n[a.unclaimed + d] != n[ints + a.unclaimed + d]:
            return False
        for index in range(d * a.max_offloads + oldest, d * a.max_offloads + newest):
            op = n[a.queue + index]
            if op != n[accepted_queue + index] or x[a.end + op] != x[a.accepted_times + op]:
                return False
    for index in range(2 * a.devices):
        op = n[a.last_transfer + index]
        if op != n[ints + a.last_transfer + index] or (op >= 0 and x[a.end + op] != x[a.accepted_times + op]):
            return False
    return True


@inlined
def same_times(a: KernelLayout, x: Floats, n: Ints) -> bool:
    """Tell whether all dependencies of the remaining operations have their times of the accepted evaluation."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    accepted_offset = a.accepted_times - a.end
    for pair in range(size):
        if x[a.end + I * size + pair] >= 0 or x[a.end + B * size + pair] >= 0:
            continue
        if pair + m < size and differs(x, a.arrival + size + pair + m, accepted_offset):
            return False
        if x[a.end + pair] < 0:
            if pair >= m and differs(x, a.arrival + pair - m, accepted_offset):
                return False
            continue
        offload = a.end + O * size + pair
        if differs(x, offload, accepted_offset) or differs(x, a.end + L * size + pair, accepted_offset):
            return False
        if x[offload] < 0 and x[offload + accepted_offset] >= 0 and differs(x, a.end + pair, accepted_offset):
            return False
    return True


@jit_without_refcounts
def differs(x: Floats, index: int, accepted_offset: int) -> bool:
    """Tell whether a time is known and differs from the accepted evaluation."""
    different: bool = x[index] >= 0 and x[index] != x[index + accepted_offset]
    return different


@inlined
def copy_rest(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Copy the rest of the accepted evaluation."""
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            op = orders[d, index]
            sent = n[a.facts + 4 * op + SENT]
            x[a.end + op] = x[a.accepted_times + op]
            x[sent] = x[a.accepted_times + sent - a.end]
            n[a.cause + op] = n[a.accepted_causes + op]
        for index in range(a.queue + d * a.max_offloads + n[a.queue_end + d], a.queue + (d + 1) * a.max_offloads):
            n[index] = n[a.accepted_causes + index - a.cause]
    copy_range(x, a.accepted_end_floats, a.reserved, a.device_floats)
    copy_range(n, a.accepted_end_ints, a.cursor, a.device_ints)
