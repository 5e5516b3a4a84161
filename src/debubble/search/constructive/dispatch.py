"""The core of list scheduling, event by event: devices act as soon as they are free and something has arrived.

One source, which runs as plain Python over lists of any numbers, or compiled by numba over arrays of float64 with the
same results as long as whole numbers stay below 2^53.  Everywhere `a` is the DispatchInput, `r` the DispatchRule, `s`
the DispatchState and `d` a device.

An operation is a number, `track * micro_batches + micro_batch`.  With S stages, track s are the forwards of stage s,
S + s its backwards (I, or B if they are whole) and 2 S + s its W.  On a track micro-batches come in order.

Nothing is moved to the host here.  The planner `joint` has a list scheduler of its own, which does that, and abandons
what takes too long (planners/joint/list_scheduling/).
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
"""The rules by which a free device chooses."""

Column = Any
"""A list of Python's numbers, or an array where the code is compiled."""
_Function = TypeVar("_Function", bound=Callable[..., object])
_KERNEL: dict[FunctionType, Callable[[Callable[..., object]], Callable[..., object]]] = {}
"""The compiler of each function of `compiled`; those that a function calls come before it."""


def _kernel(function: _Function) -> _Function:
    """Make a function part of what `compiled` compiles."""
    assert isinstance(function, FunctionType)
    _KERNEL[function] = jit
    return function


def _inlined(function: _Function) -> _Function:
    """Make a function part of those that call it."""
    assert isinstance(function, FunctionType)
    _KERNEL[function] = inlined
    return function


class DispatchInput(NamedTuple):
    """A step's tracks and devices, in index order."""

    stages: int
    micro_batches: int
    devices: int
    split: bool
    """Backwards are I with a W apart."""
    device_of: Column
    """[stage]"""
    stages_of: Column
    """The stages of device 0, then of device 1, ..."""
    stages_from: Column
    """[device]: where its stages begin in `stages_of`; one entry more than devices."""
    following: Column
    """[track]: the track that consumes its results, -1 for none."""
    message: Column
    """[track]: time of the message between them; 0 on one device."""
    time: Column
    """[track]: time of a micro-batch of scale 1."""
    allocated: Column
    """[track]: memory taken at the start, for scale 1."""
    freed: Column
    """[track]: memory given back at the end, for scale 1."""
    time_scale: Column
    """[micro-batch]: factor of its times."""
    size_scale: Column
    """[micro-batch]: factor of its sizes."""
    capacity: Column
    """[device]: memory for activations; infinite where there is no limit."""


class DispatchRule(NamedTuple):
    """The numbers of a rule by which a free device chooses; `list_scheduling` says what they mean."""

    kind: int
    weight_share: float
    """Part of a W's time that a gap must have to be filled by it."""
    share: float
    """Part of an operation's time that it must leave untouched of what it delays."""
    flag: bool
    idle: Column
    """[device]: time that it may still lose (GAP_FILLING)."""
    lists: Column
    """The operations of device 0's list, then of device 1's, ... (ORDER_FOLLOWING)."""
    place: Column
    """[operation]: where in `lists` it is."""
    lists_from: Column
    """[device]: where its list begins; one entry more than devices."""


class DispatchState(NamedTuple):
    """The state of all devices, and what they have done."""

    count: Column
    """[track]: micro-batches that have started."""
    arrival: Column
    """[operation but W]: when its input is there; infinite while that is unknown."""
    owed: Column
    """W's that may start, by device, oldest first: those from `owed_from` to `owed_to`."""
    owed_from: Column
    owed_to: Column
    used: Column
    """[device]: memory."""
    used_by_owed: Column
    """[device]: memory that the W's of `owed` will give back."""
    freeing: Column
    """[device]: memory that the operation under way gives back at its end."""
    free: Column
    """[device]: when that is."""
    first: Column
    """[device]: when its first operation started."""
    backward_last: Column
    """[device]: 1 if the last operation that is no W was a backward."""
    cursor: Column
    """[device]: the first entry of its list that has not started (ORDER_FOLLOWING)."""
    order: Column
    """Operations by device, in the order of their starts."""
    end: Column
    """The end of each of them."""
    length: Column
    """[device]: how many there are."""


