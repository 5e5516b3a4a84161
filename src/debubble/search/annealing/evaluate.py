"""The compiled evaluator: what `lower` and `simulate` say of lists of operations, without building a Program.

It follows the lists as the lanes would, with the same static admission (ir/lowering/admission.py) and the same
arithmetic, and stops as soon as the result cannot be better than a threshold.  Where devices share links to the host
transfers wait for their turns (shared_links.py).

Everywhere `a` is the KernelLayout, `x` the block of floats and `n` that of whole numbers.  A device's turn keeps what
it changes at every operation in local variables, and writes it to the blocks at the end of its turn.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined
from debubble.search.annealing.incremental import copy_numbers, delay, go_to_end, mark, met
from debubble.search.annealing.layout import COUNT, NEEDED, RELOADED, ROW, SENT, KernelLayout, L, O, R
from debubble.search.annealing.rules import INFINITY, admit_compute, admit_reload, longest, sent
from debubble.search.annealing.shared_links import begin_by_arrival


@inlined
def reset(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Set every lane to time 0, and count the compute time of every device."""
    size = a.stages * a.micro_batches
    x[a.end : a.end + a.times] = -1.0
    x[a.at_once] = 0.0
    x[a.reserved : a.reserved + a.device_floats] = 0.0
    copy_numbers(x, a.static, a.reserved, a.devices)
    n[a.cursor : a.cursor + a.device_ints] = 0
    n[a.compute : a.compute + a.devices] = -1
    n[a.transfer : a.transfer + 2 * a.devices] = -1
    n[a.marked + 1] = 0
    for op in range(COUNT * size):
        n[a.facts + 4 * op + ROW] = op // a.grain
    for d in range(a.devices):
        for index in range(lengths[d]):
            op = orders[d, index]
            if R * size <= op < O * size:
                choose_rows(a, n, op % size, op // size - R + 1)
    for d in range(a.devices):
        count_work(a, x, n, orders, lengths, d)


@borrowing
def choose_rows(a: KernelLayout, n: Ints, pair: int, level: int) -> None:
    """Let a pair's operations take and free what they do without an R in the list (0), with one or with a deeper."""
    size = a.stages * a.micro_batches
    for op in range(pair, COUNT * size, size):
        n[a.facts + 4 * op + ROW] = op // a.grain + level * (COUNT * size // a.grain)


@borrowing
def count_work(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, d: int) -> None:
    """Note the compute time of a device's list."""
    work = 0.0
    for index in range(lengths[d]):
        op = orders[d, index]
        if op < O * a.stages * a.micro_batches:
            work += x[a.time + n[a.facts + 4 * op + ROW]]
    x[a.work + d] = work


@inlined
def advance_transfer(
    a: KernelLayout, x: Floats, n: Ints, d: int, op: int, last: int, start: float, free: float, reserved: float,
    last_freed: float,
) -> tuple[bool, float, float]:  # fmt: skip
    """Time an O or L: its lane, its own F or O, and for L the compute operation before it and the memory.

    Returns (whether it fits, what is reserved, what the last compute operation frees that nothing counts on yet).
    """
    row, source = n[a.facts + 4 * op + ROW], n[a.facts + 4 * op + NEEDED]
    offload = op < L * a.stages * a.micro_batches
    lane = a.transfer + n[a.lane + d] + (0 if offload or a.half_duplex else a.devices)
    begin, why = 0.0, n[lane]
    if why >= 0:
        begin = x[a.end + why]
    if x[source] - x[a.lead + row] > begin:
        begin, why = x[source] - x[a.lead + row], source - a.end
    fits = True
    if offload:
        n[a.queue + d * a.queued + n[a.newest + d]] = op
        n[a.newest + d] += 1
    else:
        if last >= 0 and start > begin:
            begin, why = start, last
        needed = reserved + last_freed + x[a.allocated + row] - x[a.limit + d]
        if needed > 0:
            needed, waited = admit_reload(a, x, n, d, needed)
            if waited >= 0 and x[a.end + waited] > begin:
                begin, why = x[a.end + waited], waited
            if needed > 0:
                fits = needed <= last_freed
                last_freed = 0.0
                if free > begin:
                    begin, why = free, last
        reserved += x[a.allocated + row]
    n[lane] = op
    x[a.end + op] = begin + x[a.time + row]
    n[a.cause + op] = why
    return fits, reserved, last_freed


@borrowing
def advance_list(a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, threshold: float) -> int:
    """Advance a device as far as its data have arrived: the number of operations, or -1 if it cannot be better."""
    size = a.stages * a.micro_batches
    limit, work = x[a.limit + d], x[a.work + d]
    begun: int = n[a.cursor + d]
    index, last = begun, n[a.compute + d]
    start, free = x[a.begun + d], x[a.free + d]
    reserved, last_freed, spent = x[a.reserved + d], x[a.last_freed + d], x[a.spent + d]
    while index < length:
        op = orders[d, index]
        facts = a.facts + 4 * op
        row = n[facts + ROW]
        allocated = x[a.allocated + row]
        if op >= O * size:
            fits, reserved, last_freed = advance_transfer(a, x, n, d, op, last, start, free, reserved, last_freed)
            if not fits:
                return -1
            index += 1
            continue
        begin, why = free, last
        source, reload = n[facts + NEEDED], n[facts + RELOADED]
        if x[source] < 0:
            break
        if x[source] > begin:
            begin, why = x[source], source - a.arrival
        if x[reload] - x[a.lead + row] > begin:
            begin, why = x[reload] - x[a.lead + row], reload - a.end
        if allocated > 0 and reserved + allocated > limit:
            reserved, waited = admit_compute(a, x, n, d, reserved, limit - allocated)
            if reserved + allocated > limit:
                return -1
            if x[a.end + waited] > begin:
                begin, why = x[a.end + waited], waited
        if last < 0:
            x[a.first + d] = begin
        time = x[a.time + row]
        start, free, last_freed = begin, begin + time, x[a.freed + row]
        reserved += allocated - last_freed
        spent += time
        rest = work - spent
        least = free + rest - x[a.first + d] if a.span else free + max(rest, x[a.tail + row])
        if least > threshold:
            return -1
        x[a.end + op] = free
        n[a.cause + op] = why
        x[n[facts + SENT]] = sent(a, x, n, d, op, free, x[a.message + row])
        last = op
        index += 1
    n[a.cursor + d], n[a.compute + d] = index, last
    x[a.begun + d], x[a.free + d] = start, free
    x[a.reserved + d], x[a.last_freed + d], x[a.spent + d] = reserved, last_freed, spent
    return index - begun


@borrowing
def evaluate(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, latest: float = INFINITY
) -> float:
    """Objective of the lists, or infinity if they deadlock, break a limit or come out above `threshold`.

    It is abandoned, as `advance` says, where they are after an evaluation that is kept.  Leaves ends and causes in the
    blocks.
    """
    reset(a, x, n, orders, lengths)
    if a.by_arrival:
        return begin_by_arrival(a, x, n, orders, lengths, threshold, latest)
    return advance(a, x, n, orders, lengths, threshold, latest)


@borrowing
def advance(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, latest: float) -> float:
    """The rest of an evaluation, from where the devices are.

    It is abandoned where they are after the one kept, by more than `latest` times all operations to those to come: what
    is late after the last change mostly stays late.
    """
    remaining, whole = 0, lengths.sum()
    for d in range(a.devices):
        remaining += lengths[d] - n[a.cursor + d]
    n[a.marked + 2] = -1
    while remaining > 0:
        if met(a, x, n, remaining):
            go_to_end(a, x, n, orders, lengths)
            break
        before = remaining
        if mark(a, x, n, remaining) and delay(a, x, n) * remaining > latest * whole:
            return INFINITY
        for step in range(a.devices):
            d = a.devices - 1 - step if n[a.downward] else step
            advanced = advance_list(a, x, n, orders, lengths[d], d, threshold)
            if advanced < 0:
                return INFINITY
            remaining -= advanced
        if remaining == before:
            return INFINITY
        n[a.downward] = 1 - n[a.downward]
    return longest(a, x, n)
