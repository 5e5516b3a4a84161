"""A compiled list scheduler under memory limits and host links: a full step in a fraction of a millisecond.

Devices decide in the order of time.  A free device starts a backward whose gradient has arrived, else a forward that
fits in memory, else a recomputation ahead of its gradient, else a weight gradient; it idles only for operations known
to become ready soon.  Offloads start at the end of their forward, or earlier if its units stream; a reload starts when
its micro-batch is `horizon` operations away from the stage's backward.  The policy parameterizes these rules; a search
over policies, partitions and recomputation levels calls the scheduler thousands of times.

A decision only appends an operation to its device's list.  Start times follow the rules of lowering and simulation:
compute operations wait for their inputs and for offloads whose memory they need, transfers as in `transfers.py`.  So
the simulated time of the list is the scheduler's.

search/constructive/dispatch.py, the other compiled list scheduler, is separate: it builds few orders of fixed stages,
also with fractions, and its rules see only what has arrived.  Here rules also consider transfers in flight, and a
search that builds ten thousand schedules a second abandons most of them half way.  Tests compare each with the
simulator.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir import Kind, Op
from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined, jit, jit_without_refcounts
from debubble.planners.joint.list_scheduling.rules import (
    backward_bytes,
    backward_ready,
    choose,
    due_reload,
    reload_time,
)
from debubble.planners.joint.list_scheduling.stage_table import (
    DROPPED,
    FORWARD,
    FREED_BY_I,
    FREED_BY_W,
    GATHER,
    HOSTED,
    INPUT,
    OFFLOADED,
    RECOMPUTE,
    RECOMPUTE_LEAD,
    RETAINED,
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
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, index_of, initial_state
from debubble.planners.joint.list_scheduling.transfers import (
    admitted,
    device_of_stream,
    earlier_stream,
    first_stream,
    free_ended_offloads,
    load_parameters,
    offload,
    push,
    reload,
    serve,
    wake_at,
)

KINDS = (Kind.F, Kind.I, Kind.W, Kind.O, Kind.L, Kind.R)


class PlacedOperations(NamedTuple):
    """The scheduler's result.

    Attributes:
        makespan: Time of the step; infinite if it got stuck.
        missing: Number of operations that could not be placed; 0 if the schedule is complete.
        operations: Rows of kind, stage, micro-batch.
    """

    makespan: float
    missing: int
    operations: Ints

    def orders(self, device_of: Ints) -> tuple[tuple[Op, ...], ...]:
        """The operations of each device, in the order of their decisions."""
        devices: list[int] = device_of.tolist()
        lists: list[list[Op]] = [[] for _ in range(max(devices) + 1)]
        for kind, stage, micro_batch in self.operations.tolist():
            lists[devices[stage]].append(Op(KINDS[kind], stage, micro_batch))
        return tuple(map(tuple, lists))


@inlined
def _next_device(wake: Floats) -> int:
    """The device that decides first."""
    d, min_time = 0, wake[0]
    for other in range(1, len(wake)):
        if wake[other] < min_time:
            d, min_time = other, wake[other]
    return d


@inlined
def _record(x: State, operations: Ints, starts: Floats, kind: int, s: int, j: int, start: float) -> None:
    """Record an operation, if the caller provides arrays."""
    if len(starts) > 0:
        n = x.placed[0]
        operations[n, 0], operations[n, 1], operations[n, 2] = kind, s, j
        starts[n] = start
        x.placed[0] = n + 1


@inlined
def _wake_for_reload(a: Step, x: State, j: int, now: float) -> None:
    """Wake the device for which a micro-batch's progress has made a reload due."""
    s = 2 * len(a.stages) - 1 - a.horizon - x.progress[j]
    if 0 <= s < len(a.stages) and a.stages[s, OFFLOADED] > 0:
        wake_at(x, a.device_of[s], now)


@inlined
def _append_compute(a: Step, x: State, d: int, ready: float, time: float, allocated: float, freed: float) -> float:
    """Append an operation, whose inputs are available at `ready`, to the compute lane; returns its end."""
    begin = admitted(a, x, d, max(x.compute_end[d], ready), allocated)
    x.compute_start[d], x.compute_end[d], x.freed_at_end[d] = begin, begin + time, freed
    x.used_bytes[d] += allocated - freed
    while x.offloads_at_start[d] < x.offloads_ended[d] and x.offload_end[d, x.offloads_at_start[d]] <= begin:
        x.freed_since_start[d] -= x.offload_bytes[d, x.offloads_at_start[d]]
        x.offloads_at_start[d] += 1
    end: float = begin + time
    return end


