"""A problem and its schedules as arrays, which the compiled kernel reads and changes.

`arrays_of` builds the arrays of a problem: cost rows by [R in list, kind, stage, micro-batch] (one row for all
micro-batches if they are equal), and the state of the devices.  Integer and fractional times and sizes are scaled to
integers, for which the kernel is exact.  `encode` and `decode` convert between a Schedule and lists of operation
numbers.
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
    RELOADED,
    ROW,
    SENT,
    SNAPSHOT_INTERVAL,
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
    """Micro-batches with separate cost rows (only 0 if all are equal)."""
    return range(1 if problem.is_uniform else problem.micro_batches)


def message_rows(problem: OrderProblem) -> list[Number]:
    """Time of the message after each operation; -1 if it sends none."""
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
    """Longest chain of dependencies and host steps after each operation, with backwards split where possible."""
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
    """Convert a schedule to operation numbers, [device, position], padded to the longest possible list, and lengths.

    Raises InputError if the schedule offloads to a peer device or has operations other than F, B, I, W, R, O and L.
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
    """Convert the kernel's lists to a schedule: the inverse of `encode`."""
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
    """Factor by which all times exceed those of the costs."""

    def table(self, name: str, size: int) -> Floats:
        """The first `size` numbers of a table of floats."""
        begin = getattr(self.layout, name)
        return self.floats[begin : begin + size]


def knows_messages(costs: StageCosts) -> bool:
    """Tell whether the kernel supports the message model of these costs, in which no message waits for its receiver."""
    return costs.communication_model in ("latency", "exclusive")


def arrays_of(problem: OrderProblem) -> KernelArrays:
    """Build the kernel's arrays of a problem.  Raises InputError if messages wait for their receivers."""
    costs = problem.costs
    if not knows_messages(costs):
        raise InputError(
            f"The search does not handle '{costs.communication_model}' messages; use 'exclusive' or 'latency'."
        )
    queued, size = problem.micro_batches * problem.placement.chunks, problem.stages * problem.micro_batches
    times, causes = (len(KINDS) + 2) * size + 3, len(KINDS) * size + problem.devices * queued
    noted = problem.devices * (6 * queued // SNAPSHOT_INTERVAL + 2) if costs.link_groups else 0
    lanes = _lanes(problem)
    fixed_floats, scale = _costs(problem)
    state_floats, state_ints = _device_state(problem)
    device_floats, device_ints = (sum(map(len, state.values())) for state in (state_floats, state_ints))
    floats: dict[str, Floats] = {
        **fixed_floats,
        # Results of an evaluation: `time_count` numbers.
        "end": np.zeros(len(KINDS) * size),
        "arrival": np.zeros(2 * size),
        **{name: np.full(1, -1.0) for name in ("zero", "never", "discarded")},
        **state_floats,
        "mark_floats": np.zeros(2 * MARKS * device_floats),
        "accepted_end_floats": np.zeros(device_floats),
        "accepted_times": np.zeros(times),
        "work": np.zeros(problem.devices),
        "ready": np.zeros(3 * problem.devices if costs.link_groups else 0),
        **{name: np.zeros(problem.devices) for name in ("device_sent", "link_free", "host_free")},
        "step_end": np.full(problem.stages, -1.0),
        "snapshot_floats": np.zeros(3 * noted),
    }
    ints: dict[str, Ints] = {
        "device_of": np.array(problem.placement.device_of),
        "lane": lanes,
        "peer": _peers(lanes),
        # Results of an evaluation: `cause_count` numbers.
        "cause": _zeros(len(KINDS) * size),
        "queue": _zeros(problem.devices * queued),
        "facts": _zeros(4 * len(KINDS) * size),
        **state_ints,
        "mark_ints": _zeros(2 * MARKS * device_ints),
        "mark_remaining": _zeros(2 * MARKS),
        "mark_counts": _zeros(3),
        "suffix_start": _zeros(problem.devices),
        "first_difference": _zeros(problem.devices),
        "comparable": _zeros(1),
        "accepted_end_ints": _zeros(device_ints),
        "accepted_causes": _zeros(causes),
        **{name: _zeros(problem.devices) for name in ("device_sent_cause", "link_cause", "host_cause")},
        "step_cause": _zeros(problem.stages),
        "stale": _zeros(problem.devices),
        **{name: _zeros(problem.devices) for name in ("analyzed_from", "analyzed_to")},
        "snapshot_ints": _zeros(6 * noted),
        **{name: _zeros(3 * problem.devices if costs.link_groups else 0) for name in ("ready_cause", "head")},
        **{
            name: _zeros(len(KINDS) * size if costs.link_groups else 0)
            for name in ("successor", "position", "awaited_offload", "preceding_compute", "waits_for_end")
        },
    }
    layout = KernelLayout(
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        devices=problem.devices,
        grain=problem.micro_batches // len(distinct_micro_batches(problem)),
        max_offloads=queued,
        time_count=times,
        cause_count=causes,
        device_floats=device_floats,
        device_ints=device_ints,
        exclusive=int(costs.communication_model == "exclusive"),
        half_duplex=int(costs.host_link == "half-duplex"),
        span=int(problem.objective == "span"),
        by_arrival=int(bool(costs.link_groups)),
        has_host_steps=int(bool(problem.host_steps)),
        levels=problem.levels,
        **_offsets(floats),
        **_offsets(ints),
    )
    ints["facts"][:] = _facts(layout).reshape(-1)
    floats_block, ints_block = as_block(np.concatenate([*floats.values()])), as_block(np.concatenate([*ints.values()]))
    return KernelArrays(layout, floats_block, ints_block, scale)


def _costs(problem: OrderProblem) -> tuple[dict[str, Floats], int]:
    """The tables that the kernel only reads, and the factor of their times."""
    costs, devices = problem.costs, range(problem.devices)
    kinds, tables = [CODE[kind] for kind in KINDS], problem.op_costs.tables()
    # By kind, stage and micro-batch: first without an R in the list, then with one of each level.
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
        # Before the ends, so that operations that wait for it have no operation as their cause.
        "parameters_loaded": _floats(loaded, time_scale),
        "static": _floats(statics, size_scale),
        "limit": np.array([math.inf if x is None else float(x * size_scale) for x in limits]),
    }, time_scale


