"""The compiled local search: simulated annealing over the devices' lists, with moves on the critical path.

A state is one list per device.  Moves shift operations within a list or exchange two (never across operations of the
same kind and stage or of the same pair), or add or remove a pair's offload or recomputation.  A pair is a (stage,
micro-batch).
"""

from __future__ import annotations

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit, jit_without_refcounts
from debubble.search.annealing.evaluate import advance, evaluate, set_cost_rows, sum_work
from debubble.search.annealing.incremental import SAME, START, accept, last_common_mark, resume_from_mark, revert
from debubble.search.annealing.layout import COUNT, DEEPER, B, F, I, KernelLayout, L, O, R, Shares
from debubble.search.annealing.rules import INFINITY, device_objective, step_on_hosts
from debubble.search.annealing.shared_links import restore_lists, resume_by_arrival

PRIME = 2147483647
"""Modulus of the random numbers."""


@jit_without_refcounts
def draw(state: Ints, below: int) -> int:
    """A pseudo-random number in [0, below) by Park and Miller's generator, identical compiled or not."""
    state[0] = state[0] * 48271 % PRIME
    drawn: int = state[0] * below // PRIME
    return drawn


@jit_without_refcounts
def find(orders: Ints, lengths: Ints, d: int, op: int) -> int:
    """Find the position of an operation in its device's list; -1 if it is not there."""
    for index in range(lengths[d]):
        if orders[d, index] == op:
            return index
    return -1


@jit_without_refcounts
def shift(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, op: int, by: int) -> int:
    """Move an operation by up to `by` positions, until one of its kind or of its pair is in the way."""
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
        neighbor = orders[d, other]
        if neighbor % size == pair or neighbor // a.micro_batches == op // a.micro_batches:
            break
        orders[d, index], orders[d, other] = orders[d, other], orders[d, index]
        index = other
        moved += step
    return moved


