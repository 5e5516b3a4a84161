"""The list scheduler's choices: what a device starts now, and which reload is due."""

from __future__ import annotations

from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    AGAIN,
    AGAIN_LEAD,
    BACK_LEAD,
    DROPPED,
    KEPT,
    MOVED,
    WEIGHT,
    WORKSPACE,
    F,
    I,
    R,
    W,
)
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, place_of


@inlined
def back_for(a: Step, x: State, s: int, j: int, lead: int) -> float:
    """Time at which enough of an activation is back for an operation with this lead; a B or I after its R needs all."""
    whole = lead == BACK_LEAD and j < x.next_r[s]
    back: float = x.back[s, j] - (0.0 if whole else a.scales[j] * a.stages[s, lead])
    return back


@inlined
def backward_ready(a: Step, x: State, s: int, j: int) -> float:
    """Time at which a backward has its gradient and its activation.

    The moment from which it may begin is decided here alone.
    """
    ready: float = x.gradient[s, j]
    if a.stages[s, MOVED] > 0:
        ready = max(ready, back_for(a, x, s, j, BACK_LEAD)) if j < x.next_l[s] else NEVER
    return ready


@inlined
def backward_capacity(a: Step, x: State, s: int, j: int) -> float:
    """Bytes that a backward allocates: none that an R has brought back."""
    size: float = a.stages[s, WORKSPACE] - (a.stages[s, DROPPED] if j < x.next_r[s] else 0.0)
    allocated: float = max(a.scales[j] * size, 0.0)
    return allocated


@inlined
def _capacity_now(a: Step, x: State, d: int) -> float:
    """Bytes that a compute operation may allocate now.

    Reloads that wait for offloads have their room already: there may be less than none.  Admission lets what allocates
    nothing start still.
    """
    capacity: float = max(a.capacity[d] - x.used[d], 0.0)
    return capacity


@inlined
def _capacity_soon(a: Step, x: State, d: int) -> float:
    """Bytes that are free once the offloads in the list have ended."""
    capacity: float = a.capacity[d] - x.used[d] + x.going[d]
    return capacity


@inlined
def _ready_backward(a: Step, x: State, d: int, now: float) -> tuple[int, float]:
    """The stage of the oldest backward that can start now, -1 for none, and when the next of the others can."""
    best, best_key, soon = -1, NEVER, NEVER
    capacity = _capacity_now(a, x, d)
    for n in range(a.stage_counts[d]):
        s = place_of(a.stages_of[d, n])
        j = place_of(x.next_i[s])
        if j >= x.next_f[s] or x.gradient[s, j] == NEVER or backward_capacity(a, x, s, j) > capacity:
            continue
        ready = backward_ready(a, x, s, j)
        if ready > now:
            soon = min(soon, ready)
        elif j * a.period + a.from_last[s] < best_key:
            best, best_key = s, j * a.period + a.from_last[s]
    return best, soon


@inlined
def _ready_forward(a: Step, x: State, d: int, now: float, soon: float) -> tuple[int, float]:
    """The stage of the forward that is to start now, -1 for none, and when the next other operation can.

    Besides what it keeps, it must leave the reserve, or room for its own backward where nothing else is in flight; what
    is on its way to the host is room for these.  What it offloads must have room there.
    """
    best, best_key = -1, NEVER
    capacity, capacity_soon = _capacity_now(a, x, d), _capacity_soon(a, x, d)
    spare = a.reserve[d] if x.in_flight[d] > 0 else 0.0
    for n in range(a.stage_counts[d]):
        s = place_of(a.stages_of[d, n])
        j = place_of(x.next_f[s])
        if j >= len(a.scales) or x.data[s, j] == NEVER or j - x.next_i[s] >= a.most[s]:
            continue
        kept = a.scales[j] * a.stages[s, KEPT]
        if kept > capacity or kept + max(spare, a.scales[j] * a.stages[s, WORKSPACE]) > capacity_soon:
            continue
        if a.stages[s, MOVED] > 0 and x.away[d] + a.scales[j] * a.stages[s, MOVED] > a.host[d]:
            continue
        if x.data[s, j] > now:
            soon = min(soon, x.data[s, j])
        elif a.age * j - a.to_stage[s] < best_key:
            best, best_key = s, a.age * j - a.to_stage[s]
    return best, soon


