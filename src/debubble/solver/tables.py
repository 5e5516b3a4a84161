"""A problem as arrays: what the search kernel reads and writes.

An operation is a number: `(kind * stages + stage) * micro_batches + micro_batch`, with the kinds in the order of KINDS.
Times and sizes that are whole numbers or fractions are scaled to whole numbers, so that the kernel is exact for them.

All tables lie in two blocks, one of floats and one of whole numbers, and a Layout says where each begins: compiled
code passes three things from function to function this way, instead of counting references to thirty arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.ir import InputError, Kind, Lane, Number, Op, Schedule
from debubble.ir.effects import change, duration
from debubble.solver.problem import OrderProblem

KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.O, Kind.L)
MARKS = 24
"""States of the devices that an evaluation leaves behind, at most."""
NEEDED, RELOADED, SENT, ROW = range(4)
"""What is known of an operation: where in the block of floats the times are at which its data and its reload are there,
and where it puts that at which its message arrives; its row in the tables of costs."""
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Layout(NamedTuple):
    """Sizes, flags, and where each table begins; `op` stands for an operation's number, `d` for a device."""

    stages: int
    micro_batches: int
    devices: int
    exclusive: int
    half_duplex: int
    span: int
    grain: int
    """Operations to a row of the tables of costs: all of a stage's micro-batches where they are alike, else one."""
    queued: int
    """Offloads that a device may have."""
    recompute: int
    """Whether there may be R's in the lists."""
    times: int
    """Numbers of ends and arrivals."""
    causes: int
    """Numbers of causes and queues."""
    device_floats: int
    """Numbers that are the state of all devices, in the block of floats."""
    device_ints: int
    """The same, in that of whole numbers."""
    resumable: int
    """Whether an evaluation may begin in the middle: a link group's turns depend on how it got there."""
    periods: int
    """Periods of the block; 0 if there is none."""
    step: int
    """Micro-batches of a period of the block."""
    # In the block of floats.
    time: int
    """[R in list, row]"""
    allocated: int
    """[R in list, row]"""
    freed: int
    """[R in list, row]"""
    message: int
    """[R in list, row]: time of the message behind F, I, B; negative where the consumer is on the same device."""
    tail: int
    """[R in list, row]: least time from its end to the end of everything."""
    static: int
    """[d]"""
    limit: int
    """[d], infinite where there is none."""
    end: int
    """[op], negative until it is known."""
    arrival: int
    """[direction, stage and micro-batch]: when its message is there, negative until it is known; then 0 for what waits
    for no message, a place that nobody reads, and -1 for what waits for no reload."""
    reserved: int
    """[d]: bytes, as static admission counts them."""
    last_freed: int
    """[d]: what the last compute operation frees at its end."""
    rest: int
    """[d]: compute time still to come."""
    first: int
    """[d]: start of the first compute operation."""
    begun: int
    """[d]: start of the last compute operation."""
    free: int
    """[d]: its end."""
    accounted: int
    """[d]: what the offloads from `oldest` to `known` free."""
    link: int
    """[d, d]: when the last message has gone, if messages are exclusive."""
    # In the block of whole numbers.
    device_of: int
    """[stage]"""
    lane: int
    """[d]: the host link's lane, which a link group shares."""
    cause: int
    """[op]: the one whose start or end it waited for, -1 for none."""
    facts: int
    """[op, NEEDED to ROW]"""
    cursor: int
    """[d]: operations walked."""
    compute: int
    """[d]: last compute operation, -1 before the first."""
    transfer: int
    """[direction, lane]: last transfer, -1 before the first."""
    queue: int
    """[d, n]: offloads, oldest first."""
    oldest: int
    """[d]: first in the queue that may still be in flight."""
    known: int
    """[d]: first in the queue that no reload has waited for."""
    newest: int
    """[d]: end of the queue."""
    downward: int
    """Whether the next round over the devices begins with the last."""
    begin: int
    """[d]: where the periodic block begins in the list."""
    window: int
    """[d]: operations of a period of the block."""
    # What the search evaluates again from (resuming.py).
    mark_floats: int
    """[2, MARKS, numbers of all devices]: state of the devices during the last evaluation kept, and during this one."""
    mark_ints: int
    """The same, of the whole numbers."""
    mark_left: int
    """[2, MARKS]: operations that were still to come."""
    marked: int
    """[2]: how many marks there are of each; then that of those kept at which this evaluation met it, or -1."""
    shared: int
    """[d]: from where on the list is that of the last evaluation kept."""
    last_floats: int
    """State of the devices at the end of the last evaluation kept."""
    last_ints: int
    """The same, of the whole numbers."""
    kept_times: int
    """Ends and arrivals of the last evaluation kept."""
    kept_causes: int
    """Its causes and queues."""
    kept_begin: int


