"""The event loop of list scheduling: devices act as soon as they are free and something has arrived.

The same source runs as plain Python over lists of any numbers, or compiled by numba over arrays of float64, with the
same results as long as integers stay below 2^53.  Everywhere `a` is the DispatchInput, `r` the DispatchRule, `s` the
DispatchState and `d` a device.

An operation is a number, `track * micro_batches + micro_batch`.  With S stages, track s has the forwards of stage s,
S + s its backwards (I, or fused B) and 2 S + s its W.  Micro-batches are in order on every track.

This scheduler does not offload.  The planner `joint` has another list scheduler, which does and which abandons slow
schedules (planners/joint/list_scheduling/).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from debubble.kernels import inlined, jit

INFINITY = float("inf")
GREEDY, GAP_FILLING, ORDER_FOLLOWING = range(3)
"""The rules by which a free device chooses an operation."""

Column = Any
"""A list of Python numbers, or an array for compiled code."""
_Function = TypeVar("_Function", bound=Callable[..., object])
_COMPILERS: dict[FunctionType, Callable[[Callable[..., object]], Callable[..., object]]] = {}
"""The compiler of each function that `compiled` compiles, callees first."""


def _kernel(function: _Function) -> _Function:
    """Register a function that `compiled` compiles."""
    assert isinstance(function, FunctionType)
    _COMPILERS[function] = jit
    return function


def _inlined(function: _Function) -> _Function:
    """Register a function that `compiled` inlines into its callers."""
    assert isinstance(function, FunctionType)
    _COMPILERS[function] = inlined
    return function


class DispatchInput(NamedTuple):
    """A step's tracks and devices, in index order."""

    stages: int
    micro_batches: int
    devices: int
    split: bool
    """Whether backwards are split into I and W."""
    device_of: Column
    """[stage]"""
    stages_of: Column
    """The stages of device 0, then of device 1, ..."""
    stages_begin: Column
    """[device + 1]: where its stages begin in `stages_of`, and the total."""
    consumer: Column
    """[track]: the track that consumes its results, -1 if none."""
    message: Column
    """[track]: time of the message between them; 0 on one device."""
    time: Column
    """[track]: time of a micro-batch of scale 1."""
    allocated: Column
    """[track]: memory allocated at the start, for scale 1."""
    freed: Column
    """[track]: memory freed at the end, for scale 1."""
    time_scale: Column
    """[micro-batch]: factor of its times."""
    size_scale: Column
    """[micro-batch]: factor of its sizes."""
    capacity: Column
    """[device]: memory for activations; infinite without a limit."""


class DispatchRule(NamedTuple):
    """The parameters of a device's rule, which `list_scheduling` explains."""

    kind: int
    weight_share: float
    """Minimum gap that a W may fill, as a fraction of its time."""
    operation_share: float
    """Minimum gap in which another operation may run, as a fraction of its time."""
    flag: bool
    idle: Column
    """[device]: remaining time that it may idle (GAP_FILLING)."""
    lists: Column
    """The operations of device 0's list, then of device 1's, ... (ORDER_FOLLOWING)."""
    position: Column
    """[operation]: its position in `lists`."""
    lists_begin: Column
    """[device + 1]: where its list begins in `lists`, and the total."""


class DispatchState(NamedTuple):
    """The state of all devices, and their orders so far."""

    count: Column
    """[track]: micro-batches that have started."""
    arrival: Column
    """[operation except W]: arrival of its input; infinite while unknown."""
    weights: Column
    """W operations that may start, by device, oldest first: those from `weights_begin` to `weights_end`."""
    weights_begin: Column
    weights_end: Column
    used: Column
    """[device]: memory."""
    used_by_weights: Column
    """[device]: memory that the operations of `weights` will free."""
    freeing: Column
    """[device]: memory that the current operation frees at its end."""
    compute_end: Column
    """[device]: end of the current operation."""
    first_start: Column
    """[device]: start of its first operation."""
    last_is_backward: Column
    """[device]: 1 if its last operation, apart from W, was a backward."""
    cursor: Column
    """[device]: first entry of its list that has not started (ORDER_FOLLOWING)."""
    order: Column
    """Operations by device, in order of their starts."""
    end: Column
    """The end of each operation of `order`."""
    length: Column
    """[device]: number of operations in `order`."""


