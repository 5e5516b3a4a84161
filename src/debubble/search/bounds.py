"""Lower bounds on the objective of all orders of operations.

There are three bounds per device, each from the device's own lanes and memory with everything else as delays:

* *work*: its work, the time before its first operation and after its last, and the forced idle time before its first
  backward, because memory (and the host link) limits the number of forwards, and after its last forward, because memory
  limits the number of backwards that remain;
* *chain*: the longest chain of dependencies;
* *memory*: the area under its memory curve is at most limit x time, and each activation has at least the smaller of the
  areas retained and offloaded; the link's time limits how many can be offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ir import Kind, Number, Op
from debubble.ir.schedule import share_of
from debubble.search.problem import OrderProblem


def lower_bound(problem: OrderProblem) -> Number:
    """The best analytic lower bound on the objective of all schedules of the problem, in the costs' unit of time."""
    bounds = [bound(problem, d) for bound in (_work_bound, _memory_bound) for d in range(problem.devices)]
    return max(_chain_bound(problem), *bounds)


def round_trip(problem: OrderProblem, stage: int) -> Number:
    """Minimum time from the end of a stage's forward to the start of its backward, for the shortest micro-batch."""
    costs, top = problem.costs, problem.stages - 1
    up = _forward_chain(problem, stage, top) + costs.forward[top] - costs.forward[stage]
    return (up + _backward_chain(problem, top, stage)) * _scale(problem)


def idle_allowed(problem: OrderProblem) -> list[Number]:
    """The idle time that the lower bound allows each device, in addition to forced idle time."""
    bound = lower_bound(problem)
    return [bound - _work_bound(problem, device) for device in range(problem.devices)]


@dataclass(frozen=True)
class _Delays:
    """Minimum times of one micro-batch before, between and after a device's operations."""

    head: Number
    """Before the device's first operation."""
    round_trip: Number
    """From the end of the device's last stage's forward to the start of its backward."""
    tail: Number
    """From the end of its first stage's input-gradient backward to the end of the step, except for the device's W."""
    after_forward: Number
    """From the end of its last stage's forward to the end of the objective's last dependent operation."""
    first_chain: Number
    """From the start of its first stage's forward to the start of its first backward."""


def _scale(problem: OrderProblem) -> Number:
    return min(problem.costs.micro_batch_scale or (1,))


def _total_length(problem: OrderProblem) -> Number:
    """The sum of the micro-batches' lengths."""
    return sum(problem.costs.micro_batch_scale or (1,) * problem.micro_batches)


def _backward(problem: OrderProblem, stage: int) -> Number:
    """Minimum time of a backward until its gradient leaves the stage."""
    return problem.costs.backward_input[stage] if problem.split else problem.costs.backward(stage)


def _communication(problem: OrderProblem, stage: int) -> Number:
    """Time of a message between a stage and the next; nothing on one device."""
    device_of = problem.placement.device_of
    return 0 if device_of[stage] == device_of[stage + 1] else problem.costs.communication[stage]


def _forward_chain(problem: OrderProblem, begin: int, end: int) -> Number:
    """Time from the start of F of stage `begin` to the start of F of stage `end`."""
    return sum(problem.costs.forward[s] + _communication(problem, s) for s in range(begin, end))


def _backward_chain(problem: OrderProblem, begin: int, end: int) -> Number:
    """Time from the start of the backward of stage `begin` down to the start of that of stage `end`."""
    return sum(_backward(problem, s) + _communication(problem, s - 1) for s in range(begin, end, -1))


def _delays(problem: OrderProblem, device: int) -> _Delays:
    costs, scale = problem.costs, _scale(problem)
    device_stages = problem.placement.stages_of[device]
    low, high, top = device_stages[0], device_stages[-1], problem.stages - 1
    weight = costs.backward_weight[0] if problem.split else 0
    last = low if problem.objective == "span" else 0
    from_last_stage = _backward_chain(problem, top, last) + _backward(problem, last)
    after_forward = _forward_chain(problem, high, top) + costs.forward[top] - costs.forward[high] + from_last_stage
    tail: Number = 0
    if low > 0:
        tail = _communication(problem, low - 1) + _backward_chain(problem, low - 1, 0) + _backward(problem, 0) + weight
    return _Delays(
        head=_forward_chain(problem, 0, low) * scale,
        round_trip=round_trip(problem, high),
        tail=tail * scale,
        after_forward=(after_forward + (costs.backward_weight[last] if problem.split else 0)) * scale,
        first_chain=(_forward_chain(problem, low, top) + costs.forward[top] + _backward_chain(problem, top, high))
        * scale,
    )


