"""A compiled list scheduler: a whole step in a fraction of a millisecond, under memory limits and links to the host.

Devices decide in the order of time.  A device that is free takes a backward whose gradient has come, else a forward
for which there is room, else a weight gradient; it waits only for what it knows will come soon.  Offloads leave when
their forward ends, first come first served on the link, and come back when their micro-batch is `horizon` operations
away from the stage's backward.  The policy says how far it goes in each of these; a search over policies, partitions
and levels of recomputation calls this thousands of times.

Times and bytes are floats.  What it says of a schedule differs a little from `lower` and `simulate`, where admission
waits for offloads in flight: whoever keeps an order simulates it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.ir import Kind, Op
from debubble.search.annealing.layout import jit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

F, I, W, O, L = range(5)  # noqa: E741 - the field's letters
KINDS = (Kind.F, Kind.I, Kind.W, Kind.O, Kind.L)

FORWARD, INPUT, WEIGHT, SEND, KEPT, WORKSPACE, FREED, AFTER, MOVED, TRANSFER = range(10)
"""Columns of the table of stages: times of F, I and W; time of a message to the next stage; bytes that F leaves, that I
allocates, that I frees and that W frees; bytes that O moves, and the time it takes."""

BACKLOG, PATIENCE, HORIZON, PREFETCH, AGE = range(5)
"""Entries of a policy: weight gradients that a device lets wait at most; the part of a weight gradient's time by which
it may delay what is known to come; operations of a micro-batch before a backward at which its reload may start; reloads
that a device may have under way; the periods that a micro-batch's age counts for against its depth among forwards."""


class StageTable(NamedTuple):
    """A partition as the scheduler sees it.

    Attributes:
        stages: A row per stage, with the columns above; times in the units' unit, sizes in bytes.
        device_of: Per stage, its device.
        room: Per device, bytes for activations.
        down: Per device, the number of the link's lane to the host.
        up: Per device, that of its lane from the host; the same as `down` where the link is half-duplex.
    """

    stages: Floats
    device_of: Ints
    room: Floats
    down: Ints
    up: Ints


class ListSchedule(NamedTuple):
    """The scheduler's result: the time of the step, and the operations in the order of their decision.

    Attributes:
        makespan: Time of the step; infinite if it got stuck.
        missing: Operations that it could not place, 0 if it is complete.
        operations: Rows of kind, stage, micro-batch.
        keys: Per operation, its place in its device's list: when it starts, or for O when it ends.
    """

    makespan: float
    missing: int
    operations: Ints
    keys: Floats

    def orders(self, device_of: Ints) -> tuple[tuple[Op, ...], ...]:
        """The lists of the devices."""
        devices = int(device_of.max()) + 1
        # At one moment an offload that ends comes first: what starts then may use its room.
        is_offload = self.operations[:, 0] == O
        order = np.lexsort((np.arange(len(self.keys)), ~is_offload, self.keys))
        lists: list[list[Op]] = [[] for _ in range(devices)]
        for kind, stage, micro_batch in self.operations[order].tolist():
            lists[int(device_of[stage])].append(Op(KINDS[kind], stage, micro_batch))
        return tuple(map(tuple, lists))


def schedule(table: StageTable, micro_batches: int, policy: Floats, most: Ints) -> ListSchedule:
    """Build the schedule of a step.

    Args:
        table: The stages.
        micro_batches: Their number.
        policy: The entries above.
        most: Per stage, the micro-batches that may be between their forward and their backward.

    Returns:
        The schedule.
    """
    count = len(table.stages) * micro_batches
    operations, keys = np.empty((5 * count, 3), dtype=np.int64), np.empty(5 * count)
    placed, makespan, missing = _place(*table, micro_batches, policy, most, operations, keys)
    return ListSchedule(makespan, missing, operations[:placed], keys[:placed])


def makespan(table: StageTable, micro_batches: int, policy: Floats, most: Ints) -> tuple[float, int]:
    """The time of the step, and how many operations could not be placed."""
    nothing = np.empty((0, 3), dtype=np.int64), np.empty(0)
    _, time, missing = _place(*table, micro_batches, policy, most, *nothing)
    return time, missing


