"""The compiled local search: simulated annealing over the devices' lists, with moves on the critical path.

A state is one list per device.  Moves shift operations within a list, or let two change places (never across their own
kind or their own micro-batch), or put a (stage, micro-batch)'s offload or recomputation in or out.
"""

from __future__ import annotations

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined, jit
from debubble.search.annealing.evaluate import advance, choose_rows, count_work, evaluate
from debubble.search.annealing.incremental import SAME, START, common_mark, keep, put_back, resume
from debubble.search.annealing.layout import COUNT, DEEPER, B, F, I, KernelLayout, L, O, R, Shares
from debubble.search.annealing.rules import INFINITY, last_of, step_on_hosts
from debubble.search.annealing.shared_links import follow_back, go_on_by_arrival

PRIME = 2147483647
"""Modulus of the random numbers."""


@borrowing
def draw(state: Ints, below: int) -> int:
    """A pseudo-random number in [0, below): Park and Miller's generator, the same compiled or not."""
    state[0] = state[0] * 48271 % PRIME
    drawn: int = state[0] * below // PRIME
    return drawn


@borrowing
def find(orders: Ints, lengths: Ints, d: int, op: int) -> int:
    """Find the place of an operation in its device's list; -1 if it is not there."""
    for index in range(lengths[d]):
        if orders[d, index] == op:
            return index
    return -1