def _chain_bound(problem: OrderProblem) -> Number:
    """Chain bound: one micro-batch through all stages; for the span, between each device's own operations."""
    top, weight = problem.stages - 1, problem.costs.backward_weight[0] if problem.split else 0
    if problem.objective == "span":
        return max(_delays(problem, d).first_chain for d in range(problem.devices))
    down = _backward_chain(problem, top, 0) + _backward(problem, 0) + weight
    return (_forward_chain(problem, 0, top) + problem.costs.forward[top] + down) * _scale(problem)


def _work_bound(problem: OrderProblem, device: int) -> Number:
    """Work bound: head, work, and forced idle time before the first backward and after the last."""
    costs, delays = problem.costs, _delays(problem, device)
    device_stages = problem.placement.stages_of[device]
    total = _total_length(problem)
    work = sum(costs.work(s) for s in device_stages) * total
    fused = [s for s in device_stages if s in problem.fused_recompute]
    if fused:
        recomputation = sum(costs.recompute[s] * _recomputation_count(problem, s) for s in fused)
        return (delays.head if problem.objective == "makespan" else 0) + work + recomputation
    idle_before = max(0, delays.first_chain - _max_work_before_backward(problem, device, delays.first_chain))
    idle_after = max(0, delays.after_forward - _max_work_after_forward(problem, device))
    if problem.objective == "span":
        return work + idle_before + idle_after
    if delays.tail:
        idle_after = max(idle_after, delays.tail - _max_work_after_backward(problem, device))
    return delays.head + work + idle_before + idle_after


def _recomputation_count(problem: OrderProblem, stage: int) -> Number:
    """The number of full recomputations of a stage: one per micro-batch, weighted by its length and fraction."""
    return sum(
        problem.costs.scale_of(j) * share_of(problem.recompute_fraction, stage, j) for j in range(problem.micro_batches)
    )


