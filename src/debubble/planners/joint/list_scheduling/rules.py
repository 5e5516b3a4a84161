"""The list scheduler's rules: which operation a device starts now, and which reload is due."""

from __future__ import annotations

from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    DROPPED,
    OFFLOADED,
    RECOMPUTE,
    RECOMPUTE_LEAD,
    RELOAD_LEAD,
    RETAINED,
    WEIGHT,
    WORKSPACE,
    F,
    I,
    R,
    W,
)
from debubble.planners.joint.list_scheduling.state import NEVER, State, Step, index_of


@inlined
def reload_time(a: Step, x: State, s: int, j: int, lead: int) -> float:
    """When an operation with this lead may start during the reload of its activation; an I after its R needs all."""
    needs_all = lead == RELOAD_LEAD and j < x.next_r[s]
    time: float = x.transfer_end[s, j] - (0.0 if needs_all else a.scales[j] * a.stages[s, lead])
    return time


@inlined
def backward_ready(a: Step, x: State, s: int, j: int) -> float:
    """Time at which a backward has its gradient and its activation."""
    ready: float = x.gradient_ready[s, j]
    if a.stages[s, OFFLOADED] > 0:
        ready = max(ready, reload_time(a, x, s, j, RELOAD_LEAD)) if j < x.next_l[s] else NEVER
    return ready


@inlined
def backward_bytes(a: Step, x: State, s: int, j: int) -> float:
    """Bytes that a backward allocates, without those that an R has already restored."""
    size: float = a.stages[s, WORKSPACE] - (a.stages[s, DROPPED] if j < x.next_r[s] else 0.0)
    allocated: float = max(a.scales[j] * size, 0.0)
    return allocated


@inlined
def _free_now(a: Step, x: State, d: int) -> float:
    """Bytes that a compute operation may allocate now.

    Memory is already reserved for reloads that wait for offloads, so the difference may be negative; even then,
    admission lets operations start that allocate nothing.
    """
    capacity: float = max(a.capacity[d] - x.used_bytes[d], 0.0)
    return capacity


@inlined
def _free_soon(a: Step, x: State, d: int) -> float:
    """Bytes that are free once all listed offloads have ended."""
    capacity: float = a.capacity[d] - x.used_bytes[d] + x.offloading_bytes[d]
    return capacity


@inlined
def _ready_backward(a: Step, x: State, d: int, now: float) -> tuple[int, float]:
    """The stage of the first backward in priority that can start now, -1 if none, and when the next other one can."""
    best, best_key, soon = -1, NEVER, NEVER
    capacity = _free_now(a, x, d)
    for n in range(a.stage_counts[d]):
        s = index_of(a.stages_of[d, n])
        j = index_of(x.next_i[s])
        if j >= x.next_f[s] or x.gradient_ready[s, j] == NEVER or backward_bytes(a, x, s, j) > capacity:
            continue
        ready = backward_ready(a, x, s, j)
        if ready > now:
            soon = min(soon, ready)
        elif j * a.period + a.backward_priority[s] < best_key:
            best, best_key = s, j * a.period + a.backward_priority[s]
    return best, soon


@inlined
def _ready_forward(a: Step, x: State, d: int, now: float, soon: float) -> tuple[int, float]:
    """The stage of the forward to start now, -1 if none, and when the next other operation can start.

    In addition to what it retains, a forward must leave the reserve free, or the workspace of its own backward if
    nothing else is in flight; bytes being offloaded count as free here.  The host must have room for its offload.
    """
    best, best_key = -1, NEVER
    capacity, capacity_soon = _free_now(a, x, d), _free_soon(a, x, d)
    spare = a.reserve[d] if x.in_flight[d] > 0 else 0.0
    for n in range(a.stage_counts[d]):
        s = index_of(a.stages_of[d, n])
        j = index_of(x.next_f[s])
        if j >= len(a.scales) or x.input_ready[s, j] == NEVER or j - x.next_i[s] >= a.max_in_flight[s]:
            continue
        retained = a.scales[j] * a.stages[s, RETAINED]
        if retained > capacity or retained + max(spare, a.scales[j] * a.stages[s, WORKSPACE]) > capacity_soon:
            continue
        if a.stages[s, OFFLOADED] > 0 and x.host_bytes[d] + a.scales[j] * a.stages[s, OFFLOADED] > a.host[d]:
            continue
        if x.input_ready[s, j] > now:
            soon = min(soon, x.input_ready[s, j])
        elif a.age * j - a.forward_depth[s] < best_key:
            best, best_key = s, a.age * j - a.forward_depth[s]
    return best, soon