@_inlined
def duration(a: DispatchInput, op: int) -> float:
    """Return the time that an operation takes."""
    return a.time[op // a.micro_batches] * a.time_scale[op % a.micro_batches]  # type: ignore[no-any-return]


@_inlined
def oldest_weight(s: DispatchState, d: int) -> int:
    """Return the W that a device may start next, -1 for none."""
    return s.owed[s.owed_from[d]] if s.owed_from[d] < s.owed_to[d] else -1


@_kernel
def leaves_capacity(a: DispatchInput, s: DispatchState, d: int, stage: int, j: int) -> bool:
    """Tell whether a forward leaves memory for what the device's later chunks need to continue."""
    needed = s.used[d] + a.allocated[stage] * a.size_scale[j]
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        later = a.stages_of[k]
        backwards, released = s.count[a.stages + later], s.count[2 * a.stages + later]
        if later > stage and s.count[later] == backwards:
            more = needed + a.allocated[later] * a.size_scale[s.count[later]]
            if a.split and released < backwards:
                more -= a.freed[2 * a.stages + later] * a.size_scale[released]
            # A W of a longer micro-batch frees more than is needed, but not yet.
            needed = max(needed, more)
    return needed <= a.capacity[d]  # type: ignore[no-any-return]


@_kernel
def choose_greedily(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose as `Greedy` says."""
    m = a.micro_batches
    backward, backward_at, forward, forward_at, blocked = -1, INFINITY, -1, INFINITY, False
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        track = a.stages + a.stages_of[k]
        j = s.count[track]
        if j < s.count[a.stages_of[k]]:
            backward_at = min(backward_at, s.arrival[track * m + j])
            if s.arrival[track * m + j] <= now and (backward < 0 or j <= backward % m):
                backward = track * m + j
        track = a.stages_of[k]
        j = s.count[track]
        if j == m or s.arrival[track * m + j] == INFINITY:
            continue
        if not leaves_capacity(a, s, d, track, j):
            blocked = blocked or s.arrival[track * m + j] <= now
            continue
        forward_at = min(forward_at, s.arrival[track * m + j])
        if s.arrival[track * m + j] <= now and (forward < 0 or j <= forward % m):
            forward = track * m + j
    weight = oldest_weight(s, d)
    wanted, wanted_at, other = backward, backward_at, forward
    if r.flag and s.backward_last[d] == 1:
        wanted, wanted_at, other = forward, forward_at, backward
        if wanted < 0 and blocked and weight >= 0:
            return weight
    if wanted >= 0:
        return wanted
    gap = wanted_at - now
    if weight >= 0 and gap >= duration(a, weight) * r.weight_share and (other < 0 or gap < INFINITY):
        return weight
    if other >= 0 and (gap == INFINITY or gap >= r.share * duration(a, other)):
        return other
    arrival = min(forward_at, backward_at)
    if weight >= 0 and (blocked or arrival - now >= duration(a, weight) * r.weight_share):
        return weight
    return -1


@_inlined
def lets_the_oldest_pass(a: DispatchInput, s: DispatchState, d: int, stage: int, j: int) -> bool:
    """Tell whether the oldest unfinished micro-batch can pass all the device's stages after a forward."""
    oldest = a.micro_batches
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        oldest = min(oldest, s.count[a.stages + a.stages_of[k]])
    needed = a.allocated[stage] * a.size_scale[j]
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        other = a.stages_of[k]
        if s.count[other] <= oldest < a.micro_batches and not (other == stage and oldest == j):
            needed += a.allocated[other] * a.size_scale[oldest]
    return s.used[d] + needed <= a.capacity[d]  # type: ignore[no-any-return]


@_kernel
def choose_for_gaps(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose as `GapFilling` says."""
    m, free = a.micro_batches, s.free[d]
    backward, backward_at, forward, forward_at = -1, INFINITY, -1, INFINITY
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        # Of several that can start at once, or that arrive together, the latest stage goes first.
        track = a.stages + a.stages_of[k]
        j = s.count[track]
        if j < m and s.arrival[track * m + j] < INFINITY:
            at = s.arrival[track * m + j]
            if s.used[d] + a.allocated[track] * a.size_scale[j] <= a.capacity[d] and max(at, free) <= max(
                backward_at, free
            ):
                backward, backward_at = track * m + j, at
        track = a.stages_of[k]
        j = s.count[track]
        if j < m and s.arrival[track * m + j] < INFINITY:
            at = s.arrival[track * m + j]
            if max(at, free) <= max(forward_at, free) and lets_the_oldest_pass(a, s, d, track, j):
                forward, forward_at = track * m + j, at
    if backward_at <= free:
        return backward
    if forward_at <= free:
        return forward
    op, at = backward, backward_at
    if forward_at < backward_at:
        op, at = forward, forward_at
    weight = oldest_weight(s, d)
    if weight >= 0 and (at - free >= r.weight_share * duration(a, weight) or at - free > r.idle[d]):
        return weight
    return op if at <= now else -1


@_inlined
def spares(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, op: int) -> bool:
    """Tell whether a forward that starts now leaves memory for what comes before it in the list."""
    m = a.micro_batches
    new = a.allocated[op // m] * a.size_scale[op % m]
    if s.used[d] + new > a.capacity[d]:
        return False
    used = s.used[d] - s.used_by_owed[d] + new
    for at in range(s.cursor[d], r.place[op]):
        track, j = r.lists[at] // m, r.lists[at] % m
        if j >= s.count[track]:
            if track >= a.stages:
                used -= a.allocated[track - a.stages] * a.size_scale[j]
            else:
                used += a.allocated[track] * a.size_scale[j]
                if used > a.capacity[d]:
                    return False
    return True


@_inlined
def overtaking(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float, gap: float) -> int:
    """Find the first of the list that has arrived, fits the gap and leaves memory for all before it; -1 for none."""
    m, best = a.micro_batches, -1
    for k in range(a.stages_from[d], a.stages_from[d + 1]):
        for track in (a.stages_of[k], a.stages + a.stages_of[k]):
            op = track * m + s.count[track]
            if s.count[track] == m or s.arrival[op] > now or (best >= 0 and r.place[op] > r.place[best]):
                continue
            if gap >= duration(a, op) * r.share and (track >= a.stages or spares(a, r, s, d, op)):
                best = op
    return best


@_kernel
def choose_by_list(a: DispatchInput, r: DispatchRule, s: DispatchState, d: int, now: float) -> int:
    """Choose as `OrderFollowing` says."""
    m, weight, cursor = a.micro_batches, oldest_weight(s, d), s.cursor[d]
    while cursor < r.lists_from[d + 1] and r.lists[cursor] % m < s.count[r.lists[cursor] // m]:
        cursor += 1
    s.cursor[d] = cursor
    if cursor == r.lists_from[d + 1]:
        return weight
    wanted = r.lists[cursor]
    at = s.arrival[wanted]
    if s.used[d] + a.allocated[wanted // m] * a.size_scale[wanted % m] > a.capacity[d]:
        if weight >= 0:
            return weight
        at = INFINITY
    if at <= now:
        return wanted  # type: ignore[no-any-return]
    gap = at - now
    if r.share < INFINITY and (s.count[0] == m or not r.flag):
        best = overtaking(a, r, s, d, now, gap)
        if best >= 0:
            return best
    return weight if weight >= 0 and gap >= duration(a, weight) * r.weight_share else -1


@_kernel
def dispatch(a: DispatchInput, r: DispatchRule, s: DispatchState) -> int:
    """Let all devices act until nothing can start any more; return how many operations have started."""
    m, tracks, started = a.micro_batches, 2 * a.stages, 0
    events = [(s.free[d], d) for d in range(a.devices)]
    while len(events) > 0:
        now, d = heappop(events)
        if s.free[d] > now:
            continue
        s.used[d] -= s.freeing[d]
        s.freeing[d] = 0
        if r.kind == GREEDY:
            op = choose_greedily(a, r, s, d, now)
        elif r.kind == GAP_FILLING:
            op = choose_for_gaps(a, r, s, d, now)
        else:
            op = choose_by_list(a, r, s, d, now)
        if op < 0:
            continue
        track, j = op // m, op % m
        end = now + a.time[track] * a.time_scale[j]
        place = 3 * m * a.stages_from[d] + s.length[d]
        s.order[place], s.end[place] = op, end
        if s.length[d] == 0:
            s.first[d] = now
        s.length[d] += 1
        started += 1
        for k in range(a.stages_from[d], a.stages_from[d + 1]):
            if r.kind == GAP_FILLING and s.count[a.stages + a.stages_of[k]] > 0:
                r.idle[d] -= now - s.free[d]
                break
        s.count[track] += 1
        s.used[d] += a.allocated[track] * a.size_scale[j]
        s.freeing[d] = a.freed[track] * a.size_scale[j]
        s.free[d] = end
        heappush(events, (end, d))
        if track >= tracks:
            s.owed_from[d] += 1
            s.used_by_owed[d] -= s.freeing[d]
            continue
        s.backward_last[d] = 1 if track >= a.stages else 0
        if track >= a.stages and a.split:
            s.owed[s.owed_to[d]] = op + a.stages * m
            s.owed_to[d] += 1
            s.used_by_owed[d] += a.freed[track + a.stages] * a.size_scale[j]
        following = a.following[track]
        if following >= 0:
            arrival = end + a.message[track] * a.time_scale[j]
            s.arrival[following * m + j] = arrival
            to = a.device_of[following % a.stages]
            # A busy device looks again when it ends.
            if to != d and arrival >= s.free[to]:
                heappush(events, (arrival, to))
    return started


@cache
def compiled() -> Callable[[DispatchInput, DispatchRule, DispatchState], int]:
    """Compile `dispatch` and all that it calls; it is plain where numba is missing."""
    names = dict(globals())
    for function, compiler in _KERNEL.items():
        names[function.__name__] = compiler(FunctionType(function.__code__, names, function.__name__))
    kernel: Callable[[DispatchInput, DispatchRule, DispatchState], int] = names["dispatch"]
    return kernel