@_inlined
def duration(a: DispatchInput, op: int) -> float:
    """The time of an operation."""
    return a.time[op // a.micro_batches] * a.time_scale[op % a.micro_batches]  # type: ignore[no-any-return]


@_inlined
def oldest_weight(s: DispatchState, d: int) -> int:
    """The W that a device may start next, -1 if none."""
    return s.weights[s.weights_begin[d]] if s.weights_begin[d] < s.weights_end[d] else -1


@_kernel
def leaves_memory(a: DispatchInput, s: DispatchState, d: int, stage: int, j: int) -> bool:
    """Tell whether a forward leaves the memory that the device's later chunks need to continue."""
    needed = s.used[d] + a.allocated[stage] * a.size_scale[j]
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        later = a.stages_of[k]
        backwards, weights_done = s.count[a.stages + later], s.count[2 * a.stages + later]
        if later > stage and s.count[later] == backwards:
            more = needed + a.allocated[later] * a.size_scale[s.count[later]]
            if a.split and weights_done < backwards:
                more -= a.freed[2 * a.stages + later] * a.size_scale[weights_done]
            # A W of a longer micro-batch frees more than is needed, but only later.
            needed = max(needed, more)
    return needed <= a.capacity[d]  # type: ignore[no-any-return]


@_kernel
def choose_greedy(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose an operation by `Greedy`."""
    m = a.micro_batches
    backward, backward_time, forward, forward_time, blocked = -1, INFINITY, -1, INFINITY, False
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        track = a.stages + a.stages_of[k]
        j = s.count[track]
        if j < s.count[a.stages_of[k]]:
            backward_time = min(backward_time, s.arrival[track * m + j])
            if s.arrival[track * m + j] <= now and (backward < 0 or j <= backward % m):
                backward = track * m + j
        track = a.stages_of[k]
        j = s.count[track]
        if j == m or s.arrival[track * m + j] == INFINITY:
            continue
        if not leaves_memory(a, s, d, track, j):
            blocked = blocked or s.arrival[track * m + j] <= now
            continue
        forward_time = min(forward_time, s.arrival[track * m + j])
        if s.arrival[track * m + j] <= now and (forward < 0 or j <= forward % m):
            forward = track * m + j
    weight = oldest_weight(s, d)
    wanted, wanted_time, other = backward, backward_time, forward
    if r.flag and s.last_is_backward[d] == 1:
        wanted, wanted_time, other = forward, forward_time, backward
        if wanted < 0 and blocked and weight >= 0:
            return weight
    if wanted >= 0:
        return wanted
    gap = wanted_time - now
    if weight >= 0 and gap >= duration(a, weight) * r.weight_share and (other < 0 or gap < INFINITY):
        return weight
    if other >= 0 and (gap == INFINITY or gap >= r.operation_share * duration(a, other)):
        return other
    arrival = min(forward_time, backward_time)
    if weight >= 0 and (blocked or arrival - now >= duration(a, weight) * r.weight_share):
        return weight
    return -1


@_inlined
def oldest_can_finish(a: DispatchInput, s: DispatchState, d: int, stage: int, j: int) -> bool:
    """Tell whether the oldest unfinished micro-batch can still pass all the device's stages after a forward."""
    oldest = a.micro_batches
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        oldest = min(oldest, s.count[a.stages + a.stages_of[k]])
    needed = a.allocated[stage] * a.size_scale[j]
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        other = a.stages_of[k]
        if s.count[other] <= oldest < a.micro_batches and not (other == stage and oldest == j):
            needed += a.allocated[other] * a.size_scale[oldest]
    return s.used[d] + needed <= a.capacity[d]  # type: ignore[no-any-return]


@_kernel
def choose_gap_filling(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose an operation by `GapFilling`."""
    m, free = a.micro_batches, s.compute_end[d]
    backward, backward_time, forward, forward_time = -1, INFINITY, -1, INFINITY
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        # Among operations that can start at once, or that arrive together, the latest stage goes first.
        track = a.stages + a.stages_of[k]
        j = s.count[track]
        if j < m and s.arrival[track * m + j] < INFINITY:
            arrival = s.arrival[track * m + j]
            if s.used[d] + a.allocated[track] * a.size_scale[j] <= a.capacity[d] and max(arrival, free) <= max(
                backward_time, free
            ):
                backward, backward_time = track * m + j, arrival
        track = a.stages_of[k]
        j = s.count[track]
        if j < m and s.arrival[track * m + j] < INFINITY:
            arrival = s.arrival[track * m + j]
            if max(arrival, free) <= max(forward_time, free) and oldest_can_finish(a, s, d, track, j):
                forward, forward_time = track * m + j, arrival
    if backward_time <= free:
        return backward
    if forward_time <= free:
        return forward
    op, arrival = backward, backward_time
    if forward_time < backward_time:
        op, arrival = forward, forward_time
    weight = oldest_weight(s, d)
    if weight >= 0 and (arrival - free >= r.weight_share * duration(a, weight) or arrival - free > r.idle[d]):
        return weight
    return op if arrival <= now else -1


@_inlined
def fits_before_list(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, op: int) -> bool:
    """Tell whether a forward that starts now leaves memory for the operations before it in the list."""
    m = a.micro_batches
    new = a.allocated[op // m] * a.size_scale[op % m]
    if s.used[d] + new > a.capacity[d]:
        return False
    used = s.used[d] - s.used_by_weights[d] + new
    for index in range(s.cursor[d], r.position[op]):
        track, j = r.lists[index] // m, r.lists[index] % m
        if j >= s.count[track]:
            if track >= a.stages:
                used -= a.allocated[track - a.stages] * a.size_scale[j]
            else:
                used += a.allocated[track] * a.size_scale[j]
                if used > a.capacity[d]:
                    return False
    return True


@_inlined
def find_overtaking(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float, gap: float) -> int:
    """The first listed operation that has arrived, fits the gap and leaves memory for all before it; -1 if none."""
    m, best = a.micro_batches, -1
    for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
        for track in (a.stages_of[k], a.stages + a.stages_of[k]):
            op = track * m + s.count[track]
            if s.count[track] == m or s.arrival[op] > now or (best >= 0 and r.position[op] > r.position[best]):
                continue
            if gap >= duration(a, op) * r.operation_share and (track >= a.stages or fits_before_list(a, r, s, d, op)):
                best = op
    return best


@_kernel
def choose_following(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose an operation by `OrderFollowing`."""
    m, weight, cursor = a.micro_batches, oldest_weight(s, d), s.cursor[d]
    while cursor < r.lists_begin[d + 1] and r.lists[cursor] % m < s.count[r.lists[cursor] // m]:
        cursor += 1
    s.cursor[d] = cursor
    if cursor == r.lists_begin[d + 1]:
        return weight
    wanted = r.lists[cursor]
    arrival = s.arrival[wanted]
    if s.used[d] + a.allocated[wanted // m] * a.size_scale[wanted % m] > a.capacity[d]:
        if weight >= 0:
            return weight
        arrival = INFINITY
    if arrival <= now:
        return wanted  # type: ignore[no-any-return]
    gap = arrival - now
    if r.operation_share < INFINITY and (s.count[0] == m or not r.flag):
        best = find_overtaking(a, r, s, d, now, gap)
        if best >= 0:
            return best
    return weight if weight >= 0 and gap >= duration(a, weight) * r.weight_share else -1


@_kernel
def dispatch(a: DispatchInput, r: DispatchRule, s: DispatchState) -> int:
    """Run all devices until no operation can start; returns the number of operations started."""
    m, tracks, started = a.micro_batches, 2 * a.stages, 0
    events = [(s.compute_end[d], d) for d in range(a.devices)]
    while len(events) > 0:
        now, d = heappop(events)
        if s.compute_end[d] > now:
            continue
        s.used[d] -= s.freeing[d]
        s.freeing[d] = 0
        if r.kind == GREEDY:
            op = choose_greedy(a, r, s, d, now)
        elif r.kind == GAP_FILLING:
            op = choose_gap_filling(a, r, s, d, now)
        else:
            op = choose_following(a, r, s, d, now)
        if op < 0:
            continue
        track, j = op // m, op % m
        end = now + a.time[track] * a.time_scale[j]
        slot = 3 * m * a.stages_begin[d] + s.length[d]
        s.order[slot], s.end[slot] = op, end
        if s.length[d] == 0:
            s.first_start[d] = now
        s.length[d] += 1
        started += 1
        for k in range(a.stages_begin[d], a.stages_begin[d + 1]):
            if r.kind == GAP_FILLING and s.count[a.stages + a.stages_of[k]] > 0:
                r.idle[d] -= now - s.compute_end[d]
                break
        s.count[track] += 1
        s.used[d] += a.allocated[track] * a.size_scale[j]
        s.freeing[d] = a.freed[track] * a.size_scale[j]
        s.compute_end[d] = end
        heappush(events, (end, d))
        if track >= tracks:
            s.weights_begin[d] += 1
            s.used_by_weights[d] -= s.freeing[d]
            continue
        s.last_is_backward[d] = 1 if track >= a.stages else 0
        if track >= a.stages and a.split:
            s.weights[s.weights_end[d]] = op + a.stages * m
            s.weights_end[d] += 1
            s.used_by_weights[d] += a.freed[track + a.stages] * a.size_scale[j]
        consumer = a.consumer[track]
        if consumer >= 0:
            arrival = end + a.message[track] * a.time_scale[j]
            s.arrival[consumer * m + j] = arrival
            target = a.device_of[consumer % a.stages]
            # A busy device chooses again when its operation ends.
            if target != d and arrival >= s.compute_end[target]:
                heappush(events, (arrival, target))
    return started


@cache
def compiled() -> Callable[[DispatchInput, DispatchRule, DispatchState], int]:
    """Compile `dispatch` and its callees; without numba they stay plain Python."""
    names = dict(globals())
    for function, compiler in _COMPILERS.items():
        names[function.__name__] = compiler(FunctionType(function.__code__, names, function.__name__))
    kernel: Callable[[DispatchInput, DispatchRule, DispatchState], int] = names["dispatch"]
    return kernel
