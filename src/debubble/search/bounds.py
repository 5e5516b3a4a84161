"""Lower bounds on the objective: what no order of operations can beat.

Three arguments per device, each from the device's own lanes and memory with everything else as delays:

* *work*: all its work, the time before its first operation and after its last, and the idle time that is forced
  before its first backward because memory (and the link to the host) lets in only so many forwards, and after its last
  forward because only so many backwards are left that memory held until then;
* *chain*: the longest chain of data;
* *memory*: the area under its memory curve is at most limit x time, and each activation costs at least the smaller of
  what keeping it and what moving it costs; the link's time bounds how many can be moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ir import Kind, Number, Op
from debubble.ir.schedule import share_of
from debubble.search.problem import OrderProblem


def lower_bound(problem: OrderProblem) -> Number:
    """Compute the best of the analytic bounds: a time that no schedule of the problem can beat, in the costs' unit."""
    devices = range(problem.devices)
    return max(_chain(problem), *(_work(problem, d) for d in devices), *(_memory(problem, d) for d in devices))


def round_trip(problem: OrderProblem, stage: int) -> Number:
    """The least time from the end of a stage's forward to the start of its backward, for the shortest micro-batch."""
    costs, top = problem.costs, problem.stages - 1
    up = _forward_chain(problem, stage, top) + costs.forward[top] - costs.forward[stage]
    return (up + _backward_chain(problem, top, stage)) * _scale(problem)


def idle_allowed(problem: OrderProblem) -> list[Number]:
    """The idle time that the lower bound leaves each device, beyond what is forced before its first backward."""
    bound = lower_bound(problem)
    return [bound - _work(problem, device) for device in range(problem.devices)]


@dataclass(frozen=True)
class _Delays:
    """Least times of one micro-batch around a device's first stage, without the device's own lanes."""

    head: Number
    """Before the device's first operation."""
    round_trip: Number
    """From the end of the device's last stage's forward to the start of its backward."""
    tail: Number
    """From the end of its first stage's backward for inputs to the end of everything (its own W apart)."""
    way_back: Number
    """From the end of its last stage's forward to the end of everything that follows from it and counts."""
    own_chain: Number
    """From the start of its first stage's forward to the start of its first backward."""


def _scale(problem: OrderProblem) -> Number:
    return min(problem.costs.micro_batch_scale or (1,))


def _total(problem: OrderProblem) -> Number:
    """Micro-batches, counted by their length."""
    return sum(problem.costs.micro_batch_scale or (1,) * problem.micro_batches)


def _backward(problem: OrderProblem, stage: int) -> Number:
    """Least time before the gradient leaves a stage."""
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
    from_turn = _backward_chain(problem, top, last) + _backward(problem, last)
    way_back = _forward_chain(problem, high, top) + costs.forward[top] - costs.forward[high] + from_turn
    tail: Number = 0
    if low > 0:
        tail = _communication(problem, low - 1) + _backward_chain(problem, low - 1, 0) + _backward(problem, 0) + weight
    return _Delays(
        head=_forward_chain(problem, 0, low) * scale,
        round_trip=round_trip(problem, high),
        tail=tail * scale,
        way_back=(way_back + (costs.backward_weight[last] if problem.split else 0)) * scale,
        own_chain=(_forward_chain(problem, low, top) + costs.forward[top] + _backward_chain(problem, top, high))
        * scale,
    )


def _chain(problem: OrderProblem) -> Number:
    """One micro-batch through all stages; on each device alone where the span counts."""
    top, weight = problem.stages - 1, problem.costs.backward_weight[0] if problem.split else 0
    if problem.objective == "span":
        return max(_delays(problem, d).own_chain for d in range(problem.devices))
    down = _backward_chain(problem, top, 0) + _backward(problem, 0) + weight
    return (_forward_chain(problem, 0, top) + problem.costs.forward[top] + down) * _scale(problem)