class Block(NamedTuple):
    """A part of every device's list that repeats itself, with `step` micro-batches later each time."""

    windows: tuple[int, ...]
    """Operations of one period, by device."""
    periods: int
    step: int

    def begins(self, schedule: Schedule) -> tuple[int, ...]:
        """Where it begins in each list of a schedule that has it."""
        return tuple(map(self._begin, schedule.orders, self.windows))

    def _begin(self, order: tuple[Op, ...], window: int) -> int:
        length = window * (self.periods - 1)
        again = [later(op, self.step) == then for op, then in zip(order, order[window:], strict=False)]
        return next(begin for begin in range(len(again)) if all(again[begin : begin + length]))


class Tables(NamedTuple):
    """A problem's layout and blocks, and the number that its times are multiplied by."""

    layout: Layout
    floats: Floats
    ints: Ints
    scale: int

    def table(self, name: str, size: int) -> Floats:
        """`size` numbers of a table of floats."""
        begin = getattr(self.layout, name)
        return self.floats[begin : begin + size]


def tables(problem: OrderProblem, *, block: Block | None = None) -> Tables:
    """The arrays of a problem.

    `block`: what of the lists stays periodic.  Raises InputError if messages are blocking.
    """
    costs, devices = problem.costs, problem.devices
    if costs.communication_model == "blocking":
        raise InputError("The search does not handle 'blocking' messages; use 'exclusive' or 'latency'.")
    grain = problem.micro_batches if costs.micro_batch_scale is None else 1
    durations, allocated, freed = _operations(problem)
    message = _messages(problem)
    time_scale = _common_denominator([*durations, *message])
    statics = [costs.static_of(d) for d in range(devices)]
    limits = [costs.limit_of(d) for d in range(devices)]
    size_scale = _common_denominator([*allocated, *freed, *statics, *(x for x in limits if x is not None)])
    queued = problem.micro_batches * problem.placement.chunks
    size = problem.stages * problem.micro_batches
    count = len(KINDS) * size
    times, causes = count + 2 * size + 3, count + devices * queued
    time, sent = _floats(durations, time_scale), _floats(message, time_scale)
    links = devices * devices if costs.communication_model == "exclusive" else 0
    state_floats: dict[str, Floats] = {
        **{name: np.zeros(devices) for name in ("reserved", "last_freed", "rest", "first", "begun", "free")},
        "accounted": np.zeros(devices),
        "link": np.zeros(links),
    }
    state_ints: dict[str, Ints] = {
        **{name: np.zeros(devices, dtype=np.int64) for name in ("cursor", "compute", "oldest", "known", "newest")},
        "transfer": np.zeros(2 * devices, dtype=np.int64),
        "downward": np.zeros(1, dtype=np.int64),
    }
    device_floats, device_ints = (sum(map(len, state.values())) for state in (state_floats, state_ints))
    floats: dict[str, Floats] = {
        "time": time,
        "allocated": _floats(allocated, size_scale),
        "freed": _floats(freed, size_scale),
        "message": np.tile(sent, 2),
        "tail": np.tile(_tails(problem, time.reshape(2, -1).min(axis=0), sent), 2),
        "static": _floats(statics, size_scale),
        "limit": np.array([math.inf if x is None else float(x * size_scale) for x in limits]),
        "end": np.zeros(count),
        "arrival": np.full(2 * size + 3, -1.0),
        **state_floats,
        "mark_floats": np.zeros(2 * MARKS * device_floats),
        "last_floats": np.zeros(device_floats),
        "kept_times": np.zeros(times),
    }
    ints: dict[str, Ints] = {
        "device_of": np.array(problem.placement.device_of),
        "lane": _lanes(problem),
        "cause": np.zeros(count, dtype=np.int64),
        "queue": np.zeros(devices * queued, dtype=np.int64),
        "facts": np.zeros(4 * count, dtype=np.int64),
        **state_ints,
        "mark_ints": np.zeros(2 * MARKS * device_ints, dtype=np.int64),
        "mark_left": np.zeros(2 * MARKS, dtype=np.int64),
        "marked": np.zeros(3, dtype=np.int64),
        "shared": np.zeros(devices, dtype=np.int64),
        "last_ints": np.zeros(device_ints, dtype=np.int64),
        "kept_causes": np.zeros(causes, dtype=np.int64),
        "begin": np.zeros(devices, dtype=np.int64),
        "window": np.array(block.windows if block else (0,) * devices, dtype=np.int64),
        "kept_begin": np.zeros(devices, dtype=np.int64),
    }
    layout = Layout(
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        devices=devices,
        grain=grain,
        queued=queued,
        recompute=int(problem.recompute),
        times=times,
        causes=causes,
        device_floats=device_floats,
        device_ints=device_ints,
        exclusive=int(costs.communication_model == "exclusive"),
        half_duplex=int(costs.host_link == "half-duplex"),
        span=int(problem.objective == "span"),
        resumable=int(not costs.link_groups),
        periods=block.periods if block else 0,
        step=block.step if block else 0,
        **_begins(floats),
        **_begins(ints),
    )
    ints["facts"][:] = _facts(layout).reshape(-1)
    return Tables(layout, np.concatenate([*floats.values()]), np.concatenate([*ints.values()]), time_scale)


