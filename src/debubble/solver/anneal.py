"""The compiled local search: simulated annealing over the devices' lists, with moves on the critical path.

A state is one list per device.  Moves shift operations within a list (never across their own kind or their own
micro-batch), or put a (stage, micro-batch)'s offload or recomputation in or out.
"""

from __future__ import annotations

import numpy as np

from debubble.solver.evaluate import INFINITY, B, F, I, L, O, R, evaluate, length_of, walk
from debubble.solver.evaluate_computing import evaluate_computing, walk_computing
from debubble.solver.jit import jit
from debubble.solver.resuming import SAME, START, common_mark, keep, put_back, resume
from debubble.solver.tables import Floats, Ints, Layout


@jit
def draw(state: Ints, below: int) -> int:
    """A pseudo-random number in [0, below): Park and Miller's generator, the same compiled or not."""
    state[0] = state[0] * 48271 % 2147483647
    drawn: int = state[0] * below // 2147483647
    return drawn


@jit
def find(orders: Ints, lengths: Ints, d: int, op: int) -> int:
    """Where an operation is in its device's list, or -1."""
    for index in range(lengths[d]):
        if orders[d, index] == op:
            return index
    return -1


@jit
def is_fence(a: Layout, n: Ints, op: int) -> bool:
    """Whether nothing may pass it: the forward of a micro-batch between which and another the order is periodic."""
    return op < a.stages * a.micro_batches and n[a.fence + op] == 1


@jit
def fenced(a: Layout, n: Ints, orders: Ints, d: int, begin: int, end: int) -> bool:
    """Whether there is a fence between two places of a list."""
    for index in range(begin + 1, end):  # noqa: SIM110 - compiles to less
        if is_fence(a, n, orders[d, index]):
            return True
    return False


