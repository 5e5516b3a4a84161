"""Transfers between devices and their hosts, with the rules of lowering (ir/lowering/contention.py, admission.py).

A device has a stream per direction, or a single one if its link is half-duplex.  A stream's transfers run in the order
of the device's list, and each requests the link when the previous one has ended and its dependencies are met.  Links
serve requests first come, first served; ties go to the lower device index.
"""

from __future__ import annotations

from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    DRAIN,
    HOSTED,
    LOAD,
    OFFLOAD_LEAD,
    OFFLOADED,
    RECOMPUTE_LEAD,
    RELOAD_LEAD,
    STEP,
    TRANSFER,
    D,
    L,
    O,
    P,
)
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, index_of


@inlined
def stream_of(a: Step, d: int, kind: int) -> int:
    """The stream of a device for transfers of a kind."""
    return d if kind in (O, D) or a.up[d] == a.down[d] else len(a.capacity) + d


@inlined
def device_of_stream(a: Step, q: int) -> int:
    """The device of a stream."""
    return index_of(q if q < len(a.capacity) else q - len(a.capacity))


@inlined
def wake_at(x: State, d: int, time: float) -> None:
    """Let a device decide at a time, or as soon as it is idle after that."""
    x.wake[d] = min(x.wake[d], max(time, x.compute_end[d]))


@inlined
def _update_request(x: State, q: int) -> None:
    """Update when the next transfer of a stream requests the link."""
    n = index_of(x.next_transfer[q])
    if n == x.transfer_count[q]:
        x.request[q] = NEVER
    else:
        x.request[q] = max(x.transfer_ready[q, n], x.stream_free[q])


@inlined
def push(a: Step, x: State, d: int, kind: int, s: int, j: int, ready: float) -> None:
    """Append a transfer to its stream."""
    q = stream_of(a, d, kind)
    n = index_of(x.transfer_count[q])
    x.transfers[q, n, 0], x.transfers[q, n, 1], x.transfers[q, n, 2] = kind, s, j
    x.transfer_ready[q, n] = ready
    x.transfer_count[q] = n + 1
    if n == x.next_transfer[q]:
        _update_request(x, q)


@inlined
def earlier_stream(a: Step, x: State, one: int, other: int) -> int:
    """The one of two streams that requests its link first; `one` if neither does."""
    if x.request[other] < x.request[one] or (
        x.request[other] == x.request[one] and device_of_stream(a, other) < device_of_stream(a, one)
    ):
        return other
    return one


@inlined
def first_stream(a: Step, x: State) -> int:
    """The stream with the earliest request."""
    first, earliest = 0, x.request[0]
    for q in range(1, len(x.request)):
        time = x.request[q]
        if time < earliest or (time == earliest < NEVER and device_of_stream(a, q) < device_of_stream(a, first)):
            first, earliest = q, time
    return first


@inlined
def may_follow(x: State, lane: int, request: float, d: int) -> bool:
    """Tell whether a request comes after those that the lane has already served."""
    return bool(request > x.last_request[lane] or (request == x.last_request[lane] and d >= x.last_device[lane]))


@inlined
def load_parameters(a: Step, x: State) -> None:
    """Queue parameter loads of stages with an offloaded optimizer; their first forwards wait for them."""
    for s in range(len(a.stages)):
        if a.stages[s, HOSTED] > 0:
            x.parameters_loaded[s] = NEVER
            x.input_ready[s, 0] = NEVER
            d = a.device_of[s]
            push(a, x, d, P, s, 0, 0.0)


@inlined
def offload(a: Step, x: State, d: int, s: int, j: int) -> None:
    """Queue the offload of the forward that a device has started last, and count its bytes."""
    n = index_of(x.offloads_listed[d])
    x.offload_end[d, n], x.offload_bytes[d, n] = NEVER, a.scales[j] * a.stages[s, OFFLOADED]
    x.offloading_bytes[d] += x.offload_bytes[d, n]
    x.host_bytes[d] += x.offload_bytes[d, n]
    x.offloads_listed[d] = n + 1
    push(a, x, d, O, s, j, x.compute_end[d] - a.scales[j] * a.stages[s, OFFLOAD_LEAD])