def _parameters_loaded(problem: OrderProblem) -> list[Number]:
    """When the parameters of each stage have been loaded from the host that steps its optimizer; 0 if none does.

    Each device requests them stage by stage before its first forward; shared links serve first come, first served.
    """
    costs, lanes = problem.costs, _lanes(problem).tolist()
    loaded: list[Number] = [0] * problem.stages
    pending = [[s for s in stages if s in problem.host_steps] for stages in problem.placement.stages_of]
    device_free: list[Number] = [0] * problem.devices
    link_free: list[Number] = [0] * problem.devices
    while any(pending):
        d = min((d for d in range(problem.devices) if pending[d]), key=device_free.__getitem__)
        stage = pending[d].pop(0)
        end = max(device_free[d], link_free[lanes[d]]) + costs.parameter_load[stage]
        loaded[stage] = device_free[d] = link_free[lanes[d]] = end
    return loaded


def _device_state(problem: OrderProblem) -> tuple[dict[str, Floats], dict[str, Ints]]:
    """The state of all devices, which a mark stores."""
    devices = problem.devices
    names = ("reserved", "last_freed", "spent", "first_start", "compute_start", "compute_end", "counted_bytes")
    links = devices * devices if problem.costs.communication_model == "exclusive" else 0
    lanes = 3 * devices if problem.costs.link_groups else 0
    floats = {
        **{name: np.zeros(devices) for name in names},
        "link": np.zeros(links),
        "last_ready": np.zeros(2 * devices if lanes else 0),
    }
    counts = {name: _zeros(devices) for name in ("cursor", "last_compute", "oldest", "unclaimed", "queue_end")}
    by_lane = {name: _zeros(lanes) for name in ("next_op", "previous_op")}
    return floats, {**counts, "last_transfer": _zeros(2 * devices), "reverse": _zeros(1), **by_lane}


def _facts(a: KernelLayout) -> Ints:
    """NEEDED, RELOADED, SENT and ROW by operation."""
    m, size = a.micro_batches, a.stages * a.micro_batches
    pair = np.arange(size)
    facts = np.empty((len(KINDS), size, 4), dtype=np.int64)
    facts[:, :] = a.zero, a.never, a.discarded, 0
    facts[F, m:, NEEDED] = a.arrival + pair[:-m]
    facts[F, :, SENT] = a.arrival + pair
    for kind in (I, B):
        facts[kind, :-m, NEEDED] = a.arrival + size + pair[m:]
        facts[kind, :, SENT] = a.arrival + size + pair
    for kind in (I, B, R, DEEPER):
        facts[kind, :, RELOADED] = a.end + L * size + pair
    facts[F, ::m, RELOADED] = a.parameters_loaded + np.arange(a.stages)
    facts[O, :, NEEDED] = a.end + pair
    facts[L, :, NEEDED] = a.end + O * size + pair
    facts[:, :, ROW] = np.arange(len(KINDS) * size).reshape(len(KINDS), size) // a.grain
    return facts


def _offsets(tables: Mapping[str, Floats | Ints]) -> dict[str, int]:
    """The offsets of tables that are stored one after the other."""
    begins = np.cumsum([0, *map(len, tables.values())]).tolist()
    return dict(zip(tables, begins, strict=False))


def _lanes(problem: OrderProblem) -> Ints:
    """The host link lane of each device: its own, or that of the first device of its link group."""
    lane = np.arange(problem.devices)
    for group in problem.costs.link_groups:
        lane[list(group)] = min(group)
    return lane


def _peers(lanes: Ints) -> Ints:
    """For each device, the next one on the same link; -1 after the last."""
    peers = np.full(len(lanes), -1)
    for lane in set(lanes.tolist()):
        members = np.flatnonzero(lanes == lane)
        peers[members[:-1]] = members[1:]
    return peers


def _common_denominator(values: Iterable[Any]) -> int:
    """A factor that makes all values integers; 1 if one is a non-integer float or the factor is too large."""
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