@jit
def _place(
    stages: Floats, device_of: Ints, room: Floats, down: Ints, up: Ints, m: int, policy: Floats, most: Ints,
    operations: Ints, keys: Floats,
) -> tuple[int, float, int]:  # fmt: skip
    S, P = len(stages), len(room)
    recorded = len(keys) > 0
    never = np.inf
    backlog, patience, horizon = policy[BACKLOG], policy[PATIENCE], int(policy[HORIZON])
    prefetch, age = int(policy[PREFETCH]), policy[AGE]

    # The stages of each device, and how long a micro-batch takes on the busiest one.
    held = np.full((P, S), -1)
    count = np.zeros(P, np.int64)
    work = np.zeros(P)
    for s in range(S):
        d = device_of[s]
        held[d, count[d]] = s
        count[d] += 1
        work[d] += stages[s, FORWARD] + stages[s, INPUT] + stages[s, WEIGHT]
    period = work.max()
    down_depth, up_depth = np.zeros(S), np.zeros(S)
    for s in range(1, S):
        down_depth[s] = down_depth[s - 1] + stages[s - 1, FORWARD] + stages[s - 1, SEND]
    for s in range(S - 2, -1, -1):
        up_depth[s] = up_depth[s + 1] + stages[s + 1, INPUT] + stages[s, SEND]

    next_f, next_i, next_w = np.zeros(S, np.int64), np.zeros(S, np.int64), np.zeros(S, np.int64)
    next_l = np.zeros(S, np.int64)
    data, gradient = np.full((S, m), never), np.full((S, m), never)
    back = np.full((S, m), never)
    data[0, :] = 0.0
    started = np.zeros(m, np.int64)  # operations of each micro-batch's chain, F down and I up, that have started
    used = np.zeros(P)
    free = np.zeros(P)
    wake = np.zeros(P)
    waiting_w = np.zeros(P, np.int64)
    in_flight = np.zeros(P, np.int64)
    under_way = np.zeros(P, np.int64)
    lanes = np.zeros(2 * P + 2)
    # Offloads whose bytes are not free yet: a queue per device.
    queue_time, queue_bytes = np.empty((P, S * m)), np.empty((P, S * m))
    queue_head, queue_tail = np.zeros(P, np.int64), np.zeros(P, np.int64)
    # Room that is kept for the backward of one stage: its workspace, and its reload.
    reserve = np.zeros(P)
    for s in range(S):
        need = stages[s, WORKSPACE] + stages[s, MOVED]
        reserve[device_of[s]] = max(reserve[device_of[s]], need)

    left = 3 * S * m
    placed = 0
    last = 0.0
    while left > 0:
        d = 0
        for other in range(1, P):
            if wake[other] < wake[d]:
                d = other
        now = wake[d]
        if now == never:
            break
        while queue_head[d] < queue_tail[d] and queue_time[d, queue_head[d]] <= now:
            used[d] -= queue_bytes[d, queue_head[d]]
            queue_head[d] += 1

        # Reloads that are due: the most urgent first.
        while under_way[d] < prefetch:
            best, best_key = -1, never
            for c in range(count[d]):
                s = held[d, c]
                j = next_l[s]
                if (
                    stages[s, MOVED] > 0
                    and j < next_f[s]
                    and started[j] >= 2 * S - 1 - s - horizon
                    and back[s, j] <= now
                ):
                    key = j * period + up_depth[s]
                    if key < best_key:
                        best, best_key = s, key
            if best < 0 or used[d] + stages[best, MOVED] + stages[best, WORKSPACE] > room[d]:
                break
            j = next_l[best]
            begin = max(now, lanes[up[d]])
            lanes[up[d]] = back[best, j] = begin + stages[best, TRANSFER]
            used[d] += stages[best, MOVED]
            next_l[best] += 1
            under_way[d] += 1
            if recorded:
                operations[placed, 0], operations[placed, 1], operations[placed, 2] = L, best, j
                keys[placed] = now
                placed += 1

        # What could start now, and when what cannot will be able to.
        chosen, kind, key_chosen = -1, -1, never
        soon = never
        for c in range(count[d]):
            s = held[d, c]
            j = next_i[s]
            if j < m and gradient[s, j] < never:
                ready = gradient[s, j]
                if stages[s, MOVED] > 0:
                    ready = max(ready, back[s, j]) if j < next_l[s] else never
                if used[d] + stages[s, WORKSPACE] > room[d]:
                    continue
                if ready <= now:
                    key = j * period + up_depth[s]
                    if kind != I or key < key_chosen:
                        chosen, kind, key_chosen = s, I, key
                else:
                    soon = min(soon, ready)
        forward, forward_key = -1, never
        for c in range(count[d]):
            s = held[d, c]
            j = next_f[s]
            if j < m and data[s, j] < never and next_f[s] - next_i[s] < most[s]:
                spare = reserve[d] if in_flight[d] > 0 else stages[s, WORKSPACE]
                if used[d] + stages[s, KEPT] + spare > room[d]:
                    continue
                if data[s, j] <= now:
                    key = age * j * period - down_depth[s]
                    if key < forward_key:
                        forward, forward_key = s, key
                else:
                    soon = min(soon, data[s, j])
        if kind != I and forward >= 0:
            chosen, kind = forward, F
        if waiting_w[d] > 0 and (waiting_w[d] >= backlog or kind < 0):
            oldest, oldest_key = -1, never
            for c in range(count[d]):
                s = held[d, c]
                if next_w[s] < next_i[s]:
                    key = next_w[s] * period + up_depth[s]
                    if key < oldest_key:
                        oldest, oldest_key = s, key
            if waiting_w[d] >= backlog or now + patience * stages[oldest, WEIGHT] <= soon:
                chosen, kind = oldest, W

        if kind < 0:
            if queue_head[d] < queue_tail[d]:
                soon = min(soon, queue_time[d, queue_head[d]])
            wake[d] = soon
            continue

        s = chosen
        if kind == F:
            j = next_f[s]
            next_f[s] += 1
            end = now + stages[s, FORWARD]
            used[d] += stages[s, KEPT]
            in_flight[d] += 1
            started[j] = max(started[j], s + 1)
            if s + 1 < S:
                arrival = end + stages[s, SEND]
                data[s + 1, j] = arrival
                there = device_of[s + 1]
            else:
                arrival = end
                gradient[s, j] = end
                there = d
            if stages[s, MOVED] > 0:
                begin = max(end, lanes[down[d]])
                lanes[down[d]] = gone = begin + stages[s, TRANSFER]
                # A reload comes after its offload.
                back[s, j] = gone
                queue_time[d, queue_tail[d]], queue_bytes[d, queue_tail[d]] = gone, stages[s, MOVED]
                queue_tail[d] += 1
                if recorded:
                    operations[placed, 0], operations[placed, 1], operations[placed, 2] = O, s, j
                    keys[placed] = gone
                    placed += 1
        elif kind == I:
            j = next_i[s]
            next_i[s] += 1
            end = now + stages[s, INPUT]
            used[d] += stages[s, WORKSPACE] - stages[s, FREED]
            in_flight[d] -= 1
            waiting_w[d] += 1
            started[j] = max(started[j], 2 * S - s)
            if stages[s, MOVED] > 0:
                under_way[d] -= 1
            if s > 0:
                arrival = end + stages[s - 1, SEND]
                gradient[s - 1, j] = arrival
                there = device_of[s - 1]
            else:
                arrival = end
                there = d
        else:
            j = next_w[s]
            next_w[s] += 1
            end = now + stages[s, WEIGHT]
            used[d] -= stages[s, AFTER]
            waiting_w[d] -= 1
            arrival = end
            there = d
        if recorded:
            operations[placed, 0], operations[placed, 1], operations[placed, 2] = kind, s, j
            keys[placed] = now
            placed += 1
        free[d] = wake[d] = end
        last = max(last, end)
        left -= 1
        if there != d:
            wake[there] = min(wake[there], max(arrival, free[there]))
        if kind != W:
            # A reload may be due now on a device that waits.
            due_stage = 2 * S - 1 - horizon - started[j]
            if 0 <= due_stage < S and stages[due_stage, MOVED] > 0:
                there = device_of[due_stage]
                wake[there] = min(wake[there], max(now, free[there]))
    if left > 0:
        last = never
    return placed, last, left