@jit
def shift(a: Layout, n: Ints, orders: Ints, lengths: Ints, op: int, by: int) -> int:
    """Move an operation by up to `by` places, as far as no fence and nothing of its kind or micro-batch is in the way."""
    size = a.stages * a.micro_batches
    pair = op % size
    d = n[a.device_of + pair // a.micro_batches]
    index = find(orders, lengths, d, op)
    if index < 0 or is_fence(a, n, op):
        return 0
    step = 1 if by > 0 else -1
    moved = 0
    while moved != by:
        other = index + step
        if other < 0 or other >= lengths[d]:
            break
        beside = orders[d, other]
        if beside % size == pair or beside // a.micro_batches == op // a.micro_batches or is_fence(a, n, beside):
            break
        orders[d, index] = beside
        orders[d, other] = op
        index = other
        moved += step
    return moved


@jit
def insert(orders: Ints, lengths: Ints, d: int, index: int, op: int) -> None:
    """Put an operation into a list."""
    for at in range(lengths[d], index, -1):
        orders[d, at] = orders[d, at - 1]
    orders[d, index] = op
    lengths[d] += 1


@jit
def remove(orders: Ints, lengths: Ints, d: int, index: int) -> None:
    """Take an operation out of a list."""
    lengths[d] -= 1
    for at in range(index, lengths[d]):
        orders[d, at] = orders[d, at + 1]


@jit
def backward_at(a: Layout, orders: Ints, lengths: Ints, d: int, pair: int) -> int:
    """Where the backward of a (stage, micro-batch) is, or the R before it."""
    size = a.stages * a.micro_batches
    for index in range(lengths[d]):
        op = orders[d, index]
        kind = op // size
        if op % size == pair and (kind == R or kind == I or kind == B):  # noqa: SIM109 - compiles to less
            return index
    return -1


@jit
def toggle_offload(a: Layout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Take an offload and its reload out, or put them in: O behind F, L a few places before the backward.

    Where a fence stands between, micro-batches beyond it do the same, and nothing is changed.
    """
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    forward, backward = find(orders, lengths, d, F * size + pair), backward_at(a, orders, lengths, d, pair)
    if fenced(a, n, orders, d, forward, backward):
        return
    at = find(orders, lengths, d, O * size + pair)
    if at >= 0:
        remove(orders, lengths, d, at)
        remove(orders, lengths, d, find(orders, lengths, d, L * size + pair))
        return
    insert(orders, lengths, d, forward + 1, O * size + pair)
    backward += 1
    insert(orders, lengths, d, max(forward + 2, backward - draw(random, 5)), L * size + pair)


@jit
def toggle_recompute(a: Layout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Take an R out, or put it a few places before the backward, behind the reload."""
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    at = find(orders, lengths, d, R * size + pair)
    if at >= 0:
        remove(orders, lengths, d, at)
        return
    behind = max(find(orders, lengths, d, F * size + pair), find(orders, lengths, d, L * size + pair))
    backward = backward_at(a, orders, lengths, d, pair)
    insert(orders, lengths, d, max(behind + 1, backward - draw(random, 3)), R * size + pair)


@jit
def move(
    a: Layout,
    n: Ints,
    orders: Ints,
    lengths: Ints,
    path: Ints,
    path_length: int,
    offload: bool,
    recompute: bool,
    random: Ints,
) -> None:
    """Change the lists in place: half of the time at an operation on the critical path."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    if path_length > 0 and draw(random, 2) == 0:
        op = path[draw(random, path_length)]
    else:
        d = draw(random, orders.shape[0])
        op = orders[d, draw(random, lengths[d])]
    pair = op % size
    stage, j = pair // m, pair % m
    dice = draw(random, 100)
    if offload and dice < 15:
        run, stride = 1, 1
        if draw(random, 3) == 0:
            run, stride = 1 + draw(random, 8), 1 + draw(random, 3)
        for k in range(run):
            if j + k * stride < m:
                toggle_offload(a, n, orders, lengths, pair + k * stride, random)
        return
    if offload and dice < 20:
        # To the neighbouring micro-batch.
        other = pair + 1 if j + 1 < m and (j == 0 or draw(random, 2) == 0) else pair - 1
        if m > 1:
            toggle_offload(a, n, orders, lengths, pair, random)
            toggle_offload(a, n, orders, lengths, other, random)
        return
    if recompute and dice < 30:
        run = 1 if draw(random, 3) > 0 else 1 + draw(random, 8)
        for k in range(run):
            if j + k < m:
                toggle_recompute(a, n, orders, lengths, pair + k, random)
        return
    by = 1 + draw(random, 4 if draw(random, 3) > 0 else 4 * orders.shape[0])
    if draw(random, 2) == 0:
        by = -by
    if dice < 60:
        shift(a, n, orders, lengths, op, by)
    elif dice < 80:
        run = 2 + draw(random, 8 if draw(random, 2) == 0 else m)
        for k in range(run):
            # The first to move makes room for the next.
            step = k if by < 0 else run - 1 - k
            if j + step < m:
                shift(a, n, orders, lengths, op + step, by)
    else:
        run = 2 + draw(random, a.stages)
        for k in range(run):
            if stage + k < a.stages:
                shift(a, n, orders, lengths, op + k * m, by)


@jit
def critical_path(a: Layout, x: Floats, n: Ints, path: Ints) -> int:
    """Write the operations that the objective hangs on into `path`, last first; returns their number."""
    longest, last = -1.0, -1
    for d in range(a.devices):
        length = length_of(a, x, n, d)
        if length > longest:
            longest, last = length, n[a.compute + d]
    count = 0
    while last >= 0 and count < len(path):
        path[count] = last
        count += 1
        last = n[a.cause + last]
    return count


@jit
def spread(a: Layout, x: Floats, orders: Ints, lengths: Ints) -> float:
    """Mean end of the devices' last backwards for inputs: a slope on the plateaus of the objective."""
    size = a.stages * a.micro_batches
    total = 0.0
    for d in range(a.devices):
        for index in range(lengths[d] - 1, -1, -1):
            kind = orders[d, index] // size
            if kind == I or kind == B:  # noqa: SIM109 - compiles to less
                total += x[a.end + orders[d, index]]
                break
    return total / a.devices


@jit
def measure(
    a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, at: int, threshold: float, only_computes: bool
) -> float:
    """What `evaluate` says of lists that begin as those kept, up to a mark.

    `only_computes`: the lists hold F, I and W alone, and messages are asynchronous.
    """
    if only_computes:
        if at == START:
            return evaluate_computing(a, x, n, orders, lengths, threshold)
        return walk_computing(a, x, n, orders, lengths, threshold)
    if at == START:
        return evaluate(a, x, n, orders, lengths, threshold)
    return walk(a, x, n, orders, lengths, threshold)


@jit
def anneal(
    a: Layout, x: Floats, n: Ints, orders: Ints, lengths: Ints, best_orders: Ints, best_lengths: Ints,
    best_value: float, steps: int, hot: float, cold: float, weight: float, target: float, offload: bool,
    recompute: bool, only_computes: bool, random: Ints,
) -> tuple[float, int]:  # fmt: skip
    """Walk `steps` moves from (orders, lengths), cooling from `hot` to `cold`; keep the best in `best_*`.

    Returns (best objective, steps taken); stops at `target`.  The start must be feasible.
    """
    value = measure(a, x, n, orders, lengths, START, INFINITY, only_computes)
    keep(a, x, n, orders, lengths, orders, lengths, START)
    cost = value + weight * spread(a, x, orders, lengths)
    path = np.zeros(7 * a.stages * a.micro_batches, dtype=np.int64)
    count = critical_path(a, x, n, path)
    tried, tried_lengths = orders.copy(), lengths.copy()
    for step in range(steps):
        temperature = hot * (cold / hot) ** (step / steps)
        move(a, n, tried, tried_lengths, path, count, offload, recompute, random)
        at = common_mark(a, n, orders, lengths, tried, tried_lengths)
        if at == SAME:
            continue
        if recompute or not a.resumable:
            at = START
        if at != START:
            resume(a, x, n, orders, lengths, at)
        allowed = cost - temperature * np.log((1 + draw(random, 1000000)) / 1000000.0)
        found = measure(a, x, n, tried, tried_lengths, at, allowed, only_computes)
        price = found + weight * spread(a, x, tried, tried_lengths) if found < INFINITY else INFINITY
        if price > allowed:
            put_back(a, x, n, orders, lengths, tried, tried_lengths, at)
            tried[:] = orders
            tried_lengths[:] = lengths
            continue
        cost = price
        keep(a, x, n, tried, tried_lengths, orders, lengths, at)
        orders[:] = tried
        lengths[:] = tried_lengths
        count = critical_path(a, x, n, path)
        if found < best_value:
            best_value = found
            best_orders[:] = orders
            best_lengths[:] = lengths
            if found <= target:
                return best_value, step + 1
    return best_value, steps