@inlined
def _next_recomputation(a: Step, x: State, d: int, now: float, soon: float) -> tuple[int, float]:
    """The stage of the oldest micro-batch that can be recomputed before its gradient has come, -1 for none.

    And when the next other operation can start.
    The backward that comes first may be another one: it keeps its room.
    """
    best, best_key = -1, NEVER
    capacity, capacity_soon = _capacity_now(a, x, d), _capacity_soon(a, x, d)
    for n in range(a.stage_counts[d]):
        s = place_of(a.stages_of[d, n])
        j = place_of(x.next_r[s])
        if j >= x.next_f[s] or a.stages[s, AGAIN] <= 0:
            continue
        size = a.scales[j] * a.stages[s, DROPPED]
        if size > capacity or size + a.reserve[d] > capacity_soon:
            continue
        if a.stages[s, MOVED] > 0:
            back = back_for(a, x, s, j, AGAIN_LEAD) if j < x.next_l[s] else NEVER
            if back > now:
                soon = min(soon, back)
                continue
        if j * a.period + a.from_last[s] < best_key:
            best, best_key = s, j * a.period + a.from_last[s]
    return best, soon


@inlined
def _oldest_weight(a: Step, x: State, d: int) -> int:
    """The stage of the oldest weight gradient that waits."""
    best, best_key = -1, NEVER
    for n in range(a.stage_counts[d]):
        s = place_of(a.stages_of[d, n])
        if x.next_w[s] < x.next_i[s] and x.next_w[s] * a.period + a.from_last[s] < best_key:
            best, best_key = s, x.next_w[s] * a.period + a.from_last[s]
    return best


@inlined
def choose(a: Step, x: State, d: int, now: float) -> tuple[int, int, float]:
    """The kind and stage of the compute operation that a device starts now, -1 for none, and when another one can."""
    if x.waiting[d] > 0 and x.waiting[d] >= a.backlog:
        return W, _oldest_weight(a, x, d), NEVER
    stage, soon = _ready_backward(a, x, d, now)
    kind = I
    if stage < 0 or a.after_forwards[stage] > 0:
        forward, soon_forward = _ready_forward(a, x, d, now, soon)
        if stage < 0 or forward >= 0:
            stage, soon, kind = forward, soon_forward, F
    if stage < 0 and x.early[d] < a.ahead:
        stage, soon = _next_recomputation(a, x, d, now, soon)
        kind = R
    if stage < 0 and x.waiting[d] > 0:
        stage = _oldest_weight(a, x, d)
        kind = W
        if now + a.timeout * a.scales[x.next_w[stage]] * a.stages[stage, WEIGHT] > soon:
            stage = -1
    return kind if stage >= 0 else -1, stage, soon


@inlined
def due_reload(a: Step, x: State, d: int, now: float) -> int:
    """The stage of the most urgent reload whose offload has ended and whose backward is near; -1: there is none."""
    best, best_key = -1, NEVER
    # Lists that counted on offloads under way here were faster, but slower once their order was searched.
    capacity = _capacity_now(a, x, d)
    for n in range(a.stage_counts[d]):
        s = place_of(a.stages_of[d, n])
        j = place_of(x.next_l[s])
        if a.stages[s, MOVED] <= 0 or j >= x.next_f[s] or x.back[s, j] > now:
            continue
        if x.started[j] >= 2 * len(a.stages) - 1 - s - a.horizon and j * a.period + a.from_last[s] < best_key:
            best, best_key = s, j * a.period + a.from_last[s]
    if best >= 0:
        j = place_of(x.next_l[best])
        if a.scales[j] * (a.stages[best, MOVED] + a.stages[best, WORKSPACE]) > capacity:
            return -1
    return best