def _facts(a: Layout) -> Ints:
    """NEEDED, RELOADED, SENT and ROW by operation."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    at_once, unread, never = a.arrival + 2 * size, a.arrival + 2 * size + 1, a.arrival + 2 * size + 2
    pair = np.arange(size)
    F, I, B, R, O, L = (KIND_INDEX[k] for k in (Kind.F, Kind.I, Kind.B, Kind.R, Kind.O, Kind.L))  # noqa: E741
    facts = np.empty((len(KINDS), size, 4), dtype=np.int64)
    facts[:, :] = at_once, never, unread, 0
    facts[F, m:, NEEDED] = a.arrival + pair[:-m]
    facts[F, :, SENT] = a.arrival + pair
    for kind in (I, B):
        facts[kind, :-m, NEEDED] = a.arrival + size + pair[m:]
        facts[kind, :, SENT] = a.arrival + size + pair
    for kind in (I, B, R):
        facts[kind, :, RELOADED] = a.end + L * size + pair
    facts[O, :, NEEDED] = a.end + pair
    facts[L, :, NEEDED] = a.end + O * size + pair
    facts[:, :, ROW] = np.arange(len(KINDS) * size).reshape(len(KINDS), size) // a.grain
    return facts


def later(op: Op, by: int) -> Op:
    """The same operation of a later micro-batch."""
    return op._replace(micro_batch=op.micro_batch + by)


def _begins(parts: Mapping[str, Floats | Ints]) -> dict[str, int]:
    """Where each part begins when they lie behind each other."""
    begins = np.cumsum([0, *map(len, parts.values())]).tolist()
    return dict(zip(parts, begins, strict=False))


def _lanes(problem: OrderProblem) -> Ints:
    """The host link of each device: its own, or that of the first of its group."""
    lane = np.arange(problem.devices)
    for members in problem.costs.link_groups:
        lane[list(members)] = min(members)
    return lane


def encode(problem: OrderProblem, schedule: Schedule) -> tuple[Ints, Ints]:
    """A schedule's lists as numbers: (orders padded to the longest possible, lengths)."""
    if schedule.peers:
        raise InputError("The search does not handle offload to a peer device.")
    S, m = problem.stages, problem.micro_batches
    room = 6 * m * problem.placement.chunks
    orders = np.zeros((problem.devices, room), dtype=np.int64)
    lengths = np.zeros(problem.devices, dtype=np.int64)
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            if op.kind not in KIND_INDEX:
                raise InputError(f"The search orders F, B, I, W, R, O and L only; the schedule has {op.name}.")
            orders[device, index] = (KIND_INDEX[op.kind] * S + op.stage) * m + op.micro_batch
        lengths[device] = len(order)
    return orders, lengths