@inlined
def _gathered_time(a: Step, x: State, d: int, s: int) -> float:
    """When a stage's sharded parameters are there: the gather starts with the operations of the stage before."""
    if a.stages[s, GATHER] <= 0 or x.gathered[d] == s + 1 or x.gathered_before[d] == s + 1:
        return 0.0
    time: float = x.run_start[d] + a.stages[s, GATHER]
    return time


@inlined
def _use_parameters(x: State, d: int, s: int) -> None:
    """Make a stage the one whose parameters the device's last operation uses."""
    if x.gathered[d] != s + 1:
        x.gathered_before[d], x.gathered[d], x.run_start[d] = x.gathered[d], s + 1, x.compute_start[d]


@inlined
def _start_forward(a: Step, x: State, d: int, s: int) -> int:
    j = index_of(x.next_f[s])
    scale = a.scales[j]
    time, retained = scale * a.stages[s, FORWARD], scale * a.stages[s, RETAINED]
    ready = max(x.input_ready[s, j], _gathered_time(a, x, d, s))
    end = _append_compute(a, x, d, ready, time, retained, 0.0)
    _use_parameters(x, d, s)
    x.next_f[s] = j + 1
    x.in_flight[d] += 1
    x.progress[j] = max(x.progress[j], s + 1)
    if s + 1 < len(a.stages):
        arrival = end + scale * a.stages[s, SEND]
        if j == 0:
            x.input_arrival[s + 1] = arrival
            arrival = max(arrival, x.parameters_loaded[s + 1])
        x.input_ready[s + 1, j] = arrival
        wake_at(x, a.device_of[s + 1], arrival)
    else:
        x.gradient_ready[s, j] = end
    return j


@inlined
def _start_backward(a: Step, x: State, d: int, s: int) -> int:
    j = index_of(x.next_i[s])
    scale = a.scales[j]
    allocated, ready = backward_bytes(a, x, s, j), backward_ready(a, x, s, j)
    change = a.stages[s, WORKSPACE] - a.stages[s, FREED_BY_I]
    time = a.stages[s, INPUT]
    if j < x.next_r[s]:
        change -= a.stages[s, DROPPED]
        x.recomputed_ahead[d] -= 1
    else:
        time += a.stages[s, RECOMPUTE]
        x.next_r[s] = j + 1
    ready = max(ready, _gathered_time(a, x, d, s))
    end = _append_compute(a, x, d, ready, scale * time, allocated, allocated - scale * change)
    _use_parameters(x, d, s)
    x.next_i[s] = j + 1
    x.in_flight[d] -= 1
    x.waiting_weights[d] += 1
    x.progress[j] = max(x.progress[j], 2 * len(a.stages) - s)
    if a.stages[s, OFFLOADED] > 0:
        x.reloads_in_flight[d] -= 1
        x.host_bytes[d] -= scale * a.stages[s, OFFLOADED]
    if s > 0:
        x.gradient_ready[s - 1, j] = end + scale * a.stages[s - 1, SEND]
        wake_at(x, a.device_of[s - 1], x.gradient_ready[s - 1, j])
    return j


@inlined
def _start_recomputation(a: Step, x: State, d: int, s: int) -> int:
    j = index_of(x.next_r[s])
    scale = a.scales[j]
    ready = reload_time(a, x, s, j, RECOMPUTE_LEAD) if a.stages[s, OFFLOADED] > 0 else 0.0
    ready = max(ready, _gathered_time(a, x, d, s))
    _append_compute(a, x, d, ready, scale * a.stages[s, RECOMPUTE], scale * a.stages[s, DROPPED], 0.0)
    _use_parameters(x, d, s)
    x.next_r[s] = j + 1
    x.recomputed_ahead[d] += 1
    return j


@inlined
def _start_weight(a: Step, x: State, d: int, s: int) -> int:
    j = index_of(x.next_w[s])
    scale = a.scales[j]
    end = _append_compute(a, x, d, 0.0, scale * a.stages[s, WEIGHT], 0.0, scale * a.stages[s, FREED_BY_W])
    x.next_w[s] = j + 1
    x.waiting_weights[d] -= 1
    if j == len(a.scales) - 1 and a.stages[s, HOSTED] > 0:
        push(a, x, d, D, s, j, end)
    return j


