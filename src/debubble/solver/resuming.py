"""Evaluating again only what a move has changed.

While it walks the lists an evaluation leaves marks: the state of all devices at some moments.  Lists that begin alike
have the same times up to the last mark before their first difference, so that the next evaluation begins there.  What
it overwrites is kept beside, and put back if its result is not accepted.
"""

from __future__ import annotations

from debubble.solver.jit import jit
from debubble.solver.tables import MARKS, Floats, Ints, Layout

SAME = -2
"""Nothing differs."""
START = -1
"""Nothing can be used again."""


@jit
def mark(a: Layout, x: Floats, n: Ints, remaining: int) -> None:
    """Note the state of the devices if enough was walked since the last mark."""
    count = n[a.marked + 1]
    total = 5 * a.stages * a.micro_batches
    if count == MARKS or (total - remaining) * MARKS < (count + 1) * total:
        return
    floats, ints = a.devices * (4 + a.devices), 7 * a.devices
    to = a.mark_floats + (MARKS + count) * floats
    x[to : to + floats] = x[a.reserved : a.reserved + floats]
    to = a.mark_ints + (MARKS + count) * ints
    n[to : to + ints] = n[a.cursor : a.cursor + ints]
    n[a.marked + 1] = count + 1


@jit
def keep(
    a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, before: Ints, before_lengths: Ints, at: int
) -> None:
    """Keep an evaluation of `orders` that began at mark `at`, in place of that of the lists `before`."""
    count = 7 * a.stages * a.micro_batches
    floats, ints = a.devices * (4 + a.devices), 7 * a.devices
    for d in range(a.devices):
        begin, queued = begin_of(a, n, d, at)
        # What is no longer in the lists has no end.
        for index in range(begin, before_lengths[d]):
            x[a.kept_times + count + before[d, index]] = -1.0
        for index in range(begin, lengths[d]):
            op = orders[d, index]
            x[a.kept_times + op] = x[a.start + op]
            x[a.kept_times + count + op] = x[a.end + op]
            x[a.kept_times + 2 * count + op] = x[a.arrival + op]
            n[a.kept_cause + op] = n[a.cause + op]
        for index in range(d * a.room + queued, d * a.room + n[a.newest + d]):
            n[a.kept_queue + index] = n[a.queue + index]
    begin, end = at + 1, n[a.marked + 1]
    to, source = a.mark_floats, a.mark_floats + MARKS * floats
    x[to + begin * floats : to + end * floats] = x[source + begin * floats : source + end * floats]
    to, source = a.mark_ints, a.mark_ints + MARKS * ints
    n[to + begin * ints : to + end * ints] = n[source + begin * ints : source + end * ints]
    n[a.marked] = end


@jit
def put_back(
    a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints, at: int
) -> None:
    """Undo an evaluation of `tried` that began at mark `at`: the kept one is of `orders`."""
    count = 7 * a.stages * a.micro_batches
    for d in range(a.devices):
        begin, queued = begin_of(a, n, d, at)
        for index in range(begin, tried_lengths[d]):
            x[a.end + tried[d, index]] = -1.0
        for index in range(begin, lengths[d]):
            op = orders[d, index]
            x[a.start + op] = x[a.kept_times + op]
            x[a.end + op] = x[a.kept_times + count + op]
            x[a.arrival + op] = x[a.kept_times + 2 * count + op]
            n[a.cause + op] = n[a.kept_cause + op]
        for index in range(d * a.room + queued, d * a.room + n[a.newest + d]):
            n[a.queue + index] = n[a.kept_queue + index]


@jit
def begin_of(a: Layout, n: Ints, d: int, at: int) -> tuple[int, int]:
    """(operations walked, offloads queued) of a device at a kept mark."""
    if at == START:
        return 0, 0
    state = a.mark_ints + at * 7 * a.devices
    return n[state + d], n[state + a.newest - a.cursor + d]


@jit
def common_mark(a: Layout, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints) -> int:
    """The last kept mark before any difference between the lists; START for none, SAME if they do not differ."""
    at, same = n[a.marked] - 1, True
    for d in range(a.devices):
        index = 0
        while index < lengths[d] and index < tried_lengths[d] and orders[d, index] == tried[d, index]:
            index += 1
        if index == lengths[d] and index == tried_lengths[d]:
            continue
        same = False
        while at >= 0 and n[a.mark_ints + at * 7 * a.devices + d] > index:
            at -= 1
    return SAME if same else at


@jit
def resume(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, at: int) -> None:
    """Put all devices at a kept mark of the lists' evaluation."""
    floats, ints = a.devices * (4 + a.devices), 7 * a.devices
    state = a.mark_floats + at * floats
    x[a.reserved : a.reserved + floats] = x[state : state + floats]
    state = a.mark_ints + at * ints
    n[a.cursor : a.cursor + ints] = n[state : state + ints]
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            x[a.end + orders[d, index]] = -1.0
    n[a.marked + 1] = at + 1