def decode(problem: OrderProblem, orders: Ints, lengths: Ints, *, name: str) -> Schedule:
    """The schedule of the kernel's lists."""
    S, m = problem.stages, problem.micro_batches
    lists = tuple(
        tuple(Op(KINDS[code // (S * m)], code // m % S, code % m) for code in order[:length].tolist())
        for order, length in zip(orders, lengths, strict=True)
    )
    return problem.schedule(name, lists)


def _rows(problem: OrderProblem) -> range:
    """The micro-batches that have rows of their own: the first for all if they are alike."""
    return range(1 if problem.costs.micro_batch_scale is None else problem.micro_batches)


def _operations(problem: OrderProblem) -> tuple[list[Number], list[Number], list[Number]]:
    """(times, allocated, freed) by kind, stage and micro-batch, first as without, then as with an R in the list."""
    costs = problem.costs
    rows: tuple[list[Number], list[Number], list[Number]] = ([], [], [])
    for recomputed in (False, True):
        template = _template(problem, recomputed=recomputed)
        for op in (Op(kind, s, j) for kind in KINDS for s in range(problem.stages) for j in _rows(problem)):
            absent = op.kind in (Kind.O, Kind.L) and costs.offload is None
            time = 0 if absent else duration(template, costs, op, Lane.COMPUTE)
            for row, value in zip(rows, (time, *change(template, costs, op)), strict=True):
                row.append(value)
    return rows


def _template(problem: OrderProblem, *, recomputed: bool) -> Schedule:
    """A list of lists that is no schedule, but tells `ir.effects` what is recomputed."""
    ops = [Op(Kind.R, s, j) for s in range(problem.stages) for j in _rows(problem)] if recomputed else []
    return problem.schedule("template", (tuple(ops),))


def _messages(problem: OrderProblem) -> list[Number]:
    """Time of the message behind each operation; -1 where there is none."""
    costs, device_of = problem.costs, problem.placement.device_of
    result: list[Number] = []
    for kind in KINDS:
        for stage in range(problem.stages):
            other = stage + 1 if kind is Kind.F else stage - 1
            sends = kind in (Kind.F, Kind.I, Kind.B) and 0 <= other < problem.stages
            if sends and device_of[other] != device_of[stage]:
                result.extend(costs.communication[min(stage, other)] * costs.scale_of(j) for j in _rows(problem))
            else:
                result.extend(-1 for _ in _rows(problem))
    return result


def _tails(problem: OrderProblem, time: Floats, message: Floats) -> Floats:
    """Longest chain of data behind each operation, with the backward split where it may be."""
    S = problem.stages
    shape = (len(KINDS), S, len(_rows(problem)))
    t, c = time.reshape(shape), np.maximum(message.reshape(shape), 0)
    tail = np.zeros(shape)
    F, I, W, B = (KIND_INDEX[k] for k in (Kind.F, Kind.I, Kind.W, Kind.B))  # noqa: E741
    step = np.minimum(t[I], t[B]) if problem.split else t[B]
    for s in range(S):
        before = 0 if s == 0 else step[s - 1] + np.maximum(tail[I, s - 1], 0)
        tail[B, s] = 0 if s == 0 else c[B, s] + before
        tail[I, s] = np.maximum(t[W, s] if problem.split else 0, 0 if s == 0 else c[I, s] + before)
        if not problem.split:
            tail[I, s] = tail[B, s]
    for s in reversed(range(S)):
        tail[F, s] = step[s] + tail[I, s] if s == S - 1 else c[F, s] + t[F, s + 1] + tail[F, s + 1]
    return tail.reshape(-1)


def _common_denominator(values: Iterable[Any]) -> int:
    """What whole numbers and fractions are multiplied by to be whole; 1 if any is a float or it grows too large."""
    scale = 1
    for value in set(values):
        if isinstance(value, float) and not value.is_integer():
            return 1
        if isinstance(value, Fraction):
            scale = math.lcm(scale, value.denominator)
    return scale if scale < 2**24 else 1


def _floats(values: Sequence[Number], scale: int) -> Floats:
    return np.array([float(v * scale) for v in values])
