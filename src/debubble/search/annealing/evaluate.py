"""The compiled evaluator: times lists of operations like `lower` and `simulate`, without building a Program.

It follows the lists like the lanes of a simulation, with the same static admission (ir/lowering/admission.py) and the
same arithmetic, and stops as soon as the result must exceed a threshold.  If devices share host links, transfers queue
for them (shared_links.py).

Everywhere `a` is the KernelLayout, `x` the block of floats and `n` the block of integers.  While a device advances,
values that change at every operation are in local variables; they are written to the blocks when it stops.
"""

from __future__ import annotations

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit_without_refcounts
from debubble.search.annealing.incremental import copy_range, copy_rest, mean_delay, rejoins_accepted, save_mark
from debubble.search.annealing.layout import COUNT, NEEDED, RELOADED, ROW, SENT, KernelLayout, L, O, R
from debubble.search.annealing.rules import INFINITY, admit_compute, admit_reload, objective_value, send_message
from debubble.search.annealing.shared_links import evaluate_by_arrival


@inlined
def reset(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints) -> None:
    """Set every lane to time 0, and sum the compute time of every device."""
    size = a.stages * a.micro_batches
    x[a.end : a.end + a.time_count] = -1.0
    x[a.zero] = 0.0
    x[a.reserved : a.reserved + a.device_floats] = 0.0
    copy_range(x, a.static, a.reserved, a.devices)
    n[a.cursor : a.cursor + a.device_ints] = 0
    n[a.last_compute : a.last_compute + a.devices] = -1
    n[a.last_transfer : a.last_transfer + 2 * a.devices] = -1
    n[a.mark_counts + 1] = 0
    for op in range(COUNT * size):
        n[a.facts + 4 * op + ROW] = op // a.grain
    for d in range(a.devices):
        for index in range(lengths[d]):
            op = orders[d, index]
            if R * size <= op < O * size:
                set_cost_rows(a, n, op % size, op // size - R + 1)
    for d in range(a.devices):
        sum_work(a, x, n, orders, lengths, d)


@jit_without_refcounts
def set_cost_rows(a: KernelLayout, n: Ints, pair: int, level: int) -> None:
    """Select a pair's cost rows: without an R in the list (level 0), with one (1), or with a deeper one (2)."""
    size = a.stages * a.micro_batches
    for op in range(pair, COUNT * size, size):
        n[a.facts + 4 * op + ROW] = op // a.grain + level * (COUNT * size // a.grain)


@jit_without_refcounts
def sum_work(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, d: int) -> None:
    """Sum the compute time of a device's list."""
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
    """Time an O or L by its lane and its F or O, and an L also by the preceding compute operation and the memory.

    Returns whether it fits, the reserved bytes, and the bytes freed by the last compute operation and not yet claimed.
    """
    row, source = n[a.facts + 4 * op + ROW], n[a.facts + 4 * op + NEEDED]
    offload = op < L * a.stages * a.micro_batches
    lane = a.last_transfer + n[a.lane + d] + (0 if offload or a.half_duplex else a.devices)
    begin, cause = 0.0, n[lane]
    if cause >= 0:
        begin = x[a.end + cause]
    if x[source] - x[a.lead + row] > begin:
        begin, cause = x[source] - x[a.lead + row], source - a.end
    fits = True
    if offload:
        n[a.queue + d * a.max_offloads + n[a.queue_end + d]] = op
        n[a.queue_end + d] += 1
    else:
        if last >= 0 and start > begin:
            begin, cause = start, last
        needed = reserved + last_freed + x[a.allocated + row] - x[a.limit + d]
        if needed > 0:
            needed, waited = admit_reload(a, x, n, d, needed)
            if waited >= 0 and x[a.end + waited] > begin:
                begin, cause = x[a.end + waited], waited
            if needed > 0:
                fits = needed <= last_freed
                last_freed = 0.0
                if free > begin:
                    begin, cause = free, last
        reserved += x[a.allocated + row]
    n[lane] = op
    x[a.end + op] = begin + x[a.time + row]
    n[a.cause + op] = cause
    return fits, reserved, last_freed


@jit_without_refcounts
def advance_list(a: KernelLayout, x: Floats, n: Ints, orders: Ints, length: int, d: int, threshold: float) -> int:
    """Advance a device while its inputs have arrived; returns the number of operations, -1 above the threshold."""
    size = a.stages * a.micro_batches
    limit, work = x[a.limit + d], x[a.work + d]
    first_index: int = n[a.cursor + d]
    index, last = first_index, n[a.last_compute + d]
    start, free = x[a.compute_start + d], x[a.compute_end + d]
    reserved, last_freed, elapsed_work = x[a.reserved + d], x[a.last_freed + d], x[a.spent + d]
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
        begin, cause = free, last
        source, reload = n[facts + NEEDED], n[facts + RELOADED]
        if x[source] < 0:
            break
        if x[source] > begin:
            begin, cause = x[source], source - a.arrival
        if x[reload] - x[a.lead + row] > begin:
            begin, cause = x[reload] - x[a.lead + row], reload - a.end
        if allocated > 0 and reserved + allocated > limit:
            reserved, waited = admit_compute(a, x, n, d, reserved, limit - allocated)
            if reserved + allocated > limit:
                return -1
            if x[a.end + waited] > begin:
                begin, cause = x[a.end + waited], waited
        if last < 0:
            x[a.first_start + d] = begin
        time = x[a.time + row]
        start, free, last_freed = begin, begin + time, x[a.freed + row]
        reserved += allocated - last_freed
        elapsed_work += time
        rest = work - elapsed_work
        bound = free + rest - x[a.first_start + d] if a.span else free + max(rest, x[a.tail + row])
        if bound > threshold:
            return -1
        x[a.end + op] = free
        n[a.cause + op] = cause
        x[n[facts + SENT]] = send_message(a, x, n, d, op, free, x[a.message + row])
        last = op
        index += 1
    n[a.cursor + d], n[a.last_compute + d] = index, last
    x[a.compute_start + d], x[a.compute_end + d] = start, free
    x[a.reserved + d], x[a.last_freed + d], x[a.spent + d] = reserved, last_freed, elapsed_work
    return index - first_index


@jit_without_refcounts
def evaluate(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, max_delay: float = INFINITY
) -> float:
    """The objective of the lists; infinity if they deadlock, exceed a limit or the threshold, or are abandoned.

    Evaluations too late relative to the accepted one are abandoned as in `advance`.  Ends and causes are in the blocks.
    """
    reset(a, x, n, orders, lengths)
    if a.by_arrival:
        return evaluate_by_arrival(a, x, n, orders, lengths, threshold, max_delay)
    return advance(a, x, n, orders, lengths, threshold, max_delay)


@jit_without_refcounts
def advance(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float, max_delay: float
) -> float:
    """Complete an evaluation from the devices' current state.

    It is abandoned if the devices' mean delay relative to the accepted evaluation exceeds `max_delay` times the ratio
    of all operations to the remaining ones: delays after the last change mostly persist.
    """
    remaining, operation_count = 0, lengths.sum()
    for d in range(a.devices):
        remaining += lengths[d] - n[a.cursor + d]
    n[a.mark_counts + 2] = -1
    while remaining > 0:
        if rejoins_accepted(a, x, n, remaining):
            copy_rest(a, x, n, orders, lengths)
            break
        previous = remaining
        if save_mark(a, x, n, remaining) and mean_delay(a, x, n) * remaining > max_delay * operation_count:
            return INFINITY
        for step in range(a.devices):
            d = a.devices - 1 - step if n[a.reverse] else step
            advanced = advance_list(a, x, n, orders, lengths[d], d, threshold)
            if advanced < 0:
                return INFINITY
            remaining -= advanced
        if remaining == previous:
            return INFINITY
        n[a.reverse] = 1 - n[a.reverse]
    return objective_value(a, x, n)
