"""Evaluation with shared host links, which serve transfers in the order in which they become ready.

An operation's dependencies on its own device follow from the list alone; `analyze_list` stores them.  Compute lanes
run ahead until they need a transfer or another device's result.  Devices of a link group share their link first come,
first served (ir/lowering/contention.py): a transfer is served once no other of the group can be ready earlier, because
those that depend on future compute operations cannot be ready before their device's current time.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit_without_refcounts
from debubble.search.annealing.incremental import START, copy_range, mean_delay, save_mark
from debubble.search.annealing.layout import (
    NEEDED,
    RELOADED,
    ROW,
    SENT,
    SNAPSHOT_INTERVAL,
    KernelLayout,
    L,
    O,
)
from debubble.search.annealing.rules import INFINITY, admit_compute, admit_reload, objective_value, send_message

COMPUTE, DOWN, UP = range(3)
"""The lanes of a device."""
PENDING_RELOAD = -2.0
"""End of a listed reload that is not timed yet."""
MARK_TOO_LATE = -1.0
"""Returned instead of an objective: the evaluation has to start from an earlier mark."""
END_OF_LISTS = 2**62
"""A position after the end of every list."""


@inlined
def lane_of(a: KernelLayout, op: int) -> int:
    """The lane of an operation; a half-duplex link has one lane for both directions."""
    size = a.stages * a.micro_batches
    return COMPUTE if op < O * size else DOWN if op < L * size or a.half_duplex else UP


@jit_without_refcounts
def analyze_list(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, begin: int, until: int
) -> bool:  # fmt: skip
    """Store the successor on its lane of each operation of a device's list, and the memory it waits for.

    Positions before `begin` are stored already, and from `until` on the list is unchanged: the analysis stops where the
    state of memory is unchanged too.  Returns False if memory does not suffice; successors are stored even then.
    """
    fits, changed_offload = True, -1
    size, limit = a.stages * a.micro_batches, x[a.limit + d]
    first = begin // SNAPSHOT_INTERVAL * SNAPSHOT_INTERVAL
    n[a.analyzed_from + d] = begin
    reserved, last_freed = x[a.static + d], 0.0
    # The last operation of each lane so far, whose successor is stored when it is known.
    compute = down = up = -1
    n[a.oldest + d] = n[a.unclaimed + d] = n[a.queue_end + d] = 0
    x[a.counted_bytes + d] = 0.0
    if first > 0:
        floats, ints = snapshot_begins(a, d, first)
        reserved, last_freed, x[a.counted_bytes + d] = x[floats], x[floats + 1], x[floats + 2]
        compute, down, up = n[ints], n[ints + 1], n[ints + 2]
        n[a.oldest + d], n[a.unclaimed + d], n[a.queue_end + d] = n[ints + 3], n[ints + 4], n[ints + 5]
    for index in range(first, length):
        if index % SNAPSHOT_INTERVAL == 0:
            floats, ints = snapshot_begins(a, d, index)
            if (
                index >= until and changed_offload < n[a.oldest + d]
                and x[floats] == reserved and x[floats + 1] == last_freed and x[floats + 2] == x[a.counted_bytes + d]
                and n[ints] == compute and n[ints + 1] == down and n[ints + 2] == up
                and n[ints + 3] == n[a.oldest + d] and n[ints + 4] == n[a.unclaimed + d]
                and n[ints + 5] == n[a.queue_end + d]
            ):  # fmt: skip
                n[a.analyzed_to + d] = index
                return fits
            x[floats], x[floats + 1], x[floats + 2] = reserved, last_freed, x[a.counted_bytes + d]
            n[ints], n[ints + 1], n[ints + 2] = compute, down, up
            n[ints + 3], n[ints + 4], n[ints + 5] = n[a.oldest + d], n[a.unclaimed + d], n[a.queue_end + d]
        op = orders[d, index]
        row = n[a.facts + 4 * op + ROW]
        lane = lane_of(a, op)
        previous = compute if lane == COMPUTE else down if lane == DOWN else up
        if previous < 0:
            n[a.head + 3 * d + lane] = op
        else:
            n[a.successor + previous] = op
        n[a.position + op], n[a.awaited_offload + op] = index, -1
        allocated = x[a.allocated + row]
        if lane == COMPUTE:
            compute = op
            if allocated > 0 and reserved + allocated > limit:
                reserved, n[a.awaited_offload + op] = admit_compute(a, x, n, d, reserved, limit - allocated)
                fits = fits and reserved + allocated <= limit
            last_freed = x[a.freed + row]
            reserved += allocated - last_freed
            continue
        if lane == DOWN:
            down = op
        else:
            up = op
        if op < L * size:
            slot = a.queue + d * a.max_offloads + n[a.queue_end + d]
            if n[slot] != op:
                n[slot], changed_offload = op, n[a.queue_end + d]
            n[a.queue_end + d] += 1
            continue
        n[a.preceding_compute + op], n[a.waits_for_end + op] = compute, 0
        needed = reserved + last_freed + allocated - limit
        if needed > 0:
            needed, n[a.awaited_offload + op] = admit_reload(a, x, n, d, needed)
            if needed > 0:
                fits = fits and needed <= last_freed
                n[a.waits_for_end + op], last_freed = 1, 0.0
        reserved += allocated
    for lane in range(3):
        last = compute if lane == COMPUTE else down if lane == DOWN else up
        if last < 0:
            n[a.head + 3 * d + lane] = -1
        else:
            n[a.successor + last] = -1
    n[a.analyzed_to + d] = END_OF_LISTS
    return fits


@inlined
def snapshot_begins(a: KernelLayout, d: int, index: int) -> tuple[int, int]:
    """Where the snapshot before a position of a device's list begins: three floats and six integers."""
    number = d * (6 * a.max_offloads // SNAPSHOT_INTERVAL + 2) + index // SNAPSHOT_INTERVAL
    return a.snapshot_floats + 3 * number, a.snapshot_ints + 6 * number


@jit_without_refcounts
def restore_lists(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Repeat the analysis of the accepted lists where that of rejected lists has overwritten it."""
    for d in range(a.devices):
        if n[a.stale + d]:
            analyze_list(a, x, n, orders, lengths[d], d, n[a.analyzed_from + d], n[a.analyzed_to + d])
            n[a.stale + d] = 0


@inlined
def set_next_ops(a: KernelLayout, n: Ints, d: int) -> None:
    """Set the next operation of each lane of a device from its previous one."""
    for slot in range(3 * d, 3 * d + 3):
        previous = n[a.previous_op + slot]
        n[a.next_op + slot] = n[a.head + slot] if previous < 0 else n[a.successor + previous]


@jit_without_refcounts
def reset_pending(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, reload: float
) -> int:  # fmt: skip
    """Reset the times of a device's remaining operations, reloads to `reload`; returns their number."""
    reloads, offloads, count = L * a.stages * a.micro_batches, O * a.stages * a.micro_batches, 0
    compute, down, up = (
        last_position(a, n, d, COMPUTE),
        last_position(a, n, d, DOWN),
        last_position(a, n, d, DOWN if a.half_duplex else UP),
    )
    for index in range(min(compute, down, up) + 1, length):
        op = orders[d, index]
        if index > (compute if op < offloads else down if op < reloads else up):
            x[a.end + op] = reload if op >= reloads else -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
            count += 1
    return count


@inlined
def last_position(a: KernelLayout, n: Ints, d: int, lane: int) -> int:
    """The position of a lane's previous operation; -1 if there is none."""
    last = n[a.previous_op + 3 * d + lane]
    place: int = n[a.position + last] if last >= 0 else -1
    return place


@inlined
def update_ready(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int) -> None:
    """Store when a lane's next transfer is ready, once all its dependencies are timed."""
    slot = 3 * d + lane
    op = n[a.next_op + slot]
    if op < 0 or x[a.ready + slot] < INFINITY:
        return
    source = n[a.facts + 4 * op + NEEDED]
    if x[source] < 0:
        return
    begin, cause = x[source] - x[a.lead + n[a.facts + 4 * op + ROW]], source - a.end
    previous = n[a.previous_op + slot]
    if previous >= 0 and x[a.end + previous] >= begin:
        begin, cause = x[a.end + previous], previous
    if op >= L * a.stages * a.micro_batches and n[a.preceding_compute + op] >= 0:
        preceding = n[a.preceding_compute + op]
        end = x[a.end + preceding]
        if end < 0:
            return
        after = end if n[a.waits_for_end + op] else end - x[a.time + n[a.facts + 4 * preceding + ROW]]
        if after > begin:
            begin, cause = after, preceding
    offload = n[a.awaited_offload + op]
    if offload >= 0:
        if x[a.end + offload] < 0:
            return
        if x[a.end + offload] > begin:
            begin, cause = x[a.end + offload], offload
    x[a.ready + slot], n[a.ready_cause + slot] = begin, cause


@inlined
def serve_transfer(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int) -> bool:
    """Serve a device's next transfer; False if the link has already served a later one."""
    slot = 3 * d + lane
    op, ready = n[a.next_op + slot], x[a.ready + slot]
    link = n[a.lane + d] + (a.devices if lane == UP else 0)
    previous = n[a.last_transfer + link]
    if ready < x[a.last_ready + link]:
        return False
    begin, cause = ready, n[a.ready_cause + slot]
    if previous >= 0:
        size = a.stages * a.micro_batches
        if ready == x[a.last_ready + link] and d < n[a.device_of + previous % size // a.micro_batches]:
            return False
        if x[a.end + previous] > begin:
            begin, cause = x[a.end + previous], previous
    n[a.last_transfer + link], x[a.last_ready + link] = op, ready
    x[a.end + op] = begin + x[a.time + n[a.facts + 4 * op + ROW]]
    n[a.cause + op] = cause
    n[a.next_op + slot], n[a.previous_op + slot], x[a.ready + slot] = n[a.successor + op], op, INFINITY
    n[a.cursor + d] = max(n[a.cursor + d], n[a.position + op] + 1)
    return True


@inlined
def serve(a: KernelLayout, x: Floats, n: Ints, link: int, lane: int) -> int:
    """Serve transfers of a link while it is certain which one is ready first.

    Returns their number, or -1 if one should have been served before the mark that the evaluation started from.
    """
    count = 0
    while True:
        first_device, earliest, certain_until, certain_before = -1, INFINITY, INFINITY, INFINITY
        peer = link
        while peer >= 0:
            d, peer = peer, n[a.peer + peer]
            if n[a.next_op + 3 * d + lane] < 0:
                continue
            update_ready(a, x, n, d, lane)
            ready = x[a.ready + 3 * d + lane]
            if ready == INFINITY:
                # It depends on a future compute operation or, if it is a reload, on a future offload.
                certain_until = min(certain_until, x[a.compute_end + d])
                if lane == UP:
                    update_ready(a, x, n, d, DOWN)
                    certain_until = min(certain_until, x[a.ready + 3 * d + DOWN])
            elif ready < earliest:
                # Ties go to the lower device index.
                first_device, earliest, certain_before = d, ready, certain_until
        if first_device < 0 or earliest > certain_until or earliest == certain_before:
            return count
        if not serve_transfer(a, x, n, first_device, lane):
            return -1
        count += 1


@inlined
def serve_first(a: KernelLayout, x: Floats, n: Ints) -> int:
    """Serve the transfer that is ready first, when no compute operation can start.

    Returns 1, 0 if none is ready, or -1 as in `serve`.
    """
    first, earliest = -1, INFINITY
    for slot in range(3 * a.devices):
        if slot % 3 == COMPUTE:
            continue
        update_ready(a, x, n, slot // 3, slot % 3)
        if x[a.ready + slot] < earliest:
            first, earliest = slot, x[a.ready + slot]
    if first < 0:
        return 0
    return 1 if serve_transfer(a, x, n, first // 3, first % 3) else -1


@inlined
def advance_compute(a: KernelLayout, x: Floats, n: Ints, d: int, threshold: float) -> tuple[int, bool]:
    """Advance a device's compute operations while their dependencies are timed.

    Returns their number, -1 above the threshold, and whether the next one waits for a transfer.
    """
    slot, waits, count = 3 * d, False, 0
    op, last = n[a.next_op + slot], n[a.last_compute + d]
    free, elapsed_work, work = x[a.compute_end + d], x[a.spent + d], x[a.work + d]
    while op >= 0:
        facts = a.facts + 4 * op
        source, reload, offload = n[facts + NEEDED], n[facts + RELOADED], n[a.awaited_offload + op]
        if x[source] < 0:
            break
        if x[reload] == PENDING_RELOAD or (offload >= 0 and x[a.end + offload] < 0):
            waits = True
            break
        begin, cause, row = free, last, n[facts + ROW]
        if x[source] > begin:
            begin, cause = x[source], source - a.arrival
        if x[reload] - x[a.lead + row] > begin:
            begin, cause = x[reload] - x[a.lead + row], reload - a.end
        if offload >= 0 and x[a.end + offload] > begin:
            begin, cause = x[a.end + offload], offload
        if last < 0:
            x[a.first_start + d] = begin
        time = x[a.time + row]
        free = begin + time
        elapsed_work += time
        remaining_work = work - elapsed_work
        min_end = (
            free + remaining_work - x[a.first_start + d] if a.span else free + max(remaining_work, x[a.tail + row])
        )
        if min_end > threshold:
            return -1, False
        x[a.end + op] = free
        n[a.cause + op] = cause
        x[n[facts + SENT]] = send_message(a, x, n, d, op, free, x[a.message + row])
        last, op = op, n[a.successor + op]
        count += 1
    if count > 0:
        n[a.next_op + slot], n[a.previous_op + slot], n[a.last_compute + d] = op, last, last
        x[a.compute_end + d], x[a.spent + d] = free, elapsed_work
        n[a.cursor + d] = max(n[a.cursor + d], n[a.position + last] + 1)
    return count, waits


@inlined
def evaluate_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, max_delay: float
) -> float:
    """Evaluate lists from the start; infinite as in `evaluate`."""
    x[a.last_ready : a.last_ready + 2 * a.devices] = -1.0
    n[a.previous_op : a.previous_op + 3 * a.devices] = -1
    n[a.stale : a.stale + a.devices] = 1
    fits = True
    for d in range(a.devices):
        # Analyze all lists even if one does not fit, so that all tables are of these lists.
        fits = analyze_list(a, x, n, orders, lengths[d], d, 0, END_OF_LISTS) and fits
        reset_pending(a, x, n, orders, lengths[d], d, PENDING_RELOAD)
        set_next_ops(a, n, d)
    if not fits:
        return INFINITY
    value = advance_by_arrival(a, x, n, lengths.sum(), lengths.sum(), threshold, max_delay)
    # There is no earlier mark.
    return INFINITY if value == MARK_TOO_LATE else value


@jit_without_refcounts
def resume_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, candidate: Ints, candidate_lengths: Ints,
    mark: int, threshold: float, max_delay: float,
) -> tuple[float, int]:  # fmt: skip
    """Evaluate lists that equal the accepted ones up to a mark; returns the objective and the mark it started from.

    That is an earlier mark, or START, if a transfer of the changed lists should have been served before the given one.
    """
    for d in range(a.devices):
        if n[a.first_difference + d] >= 0:
            n[a.stale + d] = 1
            until = n[a.suffix_start + d] if lengths[d] == candidate_lengths[d] else END_OF_LISTS
            if not analyze_list(a, x, n, candidate, candidate_lengths[d], d, n[a.first_difference + d], until):
                return INFINITY, mark
    operation_count = candidate_lengths.sum()
    while mark >= 0:
        remaining = restore_mark(a, x, n, orders, lengths, candidate, candidate_lengths, mark)
        value = advance_by_arrival(a, x, n, remaining, operation_count, threshold, max_delay)
        if value != MARK_TOO_LATE:
            return value, mark
        mark -= 1
    return INFINITY, START


@jit_without_refcounts
def restore_mark(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, candidate: Ints, candidate_lengths: Ints,
    mark: int,
) -> int:  # fmt: skip
    """Set all devices to the state of an accepted mark; returns the number of remaining operations."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + mark * floats
    copy_range(x, state, a.reserved, floats)
    state = a.mark_ints + mark * ints
    copy_range(n, state, a.cursor, ints)
    n[a.mark_counts + 1] = mark + 1
    remaining = 0
    for d in range(a.devices):
        if n[a.first_difference + d] >= 0:
            # A reload may be in only one of the two lists.
            reset_pending(a, x, n, orders, lengths[d], d, -1.0)
        remaining += reset_pending(a, x, n, candidate, candidate_lengths[d], d, PENDING_RELOAD)
        # Successors may have changed since the mark.
        set_next_ops(a, n, d)
    return remaining


@jit_without_refcounts
def advance_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, remaining: int, operation_count: int, threshold: float, max_delay: float
) -> float:
    """Complete an evaluation, abandoned if late as in `evaluate.advance`.

    Returns MARK_TOO_LATE if a transfer should have been served before the mark that it started from.
    """
    x[a.ready : a.ready + 3 * a.devices] = INFINITY
    n[a.mark_counts + 2] = -1
    while remaining > 0:
        previous = remaining
        if save_mark(a, x, n, remaining) and mean_delay(a, x, n) * remaining > max_delay * operation_count:
            return INFINITY
        for step in range(a.devices):
            d = a.devices - 1 - step if n[a.reverse] else step
            waits = True
            while waits:
                advanced, waits = advance_compute(a, x, n, d, threshold)
                if advanced < 0:
                    return INFINITY
                remaining -= advanced
                if waits:
                    waits = False
                    for lane in range(DOWN, UP + 1 - a.half_duplex):
                        served = serve(a, x, n, n[a.lane + d], lane)
                        if served < 0:
                            return MARK_TOO_LATE
                        remaining -= served
                        waits = waits or served > 0
        if remaining == previous:
            served = serve_first(a, x, n)
            if served <= 0:
                return MARK_TOO_LATE if served < 0 else INFINITY
            remaining -= 1
        n[a.reverse] = 1 - n[a.reverse]
    return objective_value(a, x, n)
