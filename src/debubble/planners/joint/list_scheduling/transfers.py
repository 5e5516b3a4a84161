"""Transfers between devices and their hosts, as lowering has them (ir/lowering/contention.py, admission.py).

A device has a stream per direction, or one where its link is half-duplex.  A stream's transfers go in the order of the
device's list, and each asks for the link once the one before it has ended and what it waits for is done.  Turns go by
arrival; of those that ask at one moment the device that comes first has its turn first.
"""

from __future__ import annotations

from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    AGAIN_LEAD,
    BACK_LEAD,
    DRAIN,
    HOSTED,
    LOAD,
    MOVED,
    OUT_LEAD,
    STEP,
    TRANSFER,
    D,
    L,
    O,
    P,
)
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, place_of


@inlined
def stream_of(a: Step, d: int, kind: int) -> int:
    """The stream of a device in which transfers of a kind go."""
    return d if kind in (O, D) or a.up[d] == a.down[d] else len(a.capacity) + d


@inlined
def device_of_stream(a: Step, q: int) -> int:
    """The device whose stream it is."""
    return place_of(q if q < len(a.capacity) else q - len(a.capacity))


@inlined
def wake_at(x: State, d: int, time: float) -> None:
    """Let a device decide at a time, or as soon as it is free then."""
    x.wake[d] = min(x.wake[d], max(time, x.free[d]))


@inlined
def _look(x: State, q: int) -> None:
    """Note when the next transfer of a device's stream asks for the link."""
    n = place_of(x.first[q])
    if n == x.after_last[q]:
        x.ask[q] = NEVER
    else:
        x.ask[q] = max(x.ready[q, n], x.idle_from[q])


@inlined
def push(a: Step, x: State, d: int, kind: int, s: int, j: int, ready: float) -> None:
    """Put a transfer into its stream."""
    q = stream_of(a, d, kind)
    n = place_of(x.after_last[q])
    x.transfers[q, n, 0], x.transfers[q, n, 1], x.transfers[q, n, 2] = kind, s, j
    x.ready[q, n] = ready
    x.after_last[q] = n + 1
    if n == x.first[q]:
        _look(x, q)


@inlined
def earlier(a: Step, x: State, one: int, other: int) -> int:
    """The one of two streams that asks for its link first; the first one where neither does."""
    if x.ask[other] < x.ask[one] or (
        x.ask[other] == x.ask[one] and device_of_stream(a, other) < device_of_stream(a, one)
    ):
        return other
    return one


@inlined
def first_to_ask(a: Step, x: State) -> int:
    """The stream that asks for its link first of all."""
    first, least = 0, x.ask[0]
    for q in range(1, len(x.ask)):
        ask = x.ask[q]
        if ask < least or (ask == least and ask < NEVER and device_of_stream(a, q) < device_of_stream(a, first)):
            first, least = q, ask
    return first


@inlined
def in_turn(x: State, lane: int, ask: float, d: int) -> bool:
    """True if a transfer that is requested then comes after those already served."""
    return bool(ask > x.turn[lane] or (ask == x.turn[lane] and d >= x.turn_device[lane]))


@inlined
def load_parameters(a: Step, x: State) -> None:
    """Let parameters come from the hosts that step them; the first forward of their stages waits for them."""
    for s in range(len(a.stages)):
        if a.stages[s, HOSTED] > 0:
            x.loaded[s] = NEVER
            x.data[s, 0] = NEVER
            d = a.device_of[s]
            push(a, x, d, P, s, 0, 0.0)


@inlined
def offload(a: Step, x: State, d: int, s: int, j: int) -> None:
    """Put the offload of the forward that a device has begun last into its stream, and count its bytes.

    The moment from which it may ask for the link is decided here alone.
    """
    n = place_of(x.listed[d])
    x.gone[d, n], x.gone_bytes[d, n] = NEVER, a.scales[j] * a.stages[s, MOVED]
    x.going[d] += x.gone_bytes[d, n]
    x.away[d] += x.gone_bytes[d, n]
    x.listed[d] = n + 1
    push(a, x, d, O, s, j, x.free[d] - a.scales[j] * a.stages[s, OUT_LEAD])