@inlined
def free_ended_offloads(x: State, d: int, now: float) -> None:
    """Free the bytes of offloads that have ended by `now`."""
    while x.offloads_ended[d] < x.offloads_served[d] and x.offload_end[d, x.offloads_ended[d]] <= now:
        size = x.offload_bytes[d, x.offloads_ended[d]]
        x.used_bytes[d] -= size
        x.offloading_bytes[d] -= size
        x.freed_since_start[d] += size
        x.offloads_ended[d] += 1


@inlined
def admitted(a: Step, x: State, d: int, begin: float, allocated: float) -> float:
    """The start of a compute operation ready at `begin`, after the offloads that admission makes it wait for."""
    if allocated > 0 and x.offloads_at_start[d] < x.offloads_ended[d]:
        lacking = x.used_bytes[d] + x.freed_since_start[d] + allocated - a.capacity[d]
        n = x.offloads_at_start[d]
        while lacking > 0 and n < x.offloads_ended[d]:
            begin = max(begin, x.offload_end[d, n])
            lacking -= x.offload_bytes[d, n]
            n += 1
    return begin


@inlined
def reload(a: Step, x: State, d: int, s: int, j: int, now: float) -> bool:
    """Queue the reload of a micro-batch after the last compute operation of the list; False if that is not possible.

    As in admission, a reload uses the memory of offloads, the oldest first, and only then what that operation frees at
    its end.  It relies on no offload whose end is unknown, and may not precede served transfers of other devices.
    """
    size = a.scales[j] * a.stages[s, OFFLOADED]
    lacking = x.used_bytes[d] + x.freed_since_start[d] + x.freed_at_end[d] + size - a.capacity[d]
    ready, n = max(x.compute_start[d], x.transfer_end[s, j]), x.offloads_at_start[d]
    while lacking > 0 and n < x.offloads_listed[d]:
        ready = max(ready, x.offload_end[d, n])
        lacking -= x.offload_bytes[d, n]
        n += 1
    frees = lacking > 0
    if frees:
        ready = max(ready, x.compute_end[d])
        lacking -= x.freed_at_end[d]
    if lacking > 0 or ready == NEVER:
        return False
    q = stream_of(a, d, L)
    request = max(ready, x.stream_free[q])
    comes_late = x.next_transfer[q] == x.transfer_count[q] and request < now
    if comes_late and not may_follow(x, a.up[d], request, d):
        return False
    if frees:
        x.freed_at_end[d] = 0.0
    x.used_bytes[d] += size
    x.transfer_end[s, j] = NEVER
    push(a, x, d, L, s, j, ready)
    return True


@inlined
def serve(a: Step, x: State, q: int) -> bool:
    """Serve the next transfer of a stream; False if its lane has already served a later request."""
    d = device_of_stream(a, q)
    n = index_of(x.next_transfer[q])
    kind, s, j = index_of(x.transfers[q, n, 0]), index_of(x.transfers[q, n, 1]), index_of(x.transfers[q, n, 2])
    lane = a.down[d] if kind in (O, D) else a.up[d]
    if not may_follow(x, lane, x.request[q], d):
        return False
    if kind == D:
        time = a.stages[s, DRAIN]
    elif kind == P:
        time = a.stages[s, LOAD]
    else:
        time = a.scales[j] * a.stages[s, TRANSFER]
    end = max(x.request[q], x.lane_free[lane]) + time
    x.lane_free[lane], x.last_request[lane], x.last_device[lane] = end, x.request[q], d
    x.next_transfer[q] = n + 1
    x.stream_free[q] = end
    _update_request(x, q)
    if kind == D:
        x.host_free[d] = max(end, x.host_free[d]) + a.stages[s, STEP]
        x.makespan[0] = max(x.makespan[0], x.host_free[d])
    elif kind == P:
        x.parameters_loaded[s] = end
        x.input_ready[s, 0] = max(x.input_arrival[s], end)
        wake_at(x, d, x.input_ready[s, 0])
    else:
        x.transfer_end[s, j] = end
        if kind == O:
            x.offload_end[d, x.offloads_served[d]] = end
            x.offloads_served[d] += 1
            wake_at(x, d, end)
        else:
            wake_at(x, d, end - a.scales[j] * max(a.stages[s, RELOAD_LEAD], a.stages[s, RECOMPUTE_LEAD]))
    return True
