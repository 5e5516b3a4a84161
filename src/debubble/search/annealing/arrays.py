"""A problem and its schedules as arrays, which the compiled kernel reads and changes.

`arrays_of` lays a problem out: costs in rows by [R in list, kind, stage, micro-batch] (one row for all micro-batches
where they are equal), and room for the state of the devices.  Times and sizes that are whole numbers or fractions are
scaled to whole numbers, so that the kernel is exact for them.  `encode` and `decode` translate between a Schedule and
its lists of operation numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from debubble.ir import InputError, Kind, Number, Op, Schedule, StageCosts
from debubble.ir.arrays import Floats, Ints
from debubble.ir.ops import CODE
from debubble.kernels import as_block
from debubble.search.annealing.layout import (
    DEEPER,
    KIND_INDEX,
    KINDS,
    MARKS,
    NEEDED,
    NOTED,
    RELOADED,
    ROW,
    SENT,
    B,
    F,
    I,
    KernelLayout,
    L,
    O,
    R,
    W,
)
from debubble.search.problem import OrderProblem


def distinct_micro_batches(problem: OrderProblem) -> range:
    """Micro-batches with cost rows of their own (only 0 if all are equal)."""
    return range(1 if problem.alike else problem.micro_batches)


def message_rows(problem: OrderProblem) -> list[Number]:
    """Time of the message after each operation; -1 where there is none."""
    costs, device_of = problem.costs, problem.placement.device_of
    scales = [costs.scale_of(j) for j in distinct_micro_batches(problem)]
    rows: list[Number] = []
    for kind, stage in itertools.product(KINDS, range(problem.stages)):
        other = stage + 1 if kind is Kind.F else stage - 1
        sends = kind in (Kind.F, Kind.I, Kind.B) and 0 <= other < problem.stages
        sends = sends and device_of[other] != device_of[stage]
        rows += [costs.communication[min(stage, other)] * scale if sends else -1 for scale in scales]
    return rows


def tail_rows(problem: OrderProblem, time: Floats, message: Floats, after: Floats) -> Floats:
    """Longest chain after each operation, data and host steps, with the backward split where it may be."""
    S = problem.stages
    shape = (len(KINDS), S, len(distinct_micro_batches(problem)))
    t, c = time.reshape(shape), np.maximum(message.reshape(shape), 0)
    tail = np.zeros(shape)
    step = np.minimum(t[I], t[B]) if problem.split else t[B]
    for s in range(S):
        before = 0 if s == 0 else step[s - 1] + np.maximum(tail[I, s - 1], 0)
        tail[B, s] = 0 if s == 0 else c[B, s] + before
        tail[I, s] = np.maximum(t[W, s] if problem.split else 0, 0 if s == 0 else c[I, s] + before)
        if not problem.split:
            tail[I, s] = tail[B, s]
        tail[W, s], tail[B, s] = after[s], np.maximum(tail[B, s], after[s])
        tail[I, s] = np.maximum(tail[I, s], (t[W, s] if problem.split else 0) + after[s])
    for s in reversed(range(S)):
        tail[F, s] = step[s] + tail[I, s] if s == S - 1 else c[F, s] + t[F, s + 1] + tail[F, s + 1]
    return tail.reshape(-1)


def encode(problem: OrderProblem, schedule: Schedule) -> tuple[Ints, Ints]:
    """Write a schedule's lists as numbers, by [device, place], padded to the longest possible list, and their lengths.

    Raises InputError if the schedule offloads to a peer device, or has other operations than F, B, I, W, R, O and L.
    """
    if schedule.peers:
        raise InputError("The search does not handle offload to a peer device.")
    S, m = problem.stages, problem.micro_batches
    capacity = 6 * m * problem.placement.chunks
    orders = np.zeros((problem.devices, capacity), dtype=np.int64)
    lengths = np.zeros(problem.devices, dtype=np.int64)
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            if op.kind not in KIND_INDEX:
                raise InputError(f"The search orders F, B, I, W, R, O and L only; the schedule has {op.name}.")
            kind = DEEPER if op.kind is Kind.R and op[1:] in schedule.deeper else KIND_INDEX[op.kind]
            orders[device, index] = (kind * S + op.stage) * m + op.micro_batch
        lengths[device] = len(order)
    return orders, lengths


def decode(problem: OrderProblem, orders: Ints, lengths: Ints, *, name: str) -> Schedule:
    """Read the kernel's lists: the inverse of `encode`."""
    S, m = problem.stages, problem.micro_batches
    lists = (
        [Op(KINDS[code // (S * m)], code // m % S, code % m) for code in order[:length].tolist()]
        for order, length in zip(orders, lengths, strict=True)
    )
    chosen = np.concatenate([order[:length] for order, length in zip(orders, lengths, strict=True)])
    pairs = chosen[chosen // (S * m) == DEEPER] % (S * m)
    deeper = frozenset(zip((pairs // m).tolist(), (pairs % m).tolist(), strict=True))
    return problem.schedule(lists, name=name, deeper=deeper)


class KernelArrays(NamedTuple):
    """A problem's layout and its two blocks of numbers."""

    layout: KernelLayout
    floats: Floats
    ints: Ints
    scale: int
    """Factor of all times: they are `scale` times those of the costs."""

    def table(self, name: str, size: int) -> Floats:
        """Return the first `size` numbers of a table of floats."""
        begin = getattr(self.layout, name)
        return self.floats[begin : begin + size]


def knows_messages(costs: StageCosts) -> bool:
    """Tell whether the kernel knows the message model of these costs: no message waits for its receiver."""
    return costs.communication_model in ("latency", "exclusive")


def arrays_of(problem: OrderProblem) -> KernelArrays:
    """Lay a problem out for the kernel.  Raises InputError if messages wait for their receivers."""
    costs = problem.costs
    if not knows_messages(costs):
        raise InputError(
            f"The search does not handle '{costs.communication_model}' messages; use 'exclusive' or 'latency'."
        )
    queued, size = problem.micro_batches * problem.placement.chunks, problem.stages * problem.micro_batches
    times, causes = (len(KINDS) + 2) * size + 3, len(KINDS) * size + problem.devices * queued
    noted = problem.devices * (6 * queued // NOTED + 2) if costs.link_groups else 0
    lanes = _lanes(problem)
    fixed_floats, scale = _costs(problem)
    state_floats, state_ints = _state(problem)
    device_floats, device_ints = (sum(map(len, state.values())) for state in (state_floats, state_ints))
    floats: dict[str, Floats] = {
        **fixed_floats,
        # What an evaluation finds: `times` numbers.
        "end": np.zeros(len(KINDS) * size),
        "arrival": np.zeros(2 * size),
        **{name: np.full(1, -1.0) for name in ("at_once", "never", "unread")},
        **state_floats,
        "mark_floats": np.zeros(2 * MARKS * device_floats),
        "last_floats": np.zeros(device_floats),
        "kept_times": np.zeros(times),
        "work": np.zeros(problem.devices),
        "ready": np.zeros(3 * problem.devices if costs.link_groups else 0),
        **{name: np.zeros(problem.devices) for name in ("gone", "link_gone", "host_free")},
        "stepped": np.full(problem.stages, -1.0),
        "noted_floats": np.zeros(3 * noted),
    }
    ints: dict[str, Ints] = {
        "device_of": np.array(problem.placement.device_of),
        "lane": lanes,
        "peer": _peers(lanes),
        # What an evaluation finds: `causes` numbers.
        "cause": _zeros(len(KINDS) * size),
        "queue": _zeros(problem.devices * queued),
        "facts": _zeros(4 * len(KINDS) * size),
        **state_ints,
        "mark_ints": _zeros(2 * MARKS * device_ints),
        "mark_left": _zeros(2 * MARKS),
        "marked": _zeros(3),
        "shared": _zeros(problem.devices),
        "differs": _zeros(problem.devices),
        "alike": _zeros(1),
        "last_ints": _zeros(device_ints),
        "kept_causes": _zeros(causes),
        **{name: _zeros(problem.devices) for name in ("gone_why", "link_why", "host_why")},
        "stepped_why": _zeros(problem.stages),
        "stale": _zeros(problem.devices),
        **{name: _zeros(problem.devices) for name in ("noted_from", "noted_to")},
        "noted_ints": _zeros(6 * noted),
        **{name: _zeros(3 * problem.devices if costs.link_groups else 0) for name in ("ready_why", "head")},
        **{
            name: _zeros(len(KINDS) * size if costs.link_groups else 0)
            for name in ("follow", "place", "offload", "behind", "freeing")
        },
    }
    layout = KernelLayout(
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        devices=problem.devices,
        grain=problem.micro_batches // len(distinct_micro_batches(problem)),
        queued=queued,
        times=times,
        causes=causes,
        device_floats=device_floats,
        device_ints=device_ints,
        exclusive=int(costs.communication_model == "exclusive"),
        half_duplex=int(costs.host_link == "half-duplex"),
        span=int(problem.objective == "span"),
        by_arrival=int(bool(costs.link_groups)),
        hosted=int(bool(problem.host_steps)),
        levels=problem.levels,
        **_begins(floats),
        **_begins(ints),
    )
    ints["facts"][:] = _facts(layout).reshape(-1)
    floats_block, ints_block = as_block(np.concatenate([*floats.values()])), as_block(np.concatenate([*ints.values()]))
    return KernelArrays(layout, floats_block, ints_block, scale)


def _costs(problem: OrderProblem) -> tuple[dict[str, Floats], int]:
    """(what the kernel only reads, the number that times are multiplied by)."""
    costs, devices = problem.costs, range(problem.devices)
    kinds, tables = [CODE[kind] for kind in KINDS], problem.op_costs.tables()
    # By kind, stage and micro-batch, first as without, then as with an R in the list, of each level.
    levels = len(tables.time)
    durations, allocated, freed, leads = (table[:, kinds].ravel().tolist() for table in tables)
    message = message_rows(problem)
    gradients, host_step, loaded = problem.gradient_offloads, problem.steps_on_hosts, _parameters_loaded(problem)
    time_scale = _common_denominator([*durations, *leads, *message, *gradients, *host_step, *loaded])
    statics, limits = [costs.static_of(d) for d in devices], [costs.limit_of(d) for d in devices]
    size_scale = _common_denominator([*allocated, *freed, *statics, *(x for x in limits if x is not None)])
    time, sent = _floats(durations, time_scale), _floats(message, time_scale)
    after = _floats(problem.after_weights, time_scale)
    return {
        "time": time,
        "allocated": _floats(allocated, size_scale),
        "freed": _floats(freed, size_scale),
        "lead": _floats(leads, time_scale),
        "message": np.tile(sent, levels),
        "tail": np.tile(tail_rows(problem, time.reshape(levels, -1).min(axis=0), sent, after), levels),
        "after_weights": after,
        "gradients": _floats(gradients, time_scale),
        "host_step": _floats(host_step, time_scale),
        # Before the ends, so that what waits for it has no operation as its cause.
        "loaded": _floats(loaded, time_scale),
        "static": _floats(statics, size_scale),
        "limit": np.array([math.inf if x is None else float(x * size_scale) for x in limits]),
    }, time_scale


def _parameters_loaded(problem: OrderProblem) -> list[Number]:
    """The time at which the parameters of each stage come from the host that stepped its optimizer; 0 if none did.

    Each device asks for them stage by stage, before its first forward, and takes a shared link by arrival.
    """
    costs, lanes = problem.costs, _lanes(problem).tolist()
    loaded: list[Number] = [0] * problem.stages
    pending = [[s for s in own if s in problem.host_steps] for own in problem.placement.stages_of]
    device_free: list[Number] = [0] * problem.devices
    link_free: list[Number] = [0] * problem.devices
    while any(pending):
        d = min((d for d in range(problem.devices) if pending[d]), key=device_free.__getitem__)
        stage = pending[d].pop(0)
        end = max(device_free[d], link_free[lanes[d]]) + costs.parameter_load[stage]
        loaded[stage] = device_free[d] = link_free[lanes[d]] = end
    return loaded


def _state(problem: OrderProblem) -> tuple[dict[str, Floats], dict[str, Ints]]:
    """The state of all devices: what a mark keeps."""
    devices = problem.devices
    names = ("reserved", "last_freed", "spent", "first", "begun", "free", "accounted")
    links = devices * devices if problem.costs.communication_model == "exclusive" else 0
    lanes = 3 * devices if problem.costs.link_groups else 0
    floats = {
        **{name: np.zeros(devices) for name in names},
        "link": np.zeros(links),
        "turn": np.zeros(2 * devices if lanes else 0),
    }
    counts = {name: _zeros(devices) for name in ("cursor", "compute", "oldest", "known", "newest")}
    by_lane = {name: _zeros(lanes) for name in ("next", "previous")}
    return floats, {**counts, "transfer": _zeros(2 * devices), "downward": _zeros(1), **by_lane}


def _facts(a: KernelLayout) -> Ints:
    """NEEDED, RELOADED, SENT and ROW by operation."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    pair = np.arange(size)
    facts = np.empty((len(KINDS), size, 4), dtype=np.int64)
    facts[:, :] = a.at_once, a.never, a.unread, 0
    facts[F, m:, NEEDED] = a.arrival + pair[:-m]
    facts[F, :, SENT] = a.arrival + pair
    for kind in (I, B):
        facts[kind, :-m, NEEDED] = a.arrival + size + pair[m:]
        facts[kind, :, SENT] = a.arrival + size + pair
    for kind in (I, B, R, DEEPER):
        facts[kind, :, RELOADED] = a.end + L * size + pair
    facts[F, ::m, RELOADED] = a.loaded + np.arange(a.stages)
    facts[O, :, NEEDED] = a.end + pair
    facts[L, :, NEEDED] = a.end + O * size + pair
    facts[:, :, ROW] = np.arange(len(KINDS) * size).reshape(len(KINDS), size) // a.grain
    return facts


def _begins(parts: Mapping[str, Floats | Ints]) -> dict[str, int]:
    """Lay the parts after each other, and return the place at which each begins."""
    begins = np.cumsum([0, *map(len, parts.values())]).tolist()
    return dict(zip(parts, begins, strict=False))


def _lanes(problem: OrderProblem) -> Ints:
    """The host link of each device: its own, or that of the first of its group."""
    lane = np.arange(problem.devices)
    for members in problem.costs.link_groups:
        lane[list(members)] = min(members)
    return lane


def _peers(lanes: Ints) -> Ints:
    """Find the next device on the same link as each; -1 after the last."""
    peers = np.full(len(lanes), -1)
    for lane in set(lanes.tolist()):
        members = np.flatnonzero(lanes == lane)
        peers[members[:-1]] = members[1:]
    return peers


def _common_denominator(values: Iterable[Any]) -> int:
    """Find a factor that makes whole numbers and fractions whole; 1 if any is a float or it grows too large."""
    scale = 1
    for value in set(values):
        if isinstance(value, float) and not value.is_integer():
            return 1
        if isinstance(value, Fraction):
            scale = math.lcm(scale, value.denominator)
    return scale if scale < 2**24 else 1


def _floats(values: Sequence[Number], scale: int) -> Floats:
    return np.array([float(v * scale) for v in values])


def _zeros(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)
