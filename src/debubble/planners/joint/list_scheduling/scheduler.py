"""A compiled list scheduler: a whole step in a fraction of a millisecond, under memory limits and links to the host.

Devices decide in the order of time.  A device that is free takes a backward whose gradient has come, else a forward
for which there is room, else a recomputation whose gradient is yet to come, else a weight gradient; it waits only for
what it knows will come soon.  Offloads leave when their forward ends, or before where its units stream, and come back
when their micro-batch is `horizon` operations away from the stage's backward.  The policy says how far it goes in each
of these; a search over policies, partitions and levels of recomputation calls this thousands of times.

A decision only puts an operation after the others in its device's list.  When it starts follows by the rules by which
the list is lowered and simulated: compute operations wait for what they use and for offloads whose room they need,
transfers as `transfers.py` says.  So the list takes the time that the scheduler says.

It is no rule of search/constructive/dispatch.py, the other compiled list scheduler.  That one makes few orders of given
stages for any numbers, fractions too, and its rules see what has arrived; here a device also weighs what is in flight
to and from the host, and a search that makes ten thousand schedules a second gives most of them up half way.  The one
loop for both would ask at every operation which of the two it is.  Tests hold each against the simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir import Kind, Op
from debubble.ir.arrays import Floats, Ints
from debubble.kernels import borrowing, inlined, jit
from debubble.planners.joint.list_scheduling.rules import (
    back_for,
    backward_capacity,
    backward_ready,
    choose,
    due_reload,
)
from debubble.planners.joint.list_scheduling.stage_table import (
    AFTER,
    AGAIN,
    AGAIN_LEAD,
    DROPPED,
    FORWARD,
    FREED,
    HOSTED,
    INPUT,
    KEPT,
    MOVED,
    SEND,
    WEIGHT,
    WORKSPACE,
    D,
    F,
    I,
    L,
    O,
    R,
    StageTable,
    W,
)
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, begun, place_of
from debubble.planners.joint.list_scheduling.transfers import (
    admitted,
    count_what_left,
    device_of_stream,
    earlier,
    first_to_ask,
    load_parameters,
    offload,
    push,
    reload,
    serve,
    wake_at,
)

KINDS = (Kind.F, Kind.I, Kind.W, Kind.O, Kind.L, Kind.R)


class PlacedOperations(NamedTuple):
    """The scheduler's result: the time of the step, and the operations in the order of their decision.

    Attributes:
        makespan: Time of the step; infinite if it got stuck.
        missing: Operations that it could not place, 0 if it is complete.
        operations: Rows of kind, stage, micro-batch.
    """

    makespan: float
    missing: int
    operations: Ints

    def orders(self, device_of: Ints) -> tuple[tuple[Op, ...], ...]:
        """The lists of the devices."""
        devices: list[int] = device_of.tolist()
        lists: list[list[Op]] = [[] for _ in range(max(devices) + 1)]
        for kind, stage, micro_batch in self.operations.tolist():
            lists[devices[stage]].append(Op(KINDS[kind], stage, micro_batch))
        return tuple(map(tuple, lists))


@inlined
def _earliest(wake: Floats) -> int:
    """The device that decides first."""
    d, least = 0, wake[0]
    for other in range(1, len(wake)):
        if wake[other] < least:
            d, least = other, wake[other]
    return d


@inlined
def _record(x: State, operations: Ints, starts: Floats, kind: int, s: int, j: int, start: float) -> None:
    """Write an operation down, if that is asked for."""
    if len(starts) > 0:
        n = x.placed[0]
        operations[n, 0], operations[n, 1], operations[n, 2] = kind, s, j
        starts[n] = start
        x.placed[0] = n + 1


@inlined
def _wake_for_reload(a: Step, x: State, j: int, now: float) -> None:
    """Let a device that waits decide on a reload that a micro-batch's progress has made due."""
    s = 2 * len(a.stages) - 1 - a.horizon - x.started[j]
    if 0 <= s < len(a.stages) and a.stages[s, MOVED] > 0:
        wake_at(x, a.device_of[s], now)


