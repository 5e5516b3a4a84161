"""The evaluator for lists of F, I and W alone with asynchronous messages: the same results as `evaluate`, far sooner.

Without transfers a device's memory depends on its own list only, and an operation waits for two others at most.
"""

from __future__ import annotations

from debubble.solver.evaluate import INFINITY, I, W, longest
from debubble.solver.jit import jit
from debubble.solver.resuming import mark
from debubble.solver.tables import Floats, Ints, Layout


@jit
def time_list(a: Layout, x: Floats, n: Ints, orders: Ints, length: int, d: int, threshold: float) -> int:
    """Walk a device's list as far as its data have arrived: the number of operations, or -1 if it cannot be better."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    begun: int = n[a.cursor + d]
    index = begun
    last = n[a.compute + d]
    free = x[a.end + last] if last >= 0 else 0.0
    reserved, rest = x[a.reserved + d], x[a.rest + d]
    while index < length:
        op = orders[d, index]
        source = -1
        if op < size:
            if op >= m:
                source = op - m
        elif op < W * size and op + m < (I + 1) * size:
            source = op + m
        begin, why = free, last
        if source >= 0:
            if x[a.end + source] < 0:
                break
            arrival = x[a.end + source]
            if x[a.message + source] > 0:
                arrival += x[a.message + source]
            if arrival > begin:
                begin, why = arrival, source
        reserved += x[a.allocated + op]
        if reserved > x[a.limit + d]:
            return -1
        reserved -= x[a.freed + op]
        if index == 0:
            x[a.first + d] = begin
        time = x[a.time + op]
        free = begin + time
        rest -= time
        least = free + rest - x[a.first + d] if a.span else free + max(rest, x[a.tail + op])
        if least > threshold:
            return -1
        x[a.end + op] = free
        n[a.cause + op] = why
        last = op
        index += 1
    n[a.cursor + d], n[a.compute + d] = index, last
    x[a.reserved + d], x[a.rest + d] = reserved, rest
    return index - begun


@jit
def evaluate_computing(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float) -> float:
    """Objective of the lists, or infinity if they deadlock, break a limit or come out above `threshold`.

    Leaves ends and causes in the blocks.
    """
    size = a.stages * a.micro_batches
    x[a.end : a.end + (W + 1) * size] = -1.0
    x[a.reserved : a.reserved + a.devices] = x[a.static : a.static + a.devices]
    n[a.cursor : a.cursor + a.devices] = 0
    n[a.compute : a.compute + a.devices] = -1
    n[a.marked + 1] = 0
    for d in range(a.devices):
        work = 0.0
        for index in range(lengths[d]):
            work += x[a.time + orders[d, index]]
        x[a.rest + d] = work
    return walk_computing(a, x, n, orders, lengths, threshold)


@jit
def walk_computing(a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, threshold: float) -> float:
    """The rest of an evaluation, from where the devices are."""
    remaining = (lengths - n[a.cursor : a.cursor + a.devices]).sum()
    upward = True
    while remaining > 0:
        before = remaining
        mark(a, x, n, remaining)
        for step in range(a.devices):
            d = step if upward else a.devices - 1 - step
            walked = time_list(a, x, n, orders, lengths[d], d, threshold)
            if walked < 0:
                return INFINITY
            remaining -= walked
        if remaining == before:
            return INFINITY
        upward = not upward
    return longest(a, x, n)