@inlined
def count_what_left(x: State, d: int, now: float) -> None:
    """Count the bytes of offloads that have ended as free."""
    while x.ended[d] < x.served[d] and x.gone[d, x.ended[d]] <= now:
        size = x.gone_bytes[d, x.ended[d]]
        x.used[d] -= size
        x.going[d] -= size
        x.unknown[d] += size
        x.ended[d] += 1


@inlined
def admitted(a: Step, x: State, d: int, begin: float, allocated: float) -> float:
    """The start of a compute operation that has all but memory at `begin`, as admission lets it wait for offloads."""
    if allocated > 0 and x.known[d] < x.ended[d]:
        lacking = x.used[d] + x.unknown[d] + allocated - a.capacity[d]
        n = x.known[d]
        while lacking > 0 and n < x.ended[d]:
            begin = max(begin, x.gone[d, n])
            lacking -= x.gone_bytes[d, n]
            n += 1
    return begin


@inlined
def reload(a: Step, x: State, d: int, s: int, j: int, now: float) -> bool:
    """Put the reload of a micro-batch after the last compute operation of the list; False if it cannot stand there.

    As admission does, it lets a reload use the room of offloads, the oldest first, and only then what that operation
    frees at its end.  Offloads whose end is not known are not counted on, nor may a reload come before transfers of
    other devices that have had their turns.
    """
    size = a.scales[j] * a.stages[s, MOVED]
    lacking = x.used[d] + x.unknown[d] + x.freed[d] + size - a.capacity[d]
    ready, n = max(x.begun[d], x.back[s, j]), x.known[d]
    while lacking > 0 and n < x.listed[d]:
        ready = max(ready, x.gone[d, n])
        lacking -= x.gone_bytes[d, n]
        n += 1
    frees = lacking > 0
    if frees:
        ready = max(ready, x.free[d])
        lacking -= x.freed[d]
    if lacking > 0 or ready == NEVER:
        return False
    q = stream_of(a, d, L)
    ask = max(ready, x.idle_from[q])
    comes_late = x.first[q] == x.after_last[q] and ask < now
    if comes_late and not in_turn(x, a.up[d], ask, d):
        return False
    if frees:
        x.freed[d] = 0.0
    x.used[d] += size
    x.back[s, j] = NEVER
    push(a, x, d, L, s, j, ready)
    return True


@inlined
def serve(a: Step, x: State, q: int) -> bool:
    """Give the next transfer of a stream its turn; False if one that comes after it has had its own."""
    d = device_of_stream(a, q)
    n = place_of(x.first[q])
    kind, s, j = place_of(x.transfers[q, n, 0]), place_of(x.transfers[q, n, 1]), place_of(x.transfers[q, n, 2])
    lane = a.down[d] if kind in (O, D) else a.up[d]
    if not in_turn(x, lane, x.ask[q], d):
        return False
    if kind == D:
        time = a.stages[s, DRAIN]
    elif kind == P:
        time = a.stages[s, LOAD]
    else:
        time = a.scales[j] * a.stages[s, TRANSFER]
    end = max(x.ask[q], x.lane_free[lane]) + time
    x.lane_free[lane], x.turn[lane], x.turn_device[lane] = end, x.ask[q], d
    x.first[q] = n + 1
    x.idle_from[q] = end
    _look(x, q)
    if kind == D:
        x.stepped[d] = max(end, x.stepped[d]) + a.stages[s, STEP]
        x.last[0] = max(x.last[0], x.stepped[d])
    elif kind == P:
        x.loaded[s] = end
        x.data[s, 0] = max(x.arrived[s], end)
        wake_at(x, d, x.data[s, 0])
    else:
        x.back[s, j] = end
        if kind == O:
            x.gone[d, x.served[d]] = end
            x.served[d] += 1
            wake_at(x, d, end)
        else:
            wake_at(x, d, end - a.scales[j] * max(a.stages[s, BACK_LEAD], a.stages[s, AGAIN_LEAD]))
    return True