@inlined
def _begin(
    a: Step, x: State, d: int, ready: float, time: float, allocated: float, freed: float
) -> float:  # fmt: skip
    """Give the compute lane its next operation, which has all that it uses once that is ready; returns when it ends."""
    begin = admitted(a, x, d, max(x.free[d], ready), allocated)
    x.begun[d], x.free[d], x.freed[d] = begin, begin + time, freed
    x.used[d] += allocated - freed
    while x.known[d] < x.ended[d] and x.gone[d, x.known[d]] <= begin:
        x.unknown[d] -= x.gone_bytes[d, x.known[d]]
        x.known[d] += 1
    end: float = begin + time
    return end


@inlined
def _start_forward(a: Step, x: State, d: int, s: int) -> int:
    j = place_of(x.next_f[s])
    scale = a.scales[j]
    end = _begin(a, x, d, x.data[s, j], scale * a.stages[s, FORWARD], scale * a.stages[s, KEPT], 0.0)
    x.next_f[s] = j + 1
    x.in_flight[d] += 1
    x.started[j] = max(x.started[j], s + 1)
    if s + 1 < len(a.stages):
        arrival = end + scale * a.stages[s, SEND]
        if j == 0:
            x.arrived[s + 1] = arrival
            arrival = max(arrival, x.loaded[s + 1])
        x.data[s + 1, j] = arrival
        wake_at(x, a.device_of[s + 1], arrival)
    else:
        x.gradient[s, j] = end
    return j


@inlined
def _start_backward(a: Step, x: State, d: int, s: int) -> int:
    j = place_of(x.next_i[s])
    scale = a.scales[j]
    allocated, ready = backward_capacity(a, x, s, j), backward_ready(a, x, s, j)
    change = a.stages[s, WORKSPACE] - a.stages[s, FREED]
    time = a.stages[s, INPUT]
    if j < x.next_r[s]:
        change -= a.stages[s, DROPPED]
        x.early[d] -= 1
    else:
        time += a.stages[s, AGAIN]
        x.next_r[s] = j + 1
    end = _begin(a, x, d, ready, scale * time, allocated, allocated - scale * change)
    x.next_i[s] = j + 1
    x.in_flight[d] -= 1
    x.waiting[d] += 1
    x.started[j] = max(x.started[j], 2 * len(a.stages) - s)
    if a.stages[s, MOVED] > 0:
        x.under_way[d] -= 1
        x.away[d] -= scale * a.stages[s, MOVED]
    if s > 0:
        x.gradient[s - 1, j] = end + scale * a.stages[s - 1, SEND]
        wake_at(x, a.device_of[s - 1], x.gradient[s - 1, j])
    return j


@inlined
def _start_recomputation(a: Step, x: State, d: int, s: int) -> int:
    j = place_of(x.next_r[s])
    scale = a.scales[j]
    ready = back_for(a, x, s, j, AGAIN_LEAD) if a.stages[s, MOVED] > 0 else 0.0
    _begin(a, x, d, ready, scale * a.stages[s, AGAIN], scale * a.stages[s, DROPPED], 0.0)
    x.next_r[s] = j + 1
    x.early[d] += 1
    return j


@inlined
def _start_weight(a: Step, x: State, d: int, s: int) -> int:
    j = place_of(x.next_w[s])
    scale = a.scales[j]
    end = _begin(a, x, d, 0.0, scale * a.stages[s, WEIGHT], 0.0, scale * a.stages[s, AFTER])
    x.next_w[s] = j + 1
    x.waiting[d] -= 1
    if j == len(a.scales) - 1 and a.stages[s, HOSTED] > 0:
        push(a, x, d, D, s, j, end)
    return j


@inlined
def _start(a: Step, x: State, d: int, kind: int, s: int, operations: Ints, starts: Floats) -> int:
    """Put a stage's next compute operation of a kind after the others of its device; returns its micro-batch."""
    if kind == F:
        j = _start_forward(a, x, d, s)
    elif kind == I:
        j = _start_backward(a, x, d, s)
    elif kind == R:
        j = _start_recomputation(a, x, d, s)
    else:
        j = _start_weight(a, x, d, s)
    _record(x, operations, starts, kind, s, j, x.begun[d])
    return j