@borrowing
def shift(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, op: int, by: int) -> int:
    """Move an operation by up to `by` places, as far as nothing of its kind or its micro-batch is in the way."""
    size = a.stages * a.micro_batches
    pair = op % size
    d = n[a.device_of + pair // a.micro_batches]
    index = find(orders, lengths, d, op)
    if index < 0:
        return 0
    low, high = 0, lengths[d]
    step = 1 if by > 0 else -1
    moved = 0
    while moved != by:
        other = index + step
        if other < low or other >= high:
            break
        neighbour = orders[d, other]
        if neighbour % size == pair or neighbour // a.micro_batches == op // a.micro_batches:
            break
        orders[d, index], orders[d, other] = orders[d, other], orders[d, index]
        index = other
        moved += step
    return moved


@borrowing
def passes(a: KernelLayout, orders: Ints, d: int, op: int, low: int, high: int) -> bool:
    """Tell whether something other than it of its kind or its micro-batch stands between two places of a list."""
    size = a.stages * a.micro_batches
    for index in range(low, high + 1):
        other = orders[d, index]
        if other != op and (other % size == op % size or other // a.micro_batches == op // a.micro_batches):
            return True
    return False


@borrowing
def exchange(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, op: int, by: int) -> None:
    """Let an operation and the one `by` places away change places, unless one would pass its kind or its micro-batch.

    Two forwards, or two backwards, leave the memory as it was for all that stands between: where a device is full no
    shift from one to the other place is allowed.
    """
    d = n[a.device_of + op % (a.stages * a.micro_batches) // a.micro_batches]
    here = find(orders, lengths, d, op)
    there = here + by
    if here < 0 or there < 0 or there >= lengths[d]:
        return
    low, high, other = min(here, there), max(here, there), orders[d, there]
    if not passes(a, orders, d, op, low, high) and not passes(a, orders, d, other, low, high):
        orders[d, here], orders[d, there] = other, op


@borrowing
def insert(orders: Ints, lengths: Ints, d: int, index: int, op: int) -> None:
    """Put an operation into a list."""
    for at in range(lengths[d], index, -1):
        orders[d, at] = orders[d, at - 1]
    orders[d, index] = op
    lengths[d] += 1


@borrowing
def remove(orders: Ints, lengths: Ints, d: int, index: int) -> None:
    """Take an operation out of a list."""
    lengths[d] -= 1
    for at in range(index, lengths[d]):
        orders[d, at] = orders[d, at + 1]


@borrowing
def backward_at(a: KernelLayout, orders: Ints, lengths: Ints, d: int, pair: int) -> int:
    """Find the place of the backward of a (stage, micro-batch), or of the R before it."""
    size = a.stages * a.micro_batches
    for index in range(lengths[d]):
        op = orders[d, index]
        kind = op // size
        if op % size == pair and (R <= kind < O or kind == I or kind == B):  # noqa: SIM109 - compiles to less
            return index
    return -1


@borrowing
def recomputation_at(a: KernelLayout, orders: Ints, lengths: Ints, d: int, pair: int) -> int:
    """Find the place of the R of a (stage, micro-batch), of either level; -1 if there is none."""
    size = a.stages * a.micro_batches
    for index in range(lengths[d]):
        op = orders[d, index]
        if op % size == pair and R * size <= op < O * size:
            return index
    return -1


@borrowing
def toggle_offload(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Take an offload and its reload out, or put them in: O after F, L a few places before the backward."""
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    forward, backward = find(orders, lengths, d, F * size + pair), backward_at(a, orders, lengths, d, pair)
    at = find(orders, lengths, d, O * size + pair)
    if at >= 0:
        remove(orders, lengths, d, at)
        remove(orders, lengths, d, find(orders, lengths, d, L * size + pair))
        return
    insert(orders, lengths, d, forward + 1, O * size + pair)
    backward += 1
    insert(orders, lengths, d, max(forward + 2, backward - draw(random, 5)), L * size + pair)


@inlined
def toggle_recompute(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Take an R out or let it be of the other level, or put one a few places before the backward, after the reload."""
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    at = recomputation_at(a, orders, lengths, d, pair)
    if at >= 0:
        if a.levels > 1 and draw(random, 2) == 0:
            orders[d, at] = (R + DEEPER) * size + 2 * pair - orders[d, at]
        else:
            remove(orders, lengths, d, at)
        return
    kind = R + draw(random, a.levels) if a.levels > 1 else R
    earliest = max(find(orders, lengths, d, F * size + pair), find(orders, lengths, d, L * size + pair))
    backward = backward_at(a, orders, lengths, d, pair)
    insert(orders, lengths, d, max(earliest + 1, backward - draw(random, 3)), kind * size + pair)


@borrowing
def move(
    a: KernelLayout,
    n: Ints,
    orders: Ints,
    lengths: Ints,
    path: Ints,
    path_length: int,
    offload: bool,
    recompute: bool,
    shares: Shares,
    random: Ints,
) -> tuple[int, int]:
    """Change the lists in place: half of the time at an operation on the critical path.

    Returns the first pair that recomputes where it did not, or the other way round, and how many in a row do.
    """
    m, size = a.micro_batches, a.stages * a.micro_batches
    if path_length > 0 and draw(random, 2) == 0:
        op = path[draw(random, path_length)]
    else:
        d = draw(random, orders.shape[0])
        op = orders[d, draw(random, lengths[d])]
    pair = op % size
    stage, j = pair // m, pair % m
    dice = draw(random, 100)
    toggle, swap, again, single, several, stages = shares
    if offload and dice < toggle:
        run, stride = 1, 1
        if draw(random, 3) == 0:
            run, stride = 1 + draw(random, 8), 1 + draw(random, 3)
        for k in range(run):
            if j + k * stride < m:
                toggle_offload(a, n, orders, lengths, pair + k * stride, random)
        return 0, 0
    if offload and dice < swap:
        # To the neighbouring micro-batch.
        other = pair + 1 if j + 1 < m and (j == 0 or draw(random, 2) == 0) else pair - 1
        if m > 1:
            toggle_offload(a, n, orders, lengths, pair, random)
            toggle_offload(a, n, orders, lengths, other, random)
        return 0, 0
    if recompute and dice < again:
        run = min(1 if draw(random, 3) > 0 else 1 + draw(random, 8), m - j)
        for k in range(run):
            toggle_recompute(a, n, orders, lengths, pair + k, random)
        return pair, run
    by = 1 + draw(random, 4 if draw(random, 3) > 0 else 4 * orders.shape[0])
    if draw(random, 2) == 0:
        by = -by
    if dice < single:
        shift(a, n, orders, lengths, op, by)
    elif dice < several:
        run = 2 + draw(random, 8 if draw(random, 2) == 0 else m)
        for k in range(run):
            # The first to move makes room for the next.
            step = k if by < 0 else run - 1 - k
            if j + step < m:
                shift(a, n, orders, lengths, op + step, by)
    elif dice < stages:
        run = 2 + draw(random, a.stages)
        for k in range(run):
            if stage + k < a.stages:
                shift(a, n, orders, lengths, op + k * m, by)
    else:
        run = 1 if draw(random, 2) == 0 else 2 + draw(random, 8)
        for k in range(run):
            if j + k < m:
                exchange(a, n, orders, lengths, op + k, by)
    return 0, 0


@borrowing
def recompute_otherwise(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, pair: int, run: int, at: int
) -> int:  # fmt: skip
    """Let a run of pairs, which the lists now recompute or do not, cost accordingly.

    Returns the last mark up to `at` that their first forward comes after: what it keeps has changed too.
    """
    d = n[a.device_of + pair // a.micro_batches]
    for other in range(pair, pair + run):
        found = recomputation_at(a, orders, lengths, d, other)
        choose_rows(a, n, other, 0 if found < 0 else orders[d, found] // (a.stages * a.micro_batches) - R + 1)
    count_work(a, x, n, orders, lengths, d)
    n[a.alike] = 0
    index, size = lengths[d], a.stages * a.micro_batches
    while index > n[a.shared + d] and not pair <= orders[d, index - 1] % size < pair + run:
        index -= 1
    n[a.shared + d] = index
    forward = find(orders, lengths, d, F * size + pair)
    n[a.differs + d] = min(n[a.differs + d], forward)
    while at >= 0 and n[a.mark_ints + at * a.device_ints + d] > forward:
        at -= 1
    return at


@borrowing
def undo(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, pair: int, run: int) -> None:
    """Go back from a move to the accepted lists, where a run of pairs may recompute otherwise."""
    put_back(a, x, n)
    if run > 0:
        recompute_otherwise(a, x, n, orders, lengths, pair, run, START)
    if a.by_arrival:
        follow_back(a, x, n, orders, lengths)


@borrowing
def copy_changed(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, to: Ints, to_lengths: Ints) -> None:
    """Copy the lists that the last move has changed, from where they differ on."""
    for d in range(a.devices):
        if n[a.differs + d] >= 0:
            to_lengths[d] = lengths[d]
            for index in range(n[a.differs + d], lengths[d]):
                to[d, index] = orders[d, index]


@borrowing
def critical_path(a: KernelLayout, x: Floats, n: Ints, path: Ints) -> int:
    """Write the operations that the objective hangs on into `path`, last first; returns their number."""
    if a.hosted:
        step_on_hosts(a, x, n)
    longest, last = -1.0, -1
    for d in range(a.devices):
        length, op = last_of(a, x, n, d)
        if length > longest:
            longest, last = length, op
    count = 0
    while last >= 0 and count < len(path):
        path[count] = last
        count += 1
        last = n[a.cause + last]
        if last >= 0 and x[a.end + last] < 0:
            # The input of a backward is noted as that of an I.
            last += (B - I) * a.stages * a.micro_batches
    return count


@borrowing
def mean_backward(a: KernelLayout, x: Floats) -> float:
    """Mean end of the backwards for inputs, but for a constant: a slope on the plateaus of the objective.

    The longest path is shorter only when all of the longest are; this sees each of them.
    """
    size = a.stages * a.micro_batches
    apart, fused = a.end + I * size, a.end + B * size
    mean: float = (x[apart : apart + size].sum() + x[fused : fused + size].sum()) / size
    return mean


@borrowing
def measure(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, tried: Ints, tried_lengths: Ints, at: int,
    threshold: float, latest: float,
) -> tuple[float, int]:  # fmt: skip
    """Evaluate lists that begin as the accepted ones do, from a mark on; also return the mark that it started from."""
    if at != START and a.by_arrival:
        value, at = go_on_by_arrival(a, x, n, orders, lengths, tried, tried_lengths, at, threshold, latest)
        if at != START:
            return value, at
    if at == START:
        return evaluate(a, x, n, tried, tried_lengths, threshold, latest), at
    resume(a, x, n, orders, lengths, at)
    return advance(a, x, n, tried, tried_lengths, threshold, latest), at


@jit
def anneal(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, best_orders: Ints, best_lengths: Ints,
    best_value: float, steps: int, temperature: float, weight: float, target: float, offload: bool, recompute: bool,
    shares: Shares, random: Ints,
) -> tuple[float, int]:  # fmt: skip
    """Make `steps` moves from (orders, lengths) at a temperature; keep the best in `best_*`.

    Returns (best objective, steps taken); stops at `target`.  The start must be feasible.
    """
    n[a.marked] = 0
    value = evaluate(a, x, n, orders, lengths, INFINITY, INFINITY)
    # START; a literal would be compiled apart.
    keep(a, x, n, n[a.marked] - 1)
    cost = value + weight * mean_backward(a, x)
    path = np.zeros(COUNT * a.stages * a.micro_batches, dtype=np.int64)
    count = critical_path(a, x, n, path)
    tried, tried_lengths = orders.copy(), lengths.copy()
    for step in range(steps):
        pair, run = move(a, n, tried, tried_lengths, path, count, offload, recompute, shares, random)
        at = common_mark(a, n, orders, lengths, tried, tried_lengths)
        if at == SAME:
            continue
        if run > 0:
            at = recompute_otherwise(a, x, n, tried, tried_lengths, pair, run, at)
        allowed = cost - temperature * np.log((1 + draw(random, 1000000)) / 1000000.0)
        tried_value, at = measure(
            a, x, n, orders, lengths, tried, tried_lengths, at, allowed, (allowed - cost) / weight
        )
        price = tried_value + weight * mean_backward(a, x) if tried_value < INFINITY else INFINITY
        if price > allowed:
            undo(a, x, n, orders, lengths, pair, run)
            copy_changed(a, n, orders, lengths, tried, tried_lengths)
            continue
        cost = price
        keep(a, x, n, at)
        copy_changed(a, n, tried, tried_lengths, orders, lengths)
        count = critical_path(a, x, n, path)
        if tried_value < best_value:
            best_value = tried_value
            best_orders[:] = orders
            best_lengths[:] = lengths
            if tried_value <= target:
                return best_value, step + 1
    return best_value, steps
