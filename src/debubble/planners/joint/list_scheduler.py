"""A compiled list scheduler: a whole step in a fraction of a millisecond, under memory limits and links to the host.

Devices decide in the order of time.  A device that is free takes a backward whose gradient has come, else a forward
for which there is room, else a recomputation whose gradient is yet to come, else a weight gradient; it waits only for
what it knows will come soon.  Offloads leave when their forward ends, or before where units stream, first come first
served on the link, and come back when their micro-batch is `horizon` operations away from the stage's backward.  The
policy says how far it goes in each of these; a search over policies, partitions and levels of recomputation calls this
thousands of times.

Times and bytes are floats.  What it says of a schedule with offloads differs a little from `lower` and `simulate`,
where a device asks for a shared link once its transfer before has ended, and a reload may start with the operation
before it: whoever keeps an order simulates it.

It is no rule of search/constructive/dispatch.py, the other compiled list scheduler.  That one makes few orders of given
stages for any numbers, fractions too, and its rules see what has arrived; here a device also weighs what is in flight
to and from the host, and a search that makes ten thousand schedules a second gives most of them up half way.  The one
loop for both would ask at every operation which of the two it is.  Tests hold each against the simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.ir import Kind, Op
from debubble.kernels import inlined, jit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

F, I, W, O, L, R = range(6)  # noqa: E741 - the field's letters
KINDS = (Kind.F, Kind.I, Kind.W, Kind.O, Kind.L, Kind.R)

COLUMNS = 17
(
    FORWARD, INPUT, WEIGHT, SEND, KEPT, WORKSPACE, FREED, AFTER, MOVED, TRANSFER, LOAD, DRAIN, STEP, AGAIN, DROPPED,
    OUT_LEAD, BACK_LEAD
) = range(COLUMNS)  # fmt: skip
"""Columns of the table of stages: times of F, I and W, where I recomputes; time of a message to the next stage; bytes
that F leaves, that I allocates, that I frees and that W frees; bytes that O moves, and the time it takes; times in
which parameters come from the host, gradients go there, and the optimizer steps there, 0 where the optimizer's states
are on the device; time of I's recomputation, and the bytes that R brings back where it is an operation of its own; how
long before the end of F its offload may start, and I before that of its reload; an R is planned behind all of it."""

BACKLOG, PATIENCE, HORIZON, PREFETCH, AGE, AHEAD = range(6)
"""Entries of a policy: weight gradients that a device lets wait at most; the part of a weight gradient's time by which
it may delay what is known to come; operations of a micro-batch before a backward at which its reload may start; reloads
that a device may have under way; the periods that a micro-batch's age counts for against its depth among forwards;
micro-batches that a device may have recomputed before their gradients come."""


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


class PlacedOperations(NamedTuple):
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


def schedule(table: StageTable, scales: Floats, policy: Floats, most: Ints) -> PlacedOperations:
    """Build the schedule of a step.

    Args:
        table: The stages.
        scales: Per micro-batch, its length: the factor on its times and bytes.
        policy: The entries above.
        most: Per stage, the micro-batches that may be between their forward and their backward.

    Returns:
        The schedule.
    """
    count = len(table.stages) * len(scales)
    operations, keys = np.empty((6 * count, 3), dtype=np.int64), np.empty(6 * count)
    placed, makespan, missing = place(*table, scales, policy, most, np.inf, np.inf, operations, keys)
    return PlacedOperations(makespan, missing, operations[:placed], keys[:placed])


def makespan(table: StageTable, scales: Floats, policy: Floats, most: Ints) -> tuple[float, int]:
    """The time of the step, and how many operations could not be placed."""
    nothing = np.empty((0, 3), dtype=np.int64), np.empty(0)
    _, time, missing = place(*table, scales, policy, most, np.inf, np.inf, *nothing)
    return time, missing


@inlined
def _stages_by_device(stages: Floats, device_of: Ints, devices: int) -> tuple[Ints, Ints, float]:
    """Per device its stages and their number, and the time of a micro-batch on the busiest device."""
    stages_of = np.full((devices, len(stages)), -1)
    count, work = np.zeros(devices, np.int64), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        stages_of[d, count[d]] = s
        count[d] += 1
        work[d] += stages[s, FORWARD] + stages[s, INPUT] + stages[s, WEIGHT]
    return stages_of, count, work.max()


@inlined
def _depths(stages: Floats) -> tuple[Floats, Floats]:
    """Per stage, the time that a micro-batch takes to it forwards, and from the last stage to it backwards."""
    forward, backward = np.zeros(len(stages)), np.zeros(len(stages))
    for s in range(1, len(stages)):
        forward[s] = forward[s - 1] + stages[s - 1, FORWARD] + stages[s - 1, SEND]
    for s in range(len(stages) - 2, -1, -1):
        backward[s] = backward[s + 1] + stages[s + 1, INPUT] + stages[s, SEND]
    return forward, backward


@inlined
def _tails(stages: Floats, scales: Floats) -> Floats:
    """[F, I or W, stage, micro-batch]: the least time from the end of that operation to the end of the step.

    What is left is the rest of the micro-batch's way, on each stage of it the younger ones, which come in order, their
    weight gradients, and the step on the host behind the last of these.
    """
    S, m = len(stages), len(scales)
    behind = np.zeros((3, S, m))
    backward = stages[:, INPUT] - stages[:, AGAIN]
    for j in range(m - 1, -1, -1):
        last = j == m - 1
        own, next_ = scales[j], scales[min(j + 1, m - 1)]
        for s in range(S):
            if last:
                behind[W, s, j] = stages[s, DRAIN] + stages[s, STEP]
            else:
                behind[W, s, j] = behind[W, s, j + 1] + next_ * stages[s, WEIGHT]
            least = behind[W, s, j] + own * stages[s, WEIGHT]
            if not last:
                least = max(least, behind[I, s, j + 1] + next_ * backward[s])
            if s > 0:
                least = max(least, behind[I, s - 1, j] + own * stages[s - 1, SEND] + own * backward[s - 1])
            behind[I, s, j] = least
        for s in range(S - 1, -1, -1):
            if s == S - 1:
                least = behind[I, s, j] + own * backward[s]
            else:
                least = behind[F, s + 1, j] + own * stages[s, SEND] + own * stages[s + 1, FORWARD]
            if not last:
                least = max(least, behind[F, s, j + 1] + next_ * stages[s, FORWARD])
            behind[F, s, j] = least
    return behind


@inlined
def _totals(stages: Floats, device_of: Ints, devices: int, scales: Floats) -> tuple[Floats, Floats]:
    """Per device, the time of all its operations, and the room kept for one backward: its workspace and its reload."""
    whole, longest = scales.sum(), scales.max()
    rest, reserve = np.zeros(devices), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        rest[d] += whole * (stages[s, FORWARD] + stages[s, INPUT] + stages[s, WEIGHT])
        reserve[d] = max(reserve[d], longest * (stages[s, WORKSPACE] + stages[s, MOVED]))
    return rest, reserve


@inlined
def _load_parameters(stages: Floats, device_of: Ints, up: Ints, lanes: Floats) -> Floats:
    """Let parameters come from the hosts that step them; returns per stage when its first forward has them."""
    loaded = np.zeros(len(stages))
    for s in range(len(stages)):
        if stages[s, STEP] > 0:
            lanes[up[device_of[s]]] += stages[s, LOAD]
            loaded[s] = lanes[up[device_of[s]]]
    return loaded


@inlined
def _due_reload(
    own: Ints, stages: Floats, next_f: Ints, next_l: Ints, started: Ints, back: Floats, horizon: int, period: float,
    depth: Floats, now: float,
) -> int:  # fmt: skip
    """The stage of the most urgent reload whose offload has ended and whose backward is near; -1: none is due."""
    best, best_key = -1, np.inf
    for s in own:
        j = next_l[s]
        if stages[s, MOVED] > 0 and j < next_f[s] and started[j] >= 2 * len(stages) - 1 - s - horizon:
            key = j * period + depth[s]
            if back[s, j] <= now and key < best_key:
                best, best_key = s, key
    return best


@inlined
def _ready_backward(
    own: Ints, stages: Floats, scales: Floats, next_i: Ints, next_r: Ints, next_l: Ints, gradient: Floats, back: Floats,
    room: float, period: float, depth: Floats, now: float,
) -> tuple[int, float]:  # fmt: skip
    """The stage of the oldest backward that can start now, -1 for none, and when the next of the others can."""
    best, best_key, soon = -1, np.inf, np.inf
    for s in own:
        j = next_i[s]
        if j >= gradient.shape[1] or gradient[s, j] == np.inf:
            continue
        if scales[j] * (stages[s, WORKSPACE] - (stages[s, DROPPED] if j < next_r[s] else 0.0)) > room:
            continue
        ready = gradient[s, j]
        if stages[s, MOVED] > 0:
            ready = max(ready, back[s, j] - scales[j] * stages[s, BACK_LEAD]) if j < next_l[s] else np.inf
        if ready > now:
            soon = min(soon, ready)
        elif j * period + depth[s] < best_key:
            best, best_key = s, j * period + depth[s]
    return best, soon


@inlined
def _ready_forward(
    own: Ints, stages: Floats, scales: Floats, next_f: Ints, next_i: Ints, most: Ints, data: Floats, room: float,
    spare: float, age: float, depth: Floats, now: float, soon: float,
) -> tuple[int, float]:  # fmt: skip
    """The stage of the forward that is to start now, -1 for none, and when the next other operation can.

    Besides what it keeps, it must leave `spare` bytes, or room for its own backward where nothing else is in flight.
    """
    best, best_key = -1, np.inf
    for s in own:
        j = next_f[s]
        if j >= data.shape[1] or data[s, j] == np.inf or j - next_i[s] >= most[s]:
            continue
        if scales[j] * stages[s, KEPT] + max(spare, scales[j] * stages[s, WORKSPACE]) > room:
            continue
        if data[s, j] > now:
            soon = min(soon, data[s, j])
        elif age * j - depth[s] < best_key:
            best, best_key = s, age * j - depth[s]
    return best, soon


@inlined
def _next_recomputation(
    own: Ints, stages: Floats, scales: Floats, next_f: Ints, next_r: Ints, next_l: Ints, back: Floats, room: float,
    period: float, depth: Floats, now: float,
) -> int:  # fmt: skip
    """The stage of the oldest micro-batch that can be recomputed before its gradient has come; -1 for none."""
    best, best_key = -1, np.inf
    for s in own:
        j = next_r[s]
        if j >= next_f[s] or stages[s, AGAIN] <= 0 or scales[j] * stages[s, DROPPED] > room:
            continue
        if stages[s, MOVED] > 0 and (j >= next_l[s] or back[s, j] > now):
            continue
        if j * period + depth[s] < best_key:
            best, best_key = s, j * period + depth[s]
    return best


@inlined
def _oldest_weight(own: Ints, next_w: Ints, next_i: Ints, period: float, depth: Floats) -> int:
    """The stage of the oldest weight gradient that waits."""
    best, best_key = -1, np.inf
    for s in own:
        if next_w[s] < next_i[s] and next_w[s] * period + depth[s] < best_key:
            best, best_key = s, next_w[s] * period + depth[s]
    return best


@inlined
def _earliest(wake: Floats) -> int:
    """The device that decides first."""
    d = 0
    for other in range(1, len(wake)):
        if wake[other] < wake[d]:
            d = other
    return d


@inlined
def _take_link(lanes: Floats, lane: int, now: float, duration: float) -> float:
    """Let a transfer start as soon as its lane is free; returns when it ends."""
    end: float = max(now, lanes[lane]) + duration
    lanes[lane] = end
    return end


@inlined
def _record(operations: Ints, keys: Floats, placed: int, kind: int, s: int, j: int, key: float) -> int:
    """Write an operation down, if that is asked for; returns how many there are then."""
    if len(keys) == 0:
        return placed
    operations[placed, 0], operations[placed, 1], operations[placed, 2] = kind, s, j
    keys[placed] = key
    return placed + 1


@jit
def place(
    stages: Floats, device_of: Ints, room: Floats, down: Ints, up: Ints, scales: Floats, policy: Floats, most: Ints,
    threshold: float, until: float, operations: Ints, keys: Floats,
) -> tuple[int, float, int]:  # fmt: skip
    """Place all operations, and say how many, when the last one ends, and how many compute operations are missing.

    It is given up, with an infinite time and nothing missing, as soon as the step must end behind the threshold; and it
    stops before what would start at `until`.
    """
    S, P, m = len(stages), len(room), len(scales)
    never = np.inf
    backlog, patience, horizon = policy[BACKLOG], policy[PATIENCE], int(policy[HORIZON])
    prefetch, age, ahead = int(policy[PREFETCH]), policy[AGE], int(policy[AHEAD])

    stages_of, count, period = _stages_by_device(stages, device_of, P)
    forward_depth, backward_depth = _depths(stages)
    # Who stops early has no use for what is behind.
    behind = _tails(stages, scales) if until == never else np.zeros((3, S, m))
    rest, reserve = _totals(stages, device_of, P, scales)

    next_f, next_i, next_w = np.zeros(S, np.int64), np.zeros(S, np.int64), np.zeros(S, np.int64)
    next_l, next_r = np.zeros(S, np.int64), np.zeros(S, np.int64)
    data, gradient, back = np.full((S, m), never), np.full((S, m), never), np.full((S, m), never)
    started = np.zeros(m, np.int64)  # operations of each micro-batch's chain, F down and I up, that have started
    used, free, wake = np.zeros(P), np.zeros(P), np.zeros(P)
    waiting_w, in_flight, under_way = np.zeros(P, np.int64), np.zeros(P, np.int64), np.zeros(P, np.int64)
    early = np.zeros(P, np.int64)  # micro-batches that are recomputed and wait for their gradients
    leaving = np.full((P, 2), -1)
    # Offloads whose bytes are not free yet: a queue per device.
    queue_time, queue_bytes = np.empty((P, S * m)), np.empty((P, S * m))
    queue_head, queue_tail = np.zeros(P, np.int64), np.zeros(P, np.int64)
    lanes, stepped = np.zeros(2 * P + 2), np.zeros(P)
    loaded = _load_parameters(stages, device_of, up, lanes)
    data[0, :] = loaded[0]

    left, placed, last = 3 * S * m, 0, 0.0
    while left > 0:
        d = _earliest(wake)
        now = wake[d]
        if now >= until:
            break
        if leaving[d, 0] >= 0:
            # The forward that has just ended hands its activation to the link; a reload comes after its offload.
            s, j = leaving[d]
            ready = now - scales[j] * stages[s, OUT_LEAD]
            back[s, j] = gone = _take_link(lanes, down[d], ready, scales[j] * stages[s, TRANSFER])
            queue_time[d, queue_tail[d]], queue_bytes[d, queue_tail[d]] = gone, scales[j] * stages[s, MOVED]
            queue_tail[d] += 1
            leaving[d, 0] = -1
            placed = _record(operations, keys, placed, O, s, j, gone)
        while queue_head[d] < queue_tail[d] and queue_time[d, queue_head[d]] <= now:
            used[d] -= queue_bytes[d, queue_head[d]]
            queue_head[d] += 1

        # Reloads that are due: the most urgent first.
        while under_way[d] < prefetch:
            best = _due_reload(
                stages_of[d, : count[d]], stages, next_f, next_l, started, back, horizon, period, backward_depth, now
            )
            if best < 0:
                break
            j = next_l[best]
            if used[d] + scales[j] * (stages[best, MOVED] + stages[best, WORKSPACE]) > room[d]:
                break
            back[best, j] = _take_link(lanes, up[d], now, scales[j] * stages[best, TRANSFER])
            used[d] += scales[j] * stages[best, MOVED]
            next_l[best] += 1
            under_way[d] += 1
            placed = _record(operations, keys, placed, L, best, j, now)

        # What could start now, and when what cannot will be able to.
        own, unused = stages_of[d, : count[d]], room[d] - used[d]
        backward, soon = _ready_backward(
            own, stages, scales, next_i, next_r, next_l, gradient, back, unused, period, backward_depth, now
        )
        spare = reserve[d] if in_flight[d] > 0 else 0.0
        forward, soon = _ready_forward(
            own, stages, scales, next_f, next_i, most, data, unused, spare, age * period, forward_depth, now, soon
        )
        chosen, kind = (backward, I) if backward >= 0 else (forward, F) if forward >= 0 else (-1, -1)
        if kind < 0 and early[d] < ahead:
            # The backward that comes first may be another one: it has its room still.
            chosen = _next_recomputation(
                own, stages, scales, next_f, next_r, next_l, back, unused - reserve[d], period, backward_depth, now
            )
            kind = R if chosen >= 0 else -1
        if waiting_w[d] > 0 and (waiting_w[d] >= backlog or kind < 0):
            oldest = _oldest_weight(own, next_w, next_i, period, backward_depth)
            if waiting_w[d] >= backlog or now + patience * scales[next_w[oldest]] * stages[oldest, WEIGHT] <= soon:
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
            end = now + scales[j] * stages[s, FORWARD]
            used[d] += scales[j] * stages[s, KEPT]
            in_flight[d] += 1
            started[j] = max(started[j], s + 1)
            if s + 1 < S:
                arrival = max(end + scales[j] * stages[s, SEND], loaded[s + 1])
                data[s + 1, j] = arrival
                there = device_of[s + 1]
            else:
                arrival = end
                gradient[s, j] = end
                there = d
            if stages[s, MOVED] > 0:
                leaving[d, 0], leaving[d, 1] = s, j
        elif kind == I:
            j = next_i[s]
            next_i[s] += 1
            end = now + scales[j] * stages[s, INPUT]
            used[d] += scales[j] * (stages[s, WORKSPACE] - stages[s, FREED])
            if j < next_r[s]:
                end -= scales[j] * stages[s, AGAIN]
                used[d] -= scales[j] * stages[s, DROPPED]
                early[d] -= 1
            else:
                next_r[s] = j + 1
            in_flight[d] -= 1
            waiting_w[d] += 1
            started[j] = max(started[j], 2 * S - s)
            if stages[s, MOVED] > 0:
                under_way[d] -= 1
            if s > 0:
                arrival = end + scales[j] * stages[s - 1, SEND]
                gradient[s - 1, j] = arrival
                there = device_of[s - 1]
            else:
                arrival = end
                there = d
        elif kind == R:
            j = next_r[s]
            next_r[s] += 1
            early[d] += 1
            end = now + scales[j] * stages[s, AGAIN]
            used[d] += scales[j] * stages[s, DROPPED]
            arrival = end
            there = d
        else:
            j = next_w[s]
            next_w[s] += 1
            end = now + scales[j] * stages[s, WEIGHT]
            used[d] -= scales[j] * stages[s, AFTER]
            waiting_w[d] -= 1
            arrival = end
            there = d
            if j == m - 1 and stages[s, STEP] > 0:
                gone = _take_link(lanes, down[d], end, stages[s, DRAIN])
                stepped[d] = max(gone, stepped[d]) + stages[s, STEP]
                last = max(last, stepped[d])
        placed = _record(operations, keys, placed, kind, s, j, now)
        free[d] = wake[d] = end
        last = max(last, end)
        left -= 1 if kind != R else 0
        rest[d] -= end - now
        least = end + (max(rest[d], behind[kind, s, j]) if kind != R else rest[d])
        if least > threshold:
            return placed, never, 0
        if there != d:
            wake[there] = min(wake[there], max(arrival, free[there]))
        if kind < W:
            # A reload may be due now on a device that waits.
            due_stage = 2 * S - 1 - horizon - started[j]
            if 0 <= due_stage < S and stages[due_stage, MOVED] > 0:
                there = device_of[due_stage]
                wake[there] = min(wake[there], max(now, free[there]))
    if left > 0:
        last = never
    return placed, last, left