@borrowing
def _run(a: Step, x: State, threshold: float, until: float, operations: Ints, starts: Floats) -> int:
    """Decide and serve in the order of time; returns the compute operations that are missing, -1 if abandoned."""
    left, first, forward, micro_batch = 3 * len(a.stages) * len(a.scales), 0, 0, 0
    load_parameters(a, x)
    first = first_to_ask(a, x)
    while True:
        d = place_of(_earliest(x.wake))
        now = x.wake[d]
        while x.ask[first] < now or (left == 0 and x.ask[first] < NEVER):
            if not serve(a, x, first):
                return max(left, 1)
            other = device_of_stream(a, first)
            if x.wake[other] < now or (x.wake[other] == now and other < d):
                d, now = other, x.wake[other]
            first = first_to_ask(a, x)
        if left == 0 or now >= until:
            return left
        count_what_left(x, d, now)
        kind, s, soon = choose(a, x, d, now)
        if kind >= 0:
            s = place_of(s)
            j = _start(a, x, d, kind, s, operations, starts)
            forward, micro_batch = s, j
            end = x.free[d]
            x.wake[d] = end
            x.last[0] = max(x.last[0], end)
            x.rest[d] -= end - x.begun[d]
            least = x.rest[d]
            if kind != R:
                left -= 1
                least = max(least, a.remaining_time[kind, s, j])
            if end + least > threshold:
                return -1
            if kind < W:
                _wake_for_reload(a, x, j, now)
        else:
            if x.ended[d] < x.served[d]:
                soon = min(soon, x.gone[d, x.ended[d]])
            x.wake[d] = soon
        while x.under_way[d] < a.prefetch:
            s = due_reload(a, x, d, now)
            if s < 0:
                break
            j = place_of(x.next_l[s])
            if not reload(a, x, d, s, j, now):
                break
            x.next_l[s] += 1
            x.under_way[d] += 1
            _record(x, operations, starts, L, s, j, now)
        if kind == F and a.stages[forward, MOVED] > 0:
            offload(a, x, d, forward, micro_batch)
            _record(x, operations, starts, O, forward, micro_batch, now)
        first = earlier(a, x, earlier(a, x, first, d), len(a.capacity) + d)


@jit
def place(
    stages: Floats, device_of: Ints, capacity: Floats, down: Ints, up: Ints, host: Floats, scales: Floats,
    policy: Floats, most: Ints, threshold: float, until: float, operations: Ints, starts: Floats,
) -> tuple[int, float, int]:  # fmt: skip
    """Place all operations, and say how many, when the last one ends, and how many compute operations are missing.

    It is abandoned, with an infinite time and nothing missing, as soon as the step must end after the threshold; and it
    stops before what would start at `until`.  Operations, and when those of compute lanes start, are written down where
    there is room for them.
    """
    a, x = begun(stages, device_of, capacity, down, up, host, scales, policy, most, until == NEVER)
    missing = _run(a, x, threshold, until, operations, starts)
    if missing < 0:
        return x.placed[0], NEVER, 0
    return x.placed[0], x.last[0] if missing == 0 else NEVER, missing


def schedule(table: StageTable, scales: Floats, policy: Floats, most: Ints) -> PlacedOperations:
    """Build the schedule of a step.

    Args:
        table: The stages.
        scales: Per micro-batch, its length: the factor on its times and bytes.
        policy: The entries of `stage_table.py`.
        most: Per stage, the micro-batches that may be between their forward and their backward.

    Returns:
        The schedule.
    """
    count = len(table.stages) * len(scales)
    operations, starts = np.empty((6 * count, 3), dtype=np.int64), np.empty(6 * count)
    placed, makespan, missing = place(*table, scales, policy, most, np.inf, np.inf, operations, starts)
    return PlacedOperations(makespan, missing, operations[:placed])


def makespan(table: StageTable, scales: Floats, policy: Floats, most: Ints) -> tuple[float, int]:
    """The time of the step, and how many operations could not be placed."""
    nothing = np.empty((0, 3), dtype=np.int64), np.empty(0)
    _, time, missing = place(*table, scales, policy, most, np.inf, np.inf, *nothing)
    return time, missing
