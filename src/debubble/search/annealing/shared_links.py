"""Evaluation with shared links to the host: transfers take their turns in the order in which they become ready.

What an operation waits for on its own device follows from its list alone: `follow_list` notes it.  Compute lanes run
ahead until they need a transfer or another device's result.  Devices of a link group take their link by arrival
(ir/lowering/contention.py): a transfer has its turn once no other of the group can be ready before it, as those that
wait for compute operations to come are not ready before what their device has computed so far.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined
from debubble.search.annealing.incremental import START, copy_numbers, delay, mark
from debubble.search.annealing.layout import (
    NEEDED,
    NOTED,
    RELOADED,
    ROW,
    SENT,
    KernelLayout,
    L,
    O,
)
from debubble.search.annealing.rules import INFINITY, admit_compute, admit_reload, longest, sent

COMPUTE, DOWN, UP = range(3)
"""The lanes of a device."""
TO_COME = -2.0
"""End of a reload that is in the list and has none yet."""
TOO_LATE = -1.0
"""In place of an objective: the evaluation has to continue from an earlier mark."""
WHOLE = 2**62
"""A place after all lists."""


@inlined
def lane_of(a: KernelLayout, op: int) -> int:
    """The lane of an operation; both directions of a half-duplex link are one."""
    size = a.stages * a.micro_batches
    return COMPUTE if op < O * size else DOWN if op < L * size or a.half_duplex else UP


@borrowing
def follow_list(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, begin: int, until: int
) -> bool:  # fmt: skip
    """Note which operation follows each of a device's list on its lane, and what it waits for to have memory.

    What comes before the place `begin` is noted already, and from `until` on the list is the one that was noted: it is
    left as it is from where the state of memory is the same, too.  Returns False if memory does not suffice; what
    follows what is noted also then.
    """
    fits, fresh = True, -1
    size, limit = a.stages * a.micro_batches, x[a.limit + d]
    first = begin // NOTED * NOTED
    n[a.noted_from + d] = begin
    reserved, last_freed = x[a.static + d], 0.0
    # The last operation of each lane so far: what follows it is written there.
    compute = down = up = -1
    n[a.oldest + d] = n[a.known + d] = n[a.newest + d] = 0
    x[a.accounted + d] = 0.0
    if first > 0:
        floats, ints = state_at(a, d, first)
        reserved, last_freed, x[a.accounted + d] = x[floats], x[floats + 1], x[floats + 2]
        compute, down, up = n[ints], n[ints + 1], n[ints + 2]
        n[a.oldest + d], n[a.known + d], n[a.newest + d] = n[ints + 3], n[ints + 4], n[ints + 5]
    for index in range(first, length):
        if index % NOTED == 0:
            floats, ints = state_at(a, d, index)
            if (
                index >= until and fresh < n[a.oldest + d]
                and x[floats] == reserved and x[floats + 1] == last_freed and x[floats + 2] == x[a.accounted + d]
                and n[ints] == compute and n[ints + 1] == down and n[ints + 2] == up
                and n[ints + 3] == n[a.oldest + d] and n[ints + 4] == n[a.known + d]
                and n[ints + 5] == n[a.newest + d]
            ):  # fmt: skip
                n[a.noted_to + d] = index
                return fits
            x[floats], x[floats + 1], x[floats + 2] = reserved, last_freed, x[a.accounted + d]
            n[ints], n[ints + 1], n[ints + 2] = compute, down, up
            n[ints + 3], n[ints + 4], n[ints + 5] = n[a.oldest + d], n[a.known + d], n[a.newest + d]
        op = orders[d, index]
        row = n[a.facts + 4 * op + ROW]
        lane = lane_of(a, op)
        before = compute if lane == COMPUTE else down if lane == DOWN else up
        if before < 0:
            n[a.head + 3 * d + lane] = op
        else:
            n[a.follow + before] = op
        n[a.place + op], n[a.offload + op] = index, -1
        allocated = x[a.allocated + row]
        if lane == COMPUTE:
            compute = op
            if allocated > 0 and reserved + allocated > limit:
                reserved, n[a.offload + op] = admit_compute(a, x, n, d, reserved, limit - allocated)
                fits = fits and reserved + allocated <= limit
            last_freed = x[a.freed + row]
            reserved += allocated - last_freed
            continue
        if lane == DOWN:
            down = op
        else:
            up = op
        if op < L * size:
            place = a.queue + d * a.queued + n[a.newest + d]
            if n[place] != op:
                n[place], fresh = op, n[a.newest + d]
            n[a.newest + d] += 1
            continue
        n[a.behind + op], n[a.freeing + op] = compute, 0
        needed = reserved + last_freed + allocated - limit
        if needed > 0:
            needed, n[a.offload + op] = admit_reload(a, x, n, d, needed)
            if needed > 0:
                fits = fits and needed <= last_freed
                n[a.freeing + op], last_freed = 1, 0.0
        reserved += allocated
    for lane in range(3):
        last = compute if lane == COMPUTE else down if lane == DOWN else up
        if last < 0:
            n[a.head + 3 * d + lane] = -1
        else:
            n[a.follow + last] = -1
    n[a.noted_to + d] = WHOLE
    return fits


@inlined
def state_at(a: KernelLayout, d: int, index: int) -> tuple[int, int]:
    """Find where the state before a place of a device's list is noted: three floats and six whole numbers."""
    number = d * (6 * a.queued // NOTED + 2) + index // NOTED
    return a.noted_floats + 3 * number, a.noted_ints + 6 * number


@borrowing
def follow_back(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Note again of the accepted lists what was noted of lists that are not accepted."""
    for d in range(a.devices):
        if n[a.stale + d]:
            follow_list(a, x, n, orders, lengths[d], d, n[a.noted_from + d], n[a.noted_to + d])
            n[a.stale + d] = 0


@inlined
def go_to_heads(a: KernelLayout, n: Ints, d: int) -> None:
    """Find what the lanes of a device do next, after what they did last."""
    for at in range(3 * d, 3 * d + 3):
        before = n[a.previous + at]
        n[a.next + at] = n[a.head + at] if before < 0 else n[a.follow + before]


@borrowing
def forget(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, reload: float
) -> int:  # fmt: skip
    """Take back the times of what a device has still to do in a list; return how many operations that is.

    `reload` becomes the time of reloads.
    """
    reloads, offloads, count = L * a.stages * a.micro_batches, O * a.stages * a.micro_batches, 0
    compute, down, up = done(a, n, d, COMPUTE), done(a, n, d, DOWN), done(a, n, d, DOWN if a.half_duplex else UP)
    for index in range(min(compute, down, up) + 1, length):
        op = orders[d, index]
        if index > (compute if op < offloads else down if op < reloads else up):
            x[a.end + op] = reload if op >= reloads else -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
            count += 1
    return count


@inlined
def done(a: KernelLayout, n: Ints, d: int, lane: int) -> int:
    """The place of what a lane did last; -1 if it did nothing yet."""
    last = n[a.previous + 3 * d + lane]
    place: int = n[a.place + last] if last >= 0 else -1
    return place


@inlined
def look(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int) -> None:
    """Note when a lane's next transfer is ready, once everything that it waits for has an end."""
    at = 3 * d + lane
    op = n[a.next + at]
    if op < 0 or x[a.ready + at] < INFINITY:
        return
    source = n[a.facts + 4 * op + NEEDED]
    if x[source] < 0:
        return
    begin, why = x[source] - x[a.lead + n[a.facts + 4 * op + ROW]], source - a.end
    before = n[a.previous + at]
    if before >= 0 and x[a.end + before] >= begin:
        begin, why = x[a.end + before], before
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
def transfer(a: KernelLayout, x: Floats, n: Ints, d: int, lane: int) -> bool:
    """Give a device's next transfer its turn on the link; False if one that comes after it has had its own."""
    at = 3 * d + lane
    op, ready = n[a.next + at], x[a.ready + at]
    link = n[a.lane + d] + (a.devices if lane == UP else 0)
    before = n[a.transfer + link]
    if ready < x[a.turn + link]:
        return False
    begin, why = ready, n[a.ready_why + at]
    if before >= 0:
        size = a.stages * a.micro_batches
        if ready == x[a.turn + link] and d < n[a.device_of + before % size // a.micro_batches]:
            return False
        if x[a.end + before] > begin:
            begin, why = x[a.end + before], before
    n[a.transfer + link], x[a.turn + link] = op, ready
    x[a.end + op] = begin + x[a.time + n[a.facts + 4 * op + ROW]]
    n[a.cause + op] = why
    n[a.next + at], n[a.previous + at], x[a.ready + at] = n[a.follow + op], op, INFINITY
    n[a.cursor + d] = max(n[a.cursor + d], n[a.place + op] + 1)
    return True


@inlined
def serve(a: KernelLayout, x: Floats, n: Ints, link: int, lane: int) -> int:
    """Give transfers their turns on a link as long as it is known which one is ready first.

    Returns how many, or -1 if one should have had its turn before the mark that the evaluation continued from.
    """
    count = 0
    while True:
        first, least, sure, sure_before = -1, INFINITY, INFINITY, INFINITY
        peer = link
        while peer >= 0:
            d, peer = peer, n[a.peer + peer]
            if n[a.next + 3 * d + lane] < 0:
                continue
            look(a, x, n, d, lane)
            ready = x[a.ready + 3 * d + lane]
            if ready == INFINITY:
                # It waits for a compute operation to come, or, a reload, for an offload to come.
                sure = min(sure, x[a.free + d])
                if lane == UP:
                    look(a, x, n, d, DOWN)
                    sure = min(sure, x[a.ready + 3 * d + DOWN])
            elif ready < least:
                # Of two that are ready at once the device that comes first has its turn first.
                first, least, sure_before = d, ready, sure
        if first < 0 or least > sure or least == sure_before:
            return count
        if not transfer(a, x, n, first, lane):
            return -1
        count += 1


@inlined
def serve_first(a: KernelLayout, x: Floats, n: Ints) -> int:
    """Give the transfer that is ready first of all its turn: 1, 0 if none is ready, or -1 as `serve`.

    Where no compute operation can start, whatever is to come waits for a transfer that is ready.
    """
    first, least = -1, INFINITY
    for at in range(3 * a.devices):
        if at % 3 == COMPUTE:
            continue
        look(a, x, n, at // 3, at % 3)
        if x[a.ready + at] < least:
            first, least = at, x[a.ready + at]
    if first < 0:
        return 0
    return 1 if transfer(a, x, n, first // 3, first % 3) else -1


@inlined
def compute(a: KernelLayout, x: Floats, n: Ints, d: int, threshold: float) -> tuple[int, bool]:
    """Advance a device's compute operations as far as what they wait for has an end.

    Returns how many these were, -1 if the whole comes out above the threshold, and whether the next one waits for a
    transfer.
    """
    at, waits, count = 3 * d, False, 0
    op, last = n[a.next + at], n[a.compute + d]
    free, spent, work = x[a.free + d], x[a.spent + d], x[a.work + d]
    while op >= 0:
        facts = a.facts + 4 * op
        source, reload, offload = n[facts + NEEDED], n[facts + RELOADED], n[a.offload + op]
        if x[source] < 0:
            break
        if x[reload] == TO_COME or (offload >= 0 and x[a.end + offload] < 0):
            waits = True
            break
        begin, why, row = free, last, n[facts + ROW]
        if x[source] > begin:
            begin, why = x[source], source - a.arrival
        if x[reload] - x[a.lead + row] > begin:
            begin, why = x[reload] - x[a.lead + row], reload - a.end
        if offload >= 0 and x[a.end + offload] > begin:
            begin, why = x[a.end + offload], offload
        if last < 0:
            x[a.first + d] = begin
        time = x[a.time + row]
        free = begin + time
        spent += time
        rest = work - spent
        least = free + rest - x[a.first + d] if a.span else free + max(rest, x[a.tail + row])
        if least > threshold:
            return -1, False
        x[a.end + op] = free
        n[a.cause + op] = why
        x[n[facts + SENT]] = sent(a, x, n, d, op, free, x[a.message + row])
        last, op = op, n[a.follow + op]
        count += 1
    if count > 0:
        n[a.next + at], n[a.previous + at], n[a.compute + d] = op, last, last
        x[a.free + d], x[a.spent + d] = free, spent
        n[a.cursor + d] = max(n[a.cursor + d], n[a.place + last] + 1)
    return count, waits


@inlined
def begin_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, latest: float
) -> float:
    """The objective of lists from their beginning; infinite as in `evaluate`."""
    x[a.turn : a.turn + 2 * a.devices] = -1.0
    n[a.previous : a.previous + 3 * a.devices] = -1
    n[a.stale : a.stale + a.devices] = 1
    fits = True
    for d in range(a.devices):
        # All tables are of these lists, also if one does not fit.
        fits = follow_list(a, x, n, orders, lengths[d], d, 0, WHOLE) and fits
        forget(a, x, n, orders, lengths[d], d, TO_COME)
        go_to_heads(a, n, d)
    if not fits:
        return INFINITY
    value = advance_by_arrival(a, x, n, lengths.sum(), lengths.sum(), threshold, latest)
    # There is no earlier mark.
    return INFINITY if value == TOO_LATE else value


@borrowing
def go_on_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints, at: int,
    threshold: float, latest: float,
) -> tuple[float, int]:  # fmt: skip
    """The objective of lists that are as the accepted ones up to a mark of theirs, and the mark that it continued from.

    That is an earlier one where a transfer of the changed lists should have taken its turn before the mark; START:
    from none.
    """
    for d in range(a.devices):
        if n[a.differs + d] >= 0:
            n[a.stale + d] = 1
            until = n[a.shared + d] if lengths[d] == tried_lengths[d] else WHOLE
            if not follow_list(a, x, n, tried, tried_lengths[d], d, n[a.differs + d], until):
                return INFINITY, at
    whole = tried_lengths.sum()
    while at >= 0:
        remaining = go_to_mark(a, x, n, orders, lengths, tried, tried_lengths, at)
        value = advance_by_arrival(a, x, n, remaining, whole, threshold, latest)
        if value != TOO_LATE:
            return value, at
        at -= 1
    return INFINITY, START


@borrowing
def go_to_mark(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints, at: int
) -> int:  # fmt: skip
    """Put all devices at a kept mark; return how many operations of the changed lists are still to come."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + at * floats
    copy_numbers(x, state, a.reserved, floats)
    state = a.mark_ints + at * ints
    copy_numbers(n, state, a.cursor, ints)
    n[a.marked + 1] = at + 1
    remaining = 0
    for d in range(a.devices):
        if n[a.differs + d] >= 0:
            # Reloads may be in one of the lists alone.
            forget(a, x, n, orders, lengths[d], d, -1.0)
        remaining += forget(a, x, n, tried, tried_lengths[d], d, TO_COME)
        # The mark may be older than what now follows it.
        go_to_heads(a, n, d)
    return remaining


@borrowing
def advance_by_arrival(
    a: KernelLayout, x: Floats, n: Ints, remaining: int, whole: int, threshold: float, latest: float
) -> float:
    """The rest of an evaluation, abandoned where it is late as in `evaluate.advance`.

    TOO_LATE if a transfer should have taken its turn before the mark that it continues from.
    """
    x[a.ready : a.ready + 3 * a.devices] = INFINITY
    n[a.marked + 2] = -1
    while remaining > 0:
        before = remaining
        if mark(a, x, n, remaining) and delay(a, x, n) * remaining > latest * whole:
            return INFINITY
        for step in range(a.devices):
            d = a.devices - 1 - step if n[a.downward] else step
            waits = True
            while waits:
                advanced, waits = compute(a, x, n, d, threshold)
                if advanced < 0:
                    return INFINITY
                remaining -= advanced
                if waits:
                    waits = False
                    for lane in range(DOWN, UP + 1 - a.half_duplex):
                        served = serve(a, x, n, n[a.lane + d], lane)
                        if served < 0:
                            return TOO_LATE
                        remaining -= served
                        waits = waits or served > 0
        if remaining == before:
            served = serve_first(a, x, n)
            if served <= 0:
                return TOO_LATE if served < 0 else INFINITY
            remaining -= 1
        n[a.downward] = 1 - n[a.downward]
    return longest(a, x, n)