def _work(problem: OrderProblem, device: int) -> Number:
    """Head + work + idle time forced before the first backward and after the last."""
    costs, delays = problem.costs, _delays(problem, device)
    device_stages = problem.placement.stages_of[device]
    total = _total(problem)
    work = sum(costs.work(s) for s in device_stages) * total
    fused = [s for s in device_stages if s in problem.fused_recompute]
    if fused:
        recomputation = sum(costs.recompute[s] * _whole_recomputations(problem, s) for s in fused)
        return (delays.head if problem.objective == "makespan" else 0) + work + recomputation
    idle_before = max(0, delays.own_chain - _most_before_backward(problem, device, delays.own_chain))
    idle_after = max(0, delays.way_back - _most_after_forward(problem, device))
    if problem.objective == "span":
        return work + idle_before + idle_after
    if delays.tail:
        idle_after = max(idle_after, delays.tail - _most_after_backward(problem, device))
    return delays.head + work + idle_before + idle_after


def _whole_recomputations(problem: OrderProblem, stage: int) -> Number:
    """The number of whole recomputations of a stage: one for each micro-batch, by its length and its share."""
    return sum(
        problem.costs.scale_of(j) * share_of(problem.recompute_fraction, stage, j) for j in range(problem.micro_batches)
    )


def _most_before_backward(problem: OrderProblem, device: int, window: Number) -> Number:
    """Most forward work that a device can do in the first `window` after its first operation may start."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    capacity = costs.capacity_of(device)
    possible = min(window, sum(costs.forward[s] for s in device_stages) * _total(problem))
    if capacity is None or not problem.alike or (problem.offload and len(device_stages) > 1):
        return possible
    if len(device_stages) == 1:
        done = _forwards_of_one_stage(problem, device_stages[0], capacity, window)
    else:
        done = min(possible, _most_work(capacity, [(_kept(problem, s), costs.forward[s], m) for s in device_stages]))
    if problem.recompute:
        # What is dropped lets further forwards in, and costs its recomputation later.
        done += (possible - done) * max(_gain_of_dropping(problem, s) for s in device_stages)
    return done


def _forwards_of_one_stage(problem: OrderProblem, stage: int, capacity: Number, window: Number) -> Number:
    """Most forward work of a device's only stage in that time, where nothing is recomputed."""
    costs, m = problem.costs, problem.micro_batches
    forward, kept = costs.forward[stage], _kept(problem, stage)
    if not kept:
        return min(window, forward * m)
    resident = int(capacity // kept)
    moved, transfer, _ = _moved(problem, stage)
    done: Number = 0
    for count in range(m):
        begin: Number = count * forward
        if count >= resident:
            if not moved:
                break
            # The (count + 1)-th forward needs that much moved away before it.
            offloads = math.ceil((((count + 1) * kept) - capacity) / moved - 1e-9)
            begin = max(begin, forward - problem.longest_lead(Op(Kind.O, stage, 0)) + offloads * transfer)
        if begin >= window:
            break
        done += min(forward, window - begin)
    return done


def _gain_of_dropping(problem: OrderProblem, stage: int) -> Number:
    """Share of a forward's time that is won where it comes early and is recomputed later."""
    forward = problem.costs.forward[stage]
    costs = problem.costs
    least = min(times[stage] for times in (costs.recompute, costs.recompute_deeper) if times is not None)
    recomputation = least * share_of(problem.recompute_fraction, stage, 0)
    return max(forward - recomputation, 0) / forward if forward else 0


def _most_after_backward(problem: OrderProblem, device: int) -> Number:
    """Most weight-gradient work that a device can have left after its first stage's last backward for inputs."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    if not problem.split:
        return 0
    capacity, low = costs.capacity_of(device), device_stages[0]
    if capacity is None or not problem.alike:
        return sum(costs.backward_weight[s] for s in device_stages) * _total(problem)
    # During the last backward its own activation is there too.
    alongside = max(0, capacity - max(_kept(problem, low), costs.activation_after_input[low]))
    waiting = [(costs.activation_after_input[s], costs.backward_weight[s], m - (s == low)) for s in device_stages]
    return costs.backward_weight[low] + _most_work(alongside, waiting)


def _most_after_forward(problem: OrderProblem, device: int) -> Number:
    """Most work that a device can have left after its last forward, where all of it is of what memory holds then."""
    costs, m, split = problem.costs, problem.micro_batches, problem.split
    device_stages = problem.placement.stages_of[device]
    capacity, sizes = costs.capacity_of(device), [_kept(problem, s) for s in device_stages]
    if capacity is None or problem.offload or problem.recompute or not problem.alike or m * sum(sizes) <= capacity:
        # Where all forwards may come before all backwards, what is idle between them counts as time before these.
        return math.inf
    backwards = [(size, costs.backward(s), m) for s, size in zip(device_stages, sizes, strict=True)]
    weights = [(costs.activation_after_input[s], costs.backward_weight[s], m) for s in device_stages if split]
    return _most_work(capacity, backwards + weights)


def _most_work(capacity: Number, pieces: Sequence[tuple[Number, Number, int]]) -> Number:
    """The most time of pieces (size, time, count) that fit into `capacity` together; a part of one may fit."""
    sizes = [size for size, *_ in pieces if size]
    least = min(sizes, default=1)
    if all(size % least == 0 for size in sizes):
        capacity = math.floor(capacity / least + 1e-9) * least
    done: Number = 0
    for size, time, number in sorted(pieces, key=lambda piece: piece[1] / piece[0] if piece[0] else math.inf)[::-1]:
        whole = min(number, max(0, int(capacity // size))) if size else number
        done += whole * time
        capacity -= whole * size
        if whole < number and capacity > 0:
            done += time * capacity / size
            capacity = 0
    return done


def _memory(problem: OrderProblem, device: int) -> Number:
    """Time that the area under the memory curve of a device with one stage needs."""
    costs, m = problem.costs, problem.micro_batches
    device_stages = problem.placement.stages_of[device]
    capacity = costs.capacity_of(device)
    if capacity is None or len(device_stages) > 1 or not problem.alike or problem.objective == "span":
        return 0
    stage, delays = device_stages[0], _delays(problem, device)
    size = _kept(problem, stage)
    if not size or capacity < size or problem.recompute or stage in problem.fused_recompute:
        return 0
    f, b = costs.forward[stage], _backward(problem, stage)
    weight = costs.backward_weight[stage] if problem.split else 0
    # The first forwards fill the memory one by one and the last backwards drain it: that part is out of reach.
    levels = range(1, min(int(capacity // size), m) + 1)
    filling = sum((capacity - size * k) * f for k in levels)
    draining = sum((capacity - size * k) * b for k in levels)
    residue = weight * costs.activation_after_input[stage] * m
    inner = _time_of_area(problem, stage, capacity, delays.round_trip, filling + draining)
    whole = _time_of_area(problem, stage, capacity, delays.round_trip, filling + residue)
    return delays.head + max(inner + max(delays.tail, weight), whole)


def _time_of_area(problem: OrderProblem, stage: int, capacity: Number, round_trip: Number, lost: Number) -> Number:
    """Least time in which m activations fit under `capacity`, each kept for the round trip or moved away meanwhile."""
    costs, m = problem.costs, problem.micro_batches
    size, moved, out, back = _kept(problem, stage), *_moved(problem, stage)
    present = size * (costs.forward[stage] + _backward(problem, stage))
    kept = present + size * round_trip
    leads = problem.longest_lead(Op(Kind.O, stage, 0)) + problem.backward_lead(stage)
    saved = moved * (round_trip + leads - out - back)
    if saved <= 0:
        return (m * kept + lost) / capacity
    busy = out + back if costs.host_link == "half-duplex" else max(out, back)
    everything = (m * (kept - saved) + lost) / capacity
    # At most time / busy of them can be moved.
    return max(everything, (m * kept + lost) / (capacity + saved / busy)) if busy else everything


def _kept(problem: OrderProblem, stage: int) -> Number:
    """Bytes that F leaves when nothing is recomputed explicitly."""
    costs = problem.costs
    if stage in problem.fused_recompute:
        return costs.activation[stage] - costs.dropped_bytes(stage) * share_of(problem.recompute_fraction, stage, 0)
    return costs.activation[stage]


def _moved(problem: OrderProblem, stage: int) -> tuple[Number, Number, Number]:
    """(bytes that an offload moves, its time, the reload's time); nothing without offload."""
    transfers = problem.costs.transfers
    if not problem.offload or transfers is None:
        return 0, 0, 0
    share = share_of(problem.offload_fraction, stage, 0)
    return _kept(problem, stage) * share, transfers.offload[stage] * share, transfers.reload[stage] * share