@inlined
def _start(a: Step, x: State, d: int, kind: int, s: int, operations: Ints, starts: Floats) -> int:
    """Append a stage's next compute operation of a kind to its device's list; returns its micro-batch."""
    if kind == F:
        j = _start_forward(a, x, d, s)
    elif kind == I:
        j = _start_backward(a, x, d, s)
    elif kind == R:
        j = _start_recomputation(a, x, d, s)
    else:
        j = _start_weight(a, x, d, s)
    _record(x, operations, starts, kind, s, j, x.compute_start[d])
    return j


@jit_without_refcounts
def _run(a: Step, x: State, threshold: float, until: float, operations: Ints, starts: Floats) -> int:
    """Decide and serve transfers in the order of time; returns the number of missing operations, -1 if abandoned."""
    remaining, stream, forward, micro_batch = 3 * len(a.stages) * len(a.scales), 0, 0, 0
    load_parameters(a, x)
    stream = first_stream(a, x)
    while True:
        d = index_of(_next_device(x.wake))
        now = x.wake[d]
        while x.request[stream] < now or (remaining == 0 and x.request[stream] < NEVER):
            if not serve(a, x, stream):
                return max(remaining, 1)
            other = device_of_stream(a, stream)
            if x.wake[other] < now or (x.wake[other] == now and other < d):
                d, now = other, x.wake[other]
            stream = first_stream(a, x)
        if remaining == 0 or now >= until:
            return remaining
        free_ended_offloads(x, d, now)
        kind, s, soon = choose(a, x, d, now)
        if kind >= 0:
            s = index_of(s)
            j = _start(a, x, d, kind, s, operations, starts)
            forward, micro_batch = s, j
            end = x.compute_end[d]
            x.wake[d] = end
            x.makespan[0] = max(x.makespan[0], end)
            x.remaining_work[d] -= end - x.compute_start[d]
            min_remaining = x.remaining_work[d]
            if kind != R:
                remaining -= 1
                min_remaining = max(min_remaining, a.remaining_time[kind, s, j])
            if end + min_remaining > threshold:
                return -1
            if kind < W:
                _wake_for_reload(a, x, j, now)
        else:
            if x.offloads_ended[d] < x.offloads_served[d]:
                soon = min(soon, x.offload_end[d, x.offloads_ended[d]])
            x.wake[d] = soon
        while x.reloads_in_flight[d] < a.prefetch:
            s = due_reload(a, x, d, now)
            if s < 0:
                break
            j = index_of(x.next_l[s])
            if not reload(a, x, d, s, j, now):
                break
            x.next_l[s] += 1
            x.reloads_in_flight[d] += 1
            _record(x, operations, starts, L, s, j, now)
        if kind == F and a.stages[forward, OFFLOADED] > 0:
            offload(a, x, d, forward, micro_batch)
            _record(x, operations, starts, O, forward, micro_batch, now)
        stream = earlier_stream(a, x, earlier_stream(a, x, stream, d), len(a.capacity) + d)


@jit
def place(
    stages: Floats, device_of: Ints, capacity: Floats, down: Ints, up: Ints, host: Floats, scales: Floats,
    policy: Floats, max_in_flight: Ints, threshold: float, until: float, operations: Ints, starts: Floats,
) -> tuple[int, float, int]:  # fmt: skip
    """Place all operations; returns the numbers of recorded ones, the makespan, and the number of missing ones.

    The schedule is abandoned, with an infinite makespan and none missing, once the step must end after the threshold;
    it stops at decisions at `until` or later.  Operations and their starts are recorded if the arrays are not empty.
    """
    a, x = initial_state(stages, device_of, capacity, down, up, host, scales, policy, max_in_flight, until == NEVER)
    missing = _run(a, x, threshold, until, operations, starts)
    if missing < 0:
        return x.placed[0], NEVER, 0
    return x.placed[0], x.makespan[0] if missing == 0 else NEVER, missing


def schedule(table: StageTable, scales: Floats, policy: Floats, max_in_flight: Ints) -> PlacedOperations:
    """Build the schedule of a step.

    Args:
        table: The stages.
        scales: Length of each micro-batch, a factor on its times and bytes.
        policy: The policy entries of `stage_table.py`.
        max_in_flight: Limit on micro-batches between forward and backward per stage.

    Returns:
        The schedule.
    """
    count = len(table.stages) * len(scales)
    operations, starts = np.empty((6 * count, 3), dtype=np.int64), np.empty(6 * count)
    placed, makespan, missing = place(*table, scales, policy, max_in_flight, np.inf, np.inf, operations, starts)
    return PlacedOperations(makespan, missing, operations[:placed])
