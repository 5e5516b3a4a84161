"""Evaluating again only what a move has changed.

While it walks the lists an evaluation leaves marks: the state of all devices at some moments.  Lists that begin alike
have the same times up to the last mark before their first difference, so that the next evaluation begins there.  What
it overwrites is kept beside, and put back if its result is not accepted.
"""

from __future__ import annotations

from debubble.solver.jit import jit
from debubble.solver.tables import MARKS, SENT, Floats, Ints, Layout

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
    floats, ints = a.device_floats, a.device_ints
    to = a.mark_floats + (MARKS + count) * floats
    x[to : to + floats] = x[a.reserved : a.reserved + floats]
    to = a.mark_ints + (MARKS + count) * ints
    n[to : to + ints] = n[a.cursor : a.cursor + ints]
    n[a.marked + 1] = count + 1


@jit
def keep(a: Layout, x: Floats, n: Ints, at: int) -> None:
    """Keep an evaluation that began at mark `at`, in place of the one that it went on from."""
    x[a.kept_times : a.kept_times + a.times] = x[a.end : a.end + a.times]
    n[a.kept_causes : a.kept_causes + a.causes] = n[a.cause : a.cause + a.causes]
    floats, ints, begin, end = a.device_floats, a.device_ints, at + 1, n[a.marked + 1]
    to, source = a.mark_floats, a.mark_floats + MARKS * floats
    x[to + begin * floats : to + end * floats] = x[source + begin * floats : source + end * floats]
    to, source = a.mark_ints, a.mark_ints + MARKS * ints
    n[to + begin * ints : to + end * ints] = n[source + begin * ints : source + end * ints]
    n[a.marked] = end


@jit
def put_back(a: Layout, x: Floats, n: Ints) -> None:
    """Undo an evaluation: go back to the one kept."""
    x[a.end : a.end + a.times] = x[a.kept_times : a.kept_times + a.times]
    n[a.cause : a.cause + a.causes] = n[a.kept_causes : a.kept_causes + a.causes]


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
        while at >= 0 and n[a.mark_ints + at * a.device_ints + d] > index:
            at -= 1
    return SAME if same else at


@jit
def resume(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, at: int) -> None:
    """Put all devices at a kept mark of the lists' evaluation."""
    floats, ints = a.device_floats, a.device_ints
    state = a.mark_floats + at * floats
    x[a.reserved : a.reserved + floats] = x[state : state + floats]
    state = a.mark_ints + at * ints
    n[a.cursor : a.cursor + ints] = n[state : state + ints]
    for d in range(a.devices):
        for index in range(n[a.cursor + d], lengths[d]):
            op = orders[d, index]
            x[a.end + op] = -1.0
            x[n[a.facts + 4 * op + SENT]] = -1.0
    n[a.marked + 1] = at + 1
