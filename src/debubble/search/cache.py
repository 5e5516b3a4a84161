"""The schedule cache: schedules of solved problems, keyed by their rounded relative costs.

A problem's key is its shape and its costs divided by the mean forward time and the largest activation, rounded.  An
entry's lists contain no times, so they fit any problem of the same shape; the nearest entry is a start for the search,
which checks it by exact simulation.  Entries are small JSON files.

Some entries, made by `python tools/build_cache.py`, are shipped with the program; they are the same on every machine,
and every search may start from them.  Entries in the user's cache folder depend on earlier plans, so they are read and
written only on request (`debubble plan --cache`), and the plan says so.  Files are written and then renamed, so that
processes can share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from debubble.errors import DebubbleError, InputError
from debubble.files import user_cache, write_whole
from debubble.ir import Op, Schedule, check
from debubble.search.problem import Incumbent, OrderProblem

VERSION = 1
SHIPPED = Path(__file__).parent / "shipped"
STEPS_PER_UNIT = 20
"""Rounding steps per mean forward time, and per largest activation."""
MAX_DISTANCE = 0.35
"""Maximum distance of a similar entry: the mean relative difference of the rounded costs."""


def folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/debubble/schedules, by default under ~/.cache."""
    return user_cache("schedules")


def nearest(problem: OrderProblem, base: Path) -> Schedule | None:
    """The cached schedule of the most similar problem of the same shape; None if no problem is similar enough.

    It may exceed the problem's memory limit.
    """
    costs = discretized(problem)
    distances = [(_distance(costs, entry["costs"]), entry) for entry in _entries(problem, base)]
    distance, entry = min(distances, key=lambda pair: pair[0], default=(math.inf, {}))
    return _schedule(problem, entry) if distance <= MAX_DISTANCE else None


def keep(problem: OrderProblem, best: Incumbent) -> None:
    """Write an entry, unless the existing one for the same rounded costs is at least as good."""
    path = folder() / name_of(problem)
    entry = _read(path)
    if entry is not None and entry["gap"] <= best.gap:
        return
    with contextlib.suppress(InputError):  # planning must not fail because the cache cannot be written
        write(path, problem, best)


def name_of(problem: OrderProblem) -> Path:
    """The path of a problem's entry within a cache folder."""
    return Path(_shape(problem)) / f"{_digest(discretized(problem))}.json"


def write(path: Path, problem: OrderProblem, best: Incumbent) -> Path:
    """Write an entry atomically; raises InputError if it cannot be written."""
    entry = {
        "version": VERSION,
        "shape": _shape(problem),
        "costs": discretized(problem),
        "gap": best.gap,
        "orders": [" ".join(op.name for op in order) for order in best.schedule.orders],
        "link_orders": [" ".join(op.name for op in link) for link in best.schedule.link_orders],
    }
    write_whole(path, json.dumps(entry).encode())
    return path


def discretized(problem: OrderProblem) -> list[int]:
    """The rounded costs: times relative to the mean forward, sizes relative to the largest activation."""
    costs, p = problem.costs, problem.devices
    time = float(sum(costs.forward)) / costs.stages or 1.0
    size = float(max(costs.activation)) or 1.0
    capacities = [math.inf if (capacity := costs.capacity_of(d)) is None else float(capacity) for d in range(p)]
    times = (
        costs.forward, costs.backward_input, costs.backward_weight, costs.communication,
        *((costs.offload, costs.reload) if problem.offload else ()),
    )  # fmt: skip
    scaled = [float(t) / time for group in times for t in group or ()]
    sizes = [float(s) / size for group in (costs.activation, costs.activation_after_input, capacities) for s in group]
    return [round(STEPS_PER_UNIT * min(v, 1000.0)) for v in (*scaled, *sizes)]


def _shape(problem: OrderProblem) -> str:
    """The folder name of all problems that can use the same schedules."""
    costs = problem.costs
    words = [
        f"p{problem.devices}", f"m{problem.micro_batches}",
        "linear" if problem.placement.chunks == 1 else _digest(list(problem.placement.device_of)),
        problem.objective, costs.host_link if problem.offload else "no-offload",
    ]  # fmt: skip
    flags = (("split", problem.split), ("recompute", problem.recompute), ("fused", bool(problem.fused_recompute)))
    return "-".join([*words, *(word for word, is_set in flags if is_set)])


def _entries(problem: OrderProblem, base: Path) -> Iterator[dict[str, Any]]:
    """Read the entries of the same shape; if recomputation is a choice, also those made without it."""
    length = len(discretized(problem))
    shapes = dict.fromkeys((_shape(problem), _shape(replace(problem, recompute=False))))
    for shape in shapes:
        for path in sorted((base / shape).glob("*.json")):
            entry = _read(path)
            if entry is not None and len(entry["costs"]) == length:
                yield entry


def _read(path: Path) -> dict[str, Any] | None:
    """Read an entry; None if it does not exist, is damaged or is of another version."""
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    required = {"version", "costs", "gap", "orders"}
    return entry if isinstance(entry, dict) and required <= entry.keys() and entry["version"] == VERSION else None


def _schedule(problem: OrderProblem, entry: dict[str, Any]) -> Schedule | None:
    try:
        schedule = problem.schedule(map(Op.parse, order.split()) for order in entry["orders"])
        if problem.costs.link_groups:
            links = entry.get("link_orders", [])
            schedule = replace(schedule, link_orders=tuple(tuple(map(Op.parse, link.split())) for link in links))
        check(schedule)
    except DebubbleError:
        return None
    return schedule


def _distance(costs: list[int], other_costs: list[int]) -> float:
    """Mean relative difference."""
    pairs = zip(costs, other_costs, strict=True)
    return sum(abs(a - b) / max(a, b, 1) for a, b in pairs) / max(len(costs), 1)


def _digest(values: list[int]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