@jit_without_refcounts
def would_pass(a: KernelLayout, orders: Ints, d: int, op: int, low: int, high: int) -> bool:
    """Tell whether another operation of its kind or of its pair is between two positions of a list."""
    size = a.stages * a.micro_batches
    for index in range(low, high + 1):
        other = orders[d, index]
        if other != op and (other % size == op % size or other // a.micro_batches == op // a.micro_batches):
            return True
    return False


@jit_without_refcounts
def exchange(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, op: int, by: int) -> None:
    """Exchange an operation and the one `by` positions away, unless one would pass its kind or its pair.

    Exchanging two forwards, or two backwards, leaves the memory in between unchanged, so it is possible on a full
    device where a shift is not.
    """
    d = n[a.device_of + op % (a.stages * a.micro_batches) // a.micro_batches]
    here = find(orders, lengths, d, op)
    there = here + by
    if here < 0 or there < 0 or there >= lengths[d]:
        return
    low, high, other = min(here, there), max(here, there), orders[d, there]
    if not would_pass(a, orders, d, op, low, high) and not would_pass(a, orders, d, other, low, high):
        orders[d, here], orders[d, there] = other, op


@jit_without_refcounts
def insert(orders: Ints, lengths: Ints, d: int, index: int, op: int) -> None:
    """Insert an operation into a list."""
    for position in range(lengths[d], index, -1):
        orders[d, position] = orders[d, position - 1]
    orders[d, index] = op
    lengths[d] += 1


@jit_without_refcounts
def remove(orders: Ints, lengths: Ints, d: int, index: int) -> None:
    """Remove an operation from a list."""
    lengths[d] -= 1
    for position in range(index, lengths[d]):
        orders[d, position] = orders[d, position + 1]


@jit_without_refcounts
def find_backward(a: KernelLayout, orders: Ints, lengths: Ints, d: int, pair: int) -> int:
    """Find the position of a pair's backward, or of the R before it."""
    size = a.stages * a.micro_batches
    for index in range(lengths[d]):
        op = orders[d, index]
        kind = op // size
        if op % size == pair and (R <= kind < O or kind == I or kind == B):  # noqa: SIM109 - compiles to less
            return index
    return -1


@jit_without_refcounts
def find_recompute(a: KernelLayout, orders: Ints, lengths: Ints, d: int, pair: int) -> int:
    """Find the position of a pair's R, of either level; -1 if there is none."""
    size = a.stages * a.micro_batches
    for index in range(lengths[d]):
        op = orders[d, index]
        if op % size == pair and R * size <= op < O * size:
            return index
    return -1


@jit_without_refcounts
def toggle_offload(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Remove a pair's offload and reload, or insert them: O after F, L a few positions before the backward."""
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    forward, backward = find(orders, lengths, d, F * size + pair), find_backward(a, orders, lengths, d, pair)
    position = find(orders, lengths, d, O * size + pair)
    if position >= 0:
        remove(orders, lengths, d, position)
        remove(orders, lengths, d, find(orders, lengths, d, L * size + pair))
        return
    insert(orders, lengths, d, forward + 1, O * size + pair)
    backward += 1
    insert(orders, lengths, d, max(forward + 2, backward - draw(random, 5)), L * size + pair)


@inlined
def toggle_recompute(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, pair: int, random: Ints) -> None:
    """Remove a pair's R or change its level, or insert one a few positions before the backward, after the reload."""
    size = a.stages * a.micro_batches
    d = n[a.device_of + pair // a.micro_batches]
    position = find_recompute(a, orders, lengths, d, pair)
    if position >= 0:
        if a.levels > 1 and draw(random, 2) == 0:
            orders[d, position] = (R + DEEPER) * size + 2 * pair - orders[d, position]
        else:
            remove(orders, lengths, d, position)
        return
    kind = R + draw(random, a.levels) if a.levels > 1 else R
    earliest = max(find(orders, lengths, d, F * size + pair), find(orders, lengths, d, L * size + pair))
    backward = find_backward(a, orders, lengths, d, pair)
    insert(orders, lengths, d, max(earliest + 1, backward - draw(random, 3)), kind * size + pair)


@jit_without_refcounts
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
    """Change the lists in place, with probability 1/2 at an operation on the critical path.

    Returns the first pair whose recomputation may have changed, and the number of such consecutive pairs.
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
    toggle_share, swap_share, recompute_share, single_share, several_share, stages_share = shares
    if offload and dice < toggle_share:
        run, stride = 1, 1
        if draw(random, 3) == 0:
            run, stride = 1 + draw(random, 8), 1 + draw(random, 3)
        for k in range(run):
            if j + k * stride < m:
                toggle_offload(a, n, orders, lengths, pair + k * stride, random)
        return 0, 0
    if offload and dice < swap_share:
        # Hand the offload to the neighboring micro-batch.
        other = pair + 1 if j + 1 < m and (j == 0 or draw(random, 2) == 0) else pair - 1
        if m > 1:
            toggle_offload(a, n, orders, lengths, pair, random)
            toggle_offload(a, n, orders, lengths, other, random)
        return 0, 0
    if recompute and dice < recompute_share:
        run = min(1 if draw(random, 3) > 0 else 1 + draw(random, 8), m - j)
        for k in range(run):
            toggle_recompute(a, n, orders, lengths, pair + k, random)
        return pair, run
    by = 1 + draw(random, 4 if draw(random, 3) > 0 else 4 * orders.shape[0])
    if draw(random, 2) == 0:
        by = -by
    if dice < single_share:
        shift(a, n, orders, lengths, op, by)
    elif dice < several_share:
        run = 2 + draw(random, 8 if draw(random, 2) == 0 else m)
        for k in range(run):
            # The first one to move makes way for the next.
            step = k if by < 0 else run - 1 - k
            if j + step < m:
                shift(a, n, orders, lengths, op + step, by)
    elif dice < stages_share:
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


@jit_without_refcounts
def update_recompute(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, pair: int, run: int, mark: int
) -> int:  # fmt: skip
    """Update the cost rows of a run of pairs whose recomputation has changed.

    Returns the last mark up to `mark` before their first forward, whose retained bytes have changed too.
    """
    d = n[a.device_of + pair // a.micro_batches]
    for other in range(pair, pair + run):
        position = find_recompute(a, orders, lengths, d, other)
        set_cost_rows(a, n, other, 0 if position < 0 else orders[d, position] // (a.stages * a.micro_batches) - R + 1)
    sum_work(a, x, n, orders, lengths, d)
    n[a.comparable] = 0
    index, size = lengths[d], a.stages * a.micro_batches
    while index > n[a.suffix_start + d] and not pair <= orders[d, index - 1] % size < pair + run:
        index -= 1
    n[a.suffix_start + d] = index
    forward = find(orders, lengths, d, F * size + pair)
    n[a.first_difference + d] = min(n[a.first_difference + d], forward)
    while mark >= 0 and n[a.mark_ints + mark * a.device_ints + d] > forward:
        mark -= 1
    return mark


@jit_without_refcounts
def undo(a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, pair: int, run: int) -> None:
    """Undo a move's evaluation; `orders` are the accepted lists, and `run` pairs may differ in recomputation."""
    revert(a, x, n)
    if run > 0:
        update_recompute(a, x, n, orders, lengths, pair, run, START)
    if a.by_arrival:
        restore_lists(a, x, n, orders, lengths)


@jit_without_refcounts
def copy_changed(a: KernelLayout, n: Ints, orders: Ints, lengths: Ints, target: Ints, target_lengths: Ints) -> None:
    """Copy the lists that the last move has changed, from their first difference on."""
    for d in range(a.devices):
        if n[a.first_difference + d] >= 0:
            target_lengths[d] = lengths[d]
            for index in range(n[a.first_difference + d], lengths[d]):
                target[d, index] = orders[d, index]


@jit_without_refcounts
def critical_path(a: KernelLayout, x: Floats, n: Ints, path: Ints) -> int:
    """Write the operations of the critical path into `path`, last first; returns their number."""
    if a.has_host_steps:
        step_on_hosts(a, x, n)
    longest, last = -1.0, -1
    for d in range(a.devices):
        length, op = device_objective(a, x, n, d)
        if length > longest:
            longest, last = length, op
    count = 0
    while last >= 0 and count < len(path):
        path[count] = last
        count += 1
        last = n[a.cause + last]
        if last >= 0 and x[a.end + last] < 0:
            # The cause of a message's arrival is stored as an I even if the backward is a B.
            last += (B - I) * a.stages * a.micro_batches
    return count


@jit_without_refcounts
def mean_backward(a: KernelLayout, x: Floats) -> float:
    """Mean end of the input-gradient backwards, up to a constant: a slope on the plateaus of the objective.

    The objective improves only when all longest paths get shorter; this measure improves with each of them.
    """
    size = a.stages * a.micro_batches
    split, fused = a.end + I * size, a.end + B * size
    mean: float = (x[split : split + size].sum() + x[fused : fused + size].sum()) / size
    return mean


@jit_without_refcounts
def evaluate_from_mark(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, candidate: Ints, candidate_lengths: Ints,
    mark: int, threshold: float, max_delay: float,
) -> tuple[float, int]:  # fmt: skip
    """Evaluate lists from a mark shared with the accepted ones; also returns the mark that it started from."""
    if mark != START and a.by_arrival:
        value, mark = resume_by_arrival(
            a, x, n, orders, lengths, candidate, candidate_lengths, mark, threshold, max_delay
        )
        if mark != START:
            return value, mark
    if mark == START:
        return evaluate(a, x, n, candidate, candidate_lengths, threshold, max_delay), mark
    resume_from_mark(a, x, n, orders, lengths, mark)
    return advance(a, x, n, candidate, candidate_lengths, threshold, max_delay), mark


@jit
def anneal(
    a: KernelLayout, x: Floats, n: Ints, orders: Ints, lengths: Ints, best_orders: Ints, best_lengths: Ints,
    best_value: float, steps: int, temperature: float, weight: float, target: float, offload: bool, recompute: bool,
    shares: Shares, random: Ints,
) -> tuple[float, int]:  # fmt: skip
    """Make `steps` moves from (orders, lengths) at a temperature, and store the best lists in `best_*`.

    Returns the best objective and the number of steps taken; stops at `target`.  The start must be feasible.
    """
    n[a.mark_counts] = 0
    value = evaluate(a, x, n, orders, lengths, INFINITY, INFINITY)
    # This is START; a literal would be compiled as another specialization.
    accept(a, x, n, n[a.mark_counts] - 1)
    cost = value + weight * mean_backward(a, x)
    path = np.zeros(COUNT * a.stages * a.micro_batches, dtype=np.int64)
    count = critical_path(a, x, n, path)
    candidate, candidate_lengths = orders.copy(), lengths.copy()
    for step in range(steps):
        pair, run = move(a, n, candidate, candidate_lengths, path, count, offload, recompute, shares, random)
        mark = last_common_mark(a, n, orders, lengths, candidate, candidate_lengths)
        if mark == SAME:
            continue
        if run > 0:
            mark = update_recompute(a, x, n, candidate, candidate_lengths, pair, run, mark)
        allowed = cost - temperature * np.log((1 + draw(random, 1000000)) / 1000000.0)
        candidate_value, mark = evaluate_from_mark(
            a, x, n, orders, lengths, candidate, candidate_lengths, mark, allowed, (allowed - cost) / weight
        )
        candidate_cost = candidate_value + weight * mean_backward(a, x) if candidate_value < INFINITY else INFINITY
        if candidate_cost > allowed:
            undo(a, x, n, orders, lengths, pair, run)
            copy_changed(a, n, orders, lengths, candidate, candidate_lengths)
            continue
        cost = candidate_cost
        accept(a, x, n, mark)
        copy_changed(a, n, candidate, candidate_lengths, orders, lengths)
        count = critical_path(a, x, n, path)
        if candidate_value < best_value:
            best_value = candidate_value
            best_orders[:] = orders
            best_lengths[:] = lengths
            if candidate_value <= target:
                return best_value, step + 1
    return best_value, steps