def _max_work_before_backward(problem: OrderProblem, device: int, window: Number) -> Number:
    """Maximum forward work that a device can do in the first `window` after its first operation may start."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    capacity = costs.capacity_of(device)
    possible = min(window, sum(costs.forward[s] for s in device_stages) * _total_length(problem))
    if capacity is None or not problem.is_uniform or (problem.offload and len(device_stages) > 1):
        return possible
    if len(device_stages) == 1:
        done = _max_stage_forwards(problem, device_stages[0], capacity, window)
    else:
        forwards = [(_retained_bytes(problem, s), costs.forward[s], m) for s in device_stages]
        done = min(possible, _max_work(capacity, forwards))
    if problem.recompute:
        # Dropped activations admit further forwards, at the cost of later recomputation.
        done += (possible - done) * max(_gain_from_dropping(problem, s) for s in device_stages)
    return done


def _max_stage_forwards(problem: OrderProblem, stage: int, capacity: Number, window: Number) -> Number:
    """Maximum forward work of a device's only stage in that time, without recomputation."""
    costs, m = problem.costs, problem.micro_batches
    forward, retained = costs.forward[stage], _retained_bytes(problem, stage)
    if not retained:
        return min(window, forward * m)
    resident = int(capacity // retained)
    moved, transfer, _ = _offload_costs(problem, stage)
    done: Number = 0
    for count in range(m):
        begin: Number = count * forward
        if count >= resident:
            if not moved:
                break
            # The (count + 1)-th forward needs this number of completed offloads.
            offloads = math.ceil((((count + 1) * retained) - capacity) / moved - 1e-9)
            begin = max(begin, forward - problem.max_lead(Op(Kind.O, stage, 0)) + offloads * transfer)
        if begin >= window:
            break
        done += min(forward, window - begin)
    return done


def _gain_from_dropping(problem: OrderProblem, stage: int) -> Number:
    """Fraction of a forward's time gained by running it early and recomputing it later."""
    forward = problem.costs.forward[stage]
    costs = problem.costs
    min_recompute = min(times[stage] for times in (costs.recompute, costs.recompute_deeper) if times is not None)
    recomputation = min_recompute * share_of(problem.recompute_fraction, stage, 0)
    return max(forward - recomputation, 0) / forward if forward else 0


def _max_work_after_backward(problem: OrderProblem, device: int) -> Number:
    """Maximum weight-gradient work that can remain after the last input-gradient backward of a device's first stage."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    if not problem.split:
        return 0
    capacity, low = costs.capacity_of(device), device_stages[0]
    if capacity is None or not problem.is_uniform:
        return sum(costs.backward_weight[s] for s in device_stages) * _total_length(problem)
    # During the last backward its own activation is in memory too.
    alongside = max(0, capacity - max(_retained_bytes(problem, low), costs.activation_after_input[low]))
    waiting = [(costs.activation_after_input[s], costs.backward_weight[s], m - (s == low)) for s in device_stages]
    return costs.backward_weight[low] + _max_work(alongside, waiting)


def _max_work_after_forward(problem: OrderProblem, device: int) -> Number:
    """Maximum work that can remain on a device after its last forward, limited by what memory holds then."""
    costs, m, split = problem.costs, problem.micro_batches, problem.split
    device_stages = problem.placement.stages_of[device]
    capacity, sizes = costs.capacity_of(device), [_retained_bytes(problem, s) for s in device_stages]
    if capacity is None or problem.frees_memory or not problem.is_uniform or m * sum(sizes) <= capacity:
        # If all forwards can precede all backwards, idle time between them counts as time before the first backward.
        return math.inf
    backwards = [(size, costs.backward(s), m) for s, size in zip(device_stages, sizes, strict=True)]
    weights = [(costs.activation_after_input[s], costs.backward_weight[s], m) for s in device_stages if split]
    return _max_work(capacity, backwards + weights)


def _max_work(capacity: Number, pieces: Sequence[tuple[Number, Number, int]]) -> Number:
    """Maximum total time of items (size, time, count) that fit into `capacity`; one item may fit fractionally."""
    sizes = [size for size, *_ in pieces if size]
    min_size = min(sizes, default=1)
    if all(size % min_size == 0 for size in sizes):
        capacity = math.floor(capacity / min_size + 1e-9) * min_size
    done: Number = 0
    for size, time, number in sorted(pieces, key=lambda piece: piece[1] / piece[0] if piece[0] else math.inf)[::-1]:
        full_count = min(number, max(0, int(capacity // size))) if size else number
        done += full_count * time
        capacity -= full_count * size
        if full_count < number and capacity > 0:
            done += time * capacity / size
            capacity = 0
    return done


def _memory_bound(problem: OrderProblem, device: int) -> Number:
    """Memory bound: the time needed by the area under the memory curve of a device with one stage."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    capacity = costs.capacity_of(device)
    if capacity is None or len(device_stages) > 1 or not problem.is_uniform or problem.objective == "span":
        return 0
    stage, delays = device_stages[0], _delays(problem, device)
    size = _retained_bytes(problem, stage)
    if not size or capacity < size or problem.recompute or stage in problem.fused_recompute:
        return 0
    f, b = costs.forward[stage], _backward(problem, stage)
    weight = costs.backward_weight[stage] if problem.split else 0
    # Area is lost while the first forwards fill the memory and the last backwards drain it.
    levels = range(1, min(int(capacity // size), m) + 1)
    filling = sum((capacity - size * k) * f for k in levels)
    draining = sum((capacity - size * k) * b for k in levels)
    residue = weight * costs.activation_after_input[stage] * m
    without_drain = _area_time(problem, stage, capacity, delays.round_trip, filling + draining)
    with_drain = _area_time(problem, stage, capacity, delays.round_trip, filling + residue)
    return delays.head + max(without_drain + max(delays.tail, weight), with_drain)


def _area_time(problem: OrderProblem, stage: int, capacity: Number, round_trip: Number, lost: Number) -> Number:
    """Minimum time in which m activations fit under `capacity`, each retained for the round trip or offloaded."""
    costs, m = problem.costs, problem.micro_batches
    size, moved, out, back = _retained_bytes(problem, stage), *_offload_costs(problem, stage)
    present = size * (costs.forward[stage] + _backward(problem, stage))
    area = present + size * round_trip
    leads = problem.max_lead(Op(Kind.O, stage, 0)) + problem.backward_lead(stage)
    saved = moved * (round_trip + leads - out - back)
    if saved <= 0:
        return (m * area + lost) / capacity
    busy = out + back if costs.host_link == "half-duplex" else max(out, back)
    all_offloaded = (m * (area - saved) + lost) / capacity
    # At most time / busy activations can be offloaded.
    return max(all_offloaded, (m * area + lost) / (capacity + saved / busy)) if busy else all_offloaded


def _retained_bytes(problem: OrderProblem, stage: int) -> Number:
    """Bytes that F retains without explicit recomputation."""
    costs = problem.costs
    if stage in problem.fused_recompute:
        return costs.activation[stage] - costs.dropped_bytes(stage) * share_of(problem.recompute_fraction, stage, 0)
    return costs.activation[stage]


def _offload_costs(problem: OrderProblem, stage: int) -> tuple[Number, Number, Number]:
    """The bytes of an offload, its time and the reload's time; zeros without offload."""
    transfers = problem.costs.transfers
    if not problem.offload or transfers is None:
        return 0, 0, 0
    share = share_of(problem.offload_fraction, stage, 0)
    return _retained_bytes(problem, stage) * share, transfers.offload[stage] * share, transfers.reload[stage] * share
