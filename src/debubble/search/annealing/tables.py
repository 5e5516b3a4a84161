"""A problem as arrays: what the search kernel reads and writes.

Times and sizes that are whole numbers or fractions are scaled to whole numbers, so that the kernel is exact for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from debubble.ir import InputError, Number
from debubble.search.annealing.layout import (
    KINDS,
    MARKS,
    NEEDED,
    RELOADED,
    ROW,
    SENT,
    B,
    F,
    Floats,
    I,
    Ints,
    L,
    Layout,
    O,
    R,
)
from debubble.search.annealing.lists import Block
from debubble.search.annealing.rows import alike, messages, operations, tails
from debubble.search.problem import OrderProblem


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
    costs = problem.costs
    if costs.communication_model == "blocking":
        raise InputError("The search does not handle 'blocking' messages; use 'exclusive' or 'latency'.")
    queued, size = problem.micro_batches * problem.placement.chunks, problem.stages * problem.micro_batches
    times, causes = (len(KINDS) + 2) * size + 3, len(KINDS) * size + problem.devices * queued
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
    }
    ints: dict[str, Ints] = {
        "device_of": np.array(problem.placement.device_of),
        "lane": _lanes(problem),
        # What an evaluation finds: `causes` numbers.
        "cause": _zeros(len(KINDS) * size),
        "queue": _zeros(problem.devices * queued),
        "facts": _zeros(4 * len(KINDS) * size),
        **state_ints,
        "mark_ints": _zeros(2 * MARKS * device_ints),
        "mark_left": _zeros(2 * MARKS),
        "marked": _zeros(3),
        "shared": _zeros(problem.devices),
        "last_ints": _zeros(device_ints),
        "kept_causes": _zeros(causes),
        "begin": _zeros(problem.devices),
        "window": np.array(block.windows if block else (0,) * problem.devices, dtype=np.int64),
        "kept_begin": _zeros(problem.devices),
    }
    layout = Layout(
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        devices=problem.devices,
        grain=problem.micro_batches // len(alike(problem)),
        queued=queued,
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
    return Tables(layout, np.concatenate([*floats.values()]), np.concatenate([*ints.values()]), scale)


def _costs(problem: OrderProblem) -> tuple[dict[str, Floats], int]:
    """(what the kernel only reads, the number that times are multiplied by)."""
    costs, devices = problem.costs, range(problem.devices)
    durations, allocated, freed = operations(problem)
    message = messages(problem)
    time_scale = _common_denominator([*durations, *message])
    statics, limits = [costs.static_of(d) for d in devices], [costs.limit_of(d) for d in devices]
    size_scale = _common_denominator([*allocated, *freed, *statics, *(x for x in limits if x is not None)])
    time, sent = _floats(durations, time_scale), _floats(message, time_scale)
    return {
        "time": time,
        "allocated": _floats(allocated, size_scale),
        "freed": _floats(freed, size_scale),
        "message": np.tile(sent, 2),
        "tail": np.tile(tails(problem, time.reshape(2, -1).min(axis=0), sent), 2),
        "static": _floats(statics, size_scale),
        "limit": np.array([math.inf if x is None else float(x * size_scale) for x in limits]),
    }, time_scale


def _state(problem: OrderProblem) -> tuple[dict[str, Floats], dict[str, Ints]]:
    """The state of all devices: what a mark keeps."""
    devices = problem.devices
    names = ("reserved", "last_freed", "rest", "first", "begun", "free", "accounted")
    links = devices * devices if problem.costs.communication_model == "exclusive" else 0
    floats = {**{name: np.zeros(devices) for name in names}, "link": np.zeros(links)}
    counts = {name: _zeros(devices) for name in ("cursor", "compute", "oldest", "known", "newest")}
    return floats, {**counts, "transfer": _zeros(2 * devices), "downward": _zeros(1)}


def _facts(a: Layout) -> Ints:
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
    for kind in (I, B, R):
        facts[kind, :, RELOADED] = a.end + L * size + pair
    facts[O, :, NEEDED] = a.end + pair
    facts[L, :, NEEDED] = a.end + O * size + pair
    facts[:, :, ROW] = np.arange(len(KINDS) * size).reshape(len(KINDS), size) // a.grain
    return facts


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


def _zeros(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)
