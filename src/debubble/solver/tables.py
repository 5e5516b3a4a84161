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
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Layout(NamedTuple):
    """Sizes, flags, and where each table begins; `op` stands for an operation's number, `d` for a device."""

    stages: int
    micro_batches: int
    devices: int
    room: int
    """Operations that a device's list may have."""
    exclusive: int
    half_duplex: int
    span: int
    resumable: int
    """Whether an evaluation may begin in the middle: a link group's turns depend on how it got there."""
    periods: int
    """Periods of the block; 0 if there is none."""
    step: int
    """Micro-batches of a period of the block."""
    # In the block of floats.
    time: int
    """[R in list, op]"""
    allocated: int
    """[R in list, op]"""
    freed: int
    """[R in list, op]"""
    message: int
    """[op]: time of the message behind F, I, B; negative where the consumer is on the same device."""
    tail: int
    """[op]: least time from its end to the end of everything."""
    static: int
    """[d]"""
    limit: int
    """[d], infinite where there is none."""
    start: int
    """[op]"""
    end: int
    """[op], negative until it is known."""
    arrival: int
    """[op]: when its message is there."""
    reserved: int
    """[d]: bytes, as static admission counts them."""
    last_freed: int
    """[d]: what the last compute operation frees at its end."""
    rest: int
    """[d]: compute time still to come."""
    first: int
    """[d]: start of the first compute operation."""
    link: int
    """[d, d]: when the last message has gone, if messages are exclusive."""
    # In the block of whole numbers.
    device_of: int
    """[stage]"""
    pair: int
    """[op]: its stage and micro-batch, as stage * micro_batches + micro_batch; dividing would take longer."""
    lane: int
    """[d]: the host link's lane, which a link group shares."""
    cause: int
    """[op]: the one whose start or end it waited for, -1 for none."""
    recomputed: int
    """[stage and micro-batch]: 1 where an R is in the list."""
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
    begin: int
    """[d]: where the periodic block begins in the list."""
    window: int
    """[d]: operations of a period of the block."""
    # What the search evaluates again from (resuming.py).
    mark_floats: int
    """[2, MARKS, numbers of all devices]: state of the devices during the last evaluation kept, and during this one."""
    mark_ints: int
    """The same, of the whole numbers."""
    marked: int
    """[2]: how many marks there are of each."""
    kept_times: int
    """[start, end and arrival, op]: of the last evaluation kept."""
    kept_cause: int
    kept_queue: int
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
    times, allocated, freed = _operations(problem)
    message = _messages(problem)
    time_scale = _common_denominator([*times, *message])
    statics = [costs.static_of(d) for d in range(devices)]
    limits = [costs.limit_of(d) for d in range(devices)]
    size_scale = _common_denominator([*allocated, *freed, *statics, *(x for x in limits if x is not None)])
    room = 6 * problem.micro_batches * problem.placement.chunks
    count = len(message)
    time, sent = _floats(times, time_scale), _floats(message, time_scale)
    floats: dict[str, Floats] = {
        "time": time,
        "allocated": _floats(allocated, size_scale),
        "freed": _floats(freed, size_scale),
        "message": sent,
        "tail": _tails(problem, time.reshape(2, -1).min(axis=0), sent),
        "static": _floats(statics, size_scale),
        "limit": np.array([math.inf if x is None else float(x * size_scale) for x in limits]),
        **{name: np.zeros(count) for name in ("start", "end", "arrival")},
        **{name: np.zeros(devices) for name in ("reserved", "last_freed", "rest", "first")},
        "link": np.zeros(devices * devices),
        "mark_floats": np.zeros(2 * MARKS * devices * (4 + devices)),
        "kept_times": np.zeros(3 * count),
    }
    ints: dict[str, Ints] = {
        "device_of": np.array(problem.placement.device_of),
        "pair": np.arange(count) % (count // len(KINDS)),
        "lane": _lanes(problem),
        "cause": np.zeros(count, dtype=np.int64),
        "recomputed": np.zeros(count // len(KINDS), dtype=np.int64),
        **{name: np.zeros(devices, dtype=np.int64) for name in ("cursor", "compute", "oldest", "known", "newest")},
        "transfer": np.zeros(2 * devices, dtype=np.int64),
        "queue": np.zeros(devices * room, dtype=np.int64),
        "mark_ints": np.zeros(2 * MARKS * 7 * devices, dtype=np.int64),
        "marked": np.zeros(2, dtype=np.int64),
        "kept_cause": np.zeros(count, dtype=np.int64),
        "kept_queue": np.zeros(devices * room, dtype=np.int64),
        "begin": np.zeros(devices, dtype=np.int64),
        "window": np.array(block.windows if block else (0,) * devices, dtype=np.int64),
        "kept_begin": np.zeros(devices, dtype=np.int64),
    }
    layout = Layout(
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        devices=devices,
        room=room,
        exclusive=int(costs.communication_model == "exclusive"),
        half_duplex=int(costs.host_link == "half-duplex"),
        span=int(problem.objective == "span"),
        resumable=int(not costs.link_groups),
        periods=block.periods if block else 0,
        step=block.step if block else 0,
        **_begins(floats),
        **_begins(ints),
    )
    return Tables(layout, np.concatenate([*floats.values()]), np.concatenate([*ints.values()]), time_scale)


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


def _operations(problem: OrderProblem) -> tuple[list[Number], list[Number], list[Number]]:
    """(times, allocated, freed) by operation, first as without, then as with an R in the list."""
    costs, m = problem.costs, problem.micro_batches
    distinct = range(m) if costs.micro_batch_scale is not None else range(1)
    rows: tuple[list[Number], list[Number], list[Number]] = ([], [], [])
    for recomputed in (False, True):
        template = _template(problem, distinct, recomputed=recomputed)
        for op in (Op(kind, s, j) for kind in KINDS for s in range(problem.stages) for j in distinct):
            absent = op.kind in (Kind.O, Kind.L) and costs.offload is None
            time = 0 if absent else duration(template, costs, op, Lane.COMPUTE)
            for row, value in zip(rows, (time, *change(template, costs, op)), strict=True):
                row.extend([value] * (m // len(distinct)))
    return rows


def _template(problem: OrderProblem, micro_batches: Iterable[int], *, recomputed: bool) -> Schedule:
    """A list of lists that is no schedule, but tells `ir.effects` what is recomputed."""
    ops = [Op(Kind.R, s, j) for s in range(problem.stages) for j in micro_batches] if recomputed else []
    return problem.schedule("template", (tuple(ops),))


def _messages(problem: OrderProblem) -> list[Number]:
    """Time of the message behind each operation; -1 where there is none."""
    S, m, costs = problem.stages, problem.micro_batches, problem.costs
    device_of = problem.placement.device_of
    result: list[Number] = [-1] * (len(KINDS) * S * m)
    for kind in (Kind.F, Kind.I, Kind.B):
        for stage in range(S):
            other = stage + 1 if kind is Kind.F else stage - 1
            if not 0 <= other < S or device_of[other] == device_of[stage]:
                continue
            for j in range(m):
                at = (KIND_INDEX[kind] * S + stage) * m + j
                result[at] = costs.communication[min(stage, other)] * costs.scale_of(j)
    return result


def _tails(problem: OrderProblem, time: Floats, message: Floats) -> Floats:
    """Longest chain of data behind each operation, with the backward split where it may be."""
    S, m = problem.stages, problem.micro_batches
    shape = (len(KINDS), S, m)
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