@inlined
def _next_recomputation(a: Step, x: State, d: int, now: float, soon: float) -> tuple[int, float]:
    """The stage of the first micro-batch in priority to recompute before its gradient arrives, -1 if none.

    Also when the next other operation can start.  The reserve stays free, as another backward may come first.
    """
    best, best_key = -1, NEVER
    capacity, capacity_soon = _free_now(a, x, d), _free_soon(a, x, d)
    for n in range(a.stage_counts[d]):
        s = index_of(a.stages_of[d, n])
        j = index_of(x.next_r[s])
        if j >= x.next_f[s] or a.stages[s, RECOMPUTE] <= 0:
            continue
        size = a.scales[j] * a.stages[s, DROPPED]
        if size > capacity or size + a.reserve[d] > capacity_soon:
            continue
        if a.stages[s, OFFLOADED] > 0:
            back = reload_time(a, x, s, j, RECOMPUTE_LEAD) if j < x.next_l[s] else NEVER
            if back > now:
                soon = min(soon, back)
                continue
        if j * a.period + a.backward_priority[s] < best_key:
            best, best_key = s, j * a.period + a.backward_priority[s]
    return best, soon


@inlined
def _oldest_weight(a: Step, x: State, d: int) -> int:
    """The stage of the first waiting weight gradient in priority."""
    best, best_key = -1, NEVER
    for n in range(a.stage_counts[d]):
        s = index_of(a.stages_of[d, n])
        if x.next_w[s] < x.next_i[s] and x.next_w[s] * a.period + a.backward_priority[s] < best_key:
            best, best_key = s, x.next_w[s] * a.period + a.backward_priority[s]
    return best


@inlined
def choose(a: Step, x: State, d: int, now: float) -> tuple[int, int, float]:
    """The kind and stage of the compute operation to start now, -1 if none, and when another one can start."""
    if x.waiting_weights[d] > 0 and x.waiting_weights[d] >= a.backlog:
        return W, _oldest_weight(a, x, d), NEVER
    stage, soon = _ready_backward(a, x, d, now)
    kind = I
    if stage < 0 or a.after_forwards[stage] > 0:
        forward, soon_forward = _ready_forward(a, x, d, now, soon)
        if stage < 0 or forward >= 0:
            stage, soon, kind = forward, soon_forward, F
    if stage < 0 and x.recomputed_ahead[d] < a.ahead:
        stage, soon = _next_recomputation(a, x, d, now, soon)
        kind = R
    if stage < 0 and x.waiting_weights[d] > 0:
        stage = _oldest_weight(a, x, d)
        kind = W
        if now + a.timeout * a.scales[x.next_w[stage]] * a.stages[stage, WEIGHT] > soon:
            stage = -1
    return kind if stage >= 0 else -1, stage, soon


@inlined
def due_reload(a: Step, x: State, d: int, now: float) -> int:
    """The stage of the first reload in priority whose offload has ended and whose backward is near; -1 if none."""
    best, best_key = -1, NEVER
    # Counting running offloads as free gave faster lists, but slower ones after their order was searched.
    capacity = _free_now(a, x, d)
    for n in range(a.stage_counts[d]):
        s = index_of(a.stages_of[d, n])
        j = index_of(x.next_l[s])
        if a.stages[s, OFFLOADED] <= 0 or j >= x.next_f[s] or x.transfer_end[s, j] > now:
            continue
        if x.progress[j] >= 2 * len(a.stages) - 1 - s - a.horizon and j * a.period + a.backward_priority[s] < best_key:
            best, best_key = s, j * a.period + a.backward_priority[s]
    if best >= 0:
        j = index_of(x.next_l[best])
        if a.scales[j] * (a.stages[best, OFFLOADED] + a.stages[best, WORKSPACE]) > capacity:
            return -1
    return best
