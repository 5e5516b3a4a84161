"""The schedule cache: solved problems, by their costs in coarse proportions.

A problem's key is its shape and its costs divided by the mean forward time and the largest activation, rounded.  An
entry's lists say nothing of times, so that they fit any problem of the same shape; the nearest entry is a start for the
search, which checks it by exact simulation.  Entries are small JSON files.

A few made by `python tools/build_cache.py` are shipped with the program; they are the same on every
machine, and every search may start from them.  Those in the user's cache folder depend on what was planned before, so
that they are read and written only where that is asked for (`debubble plan --cache`), and the plan says so.  They are
written next to their place and renamed, so that processes may share them.
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
STEPS = 20
"""Steps that a forward's time, or an activation's size, is divided into."""
NEAR = 0.35
"""Greatest distance at which an entry is taken for similar: the mean of the entries' relative differences."""


def folder() -> Path:
    """The folder of this machine's entries: $XDG_CACHE_HOME/debubble/schedules, by default under ~/.cache."""
    return user_cache("schedules")


def nearest(problem: OrderProblem, base: Path) -> Schedule | None:
    """Find the schedule of the most similar problem of the same shape in a cache folder; it may break a limit.

    None if no problem is similar enough.
    """
    costs = discretized(problem)
    distances = [(_distance(costs, entry["costs"]), entry) for entry in _entries(problem, base)]
    distance, entry = min(distances, key=lambda pair: pair[0], default=(math.inf, {}))
    return _schedule(problem, entry) if distance <= NEAR else None


def keep(problem: OrderProblem, best: Incumbent) -> None:
    """Write an entry, unless there is one for the same coarse costs that is as good."""
    place = folder() / name_of(problem)
    entry = _read(place)
    if entry is not None and entry["gap"] <= best.gap:
        return
    with contextlib.suppress(InputError):  # a cache that cannot be written is no reason to fail
        write(place, problem, best)


def name_of(problem: OrderProblem) -> Path:
    """The path of a problem's entry within a cache folder."""
    return Path(_shape(problem)) / f"{_digest(discretized(problem))}.json"


def write(place: Path, problem: OrderProblem, best: Incumbent) -> Path:
    """Write an entry, whole or not at all; raises InputError if it cannot be written."""
    entry = {
        "version": VERSION,
        "shape": _shape(problem),
        "costs": discretized(problem),
        "gap": best.gap,
        "orders": [" ".join(op.name for op in order) for order in best.schedule.orders],
        "link_orders": [" ".join(op.name for op in link) for link in best.schedule.link_orders],
    }
    write_whole(place, json.dumps(entry).encode())
    return place


def discretized(problem: OrderProblem) -> list[int]:
    """Times in steps of the mean forward, sizes in steps of the largest activation."""
    costs, p = problem.costs, problem.devices
    time = float(sum(costs.forward)) / costs.stages or 1.0
    size = float(max(costs.activation)) or 1.0
    rooms = [math.inf if (capacity := costs.capacity_of(d)) is None else float(capacity) for d in range(p)]
    times = (
        costs.forward, costs.backward_input, costs.backward_weight, costs.communication,
        *((costs.offload, costs.reload) if problem.offload else ()),
    )  # fmt: skip
    scaled = [float(t) / time for group in times for t in group or ()]
    sizes = [float(s) / size for group in (costs.activation, costs.activation_after_input, rooms) for s in group]
    return [round(STEPS * min(v, 1000.0)) for v in (*scaled, *sizes)]


def _shape(problem: OrderProblem) -> str:
    """Spell out what must be the same for a schedule to be one of this problem."""
    costs = problem.costs
    words = [
        f"p{problem.devices}", f"m{problem.micro_batches}",
        "linear" if problem.placement.chunks == 1 else _digest(list(problem.placement.device_of)),
        problem.objective, costs.host_link if problem.offload else "no-offload",
    ]  # fmt: skip
    flags = (("split", problem.split), ("recompute", problem.recompute), ("fused", bool(problem.fused_recompute)))
    return "-".join([*words, *(word for word, there in flags if there)])


def _entries(problem: OrderProblem, base: Path) -> Iterator[dict[str, Any]]:
    """Read the entries of the same shape; where recomputation is a choice, also those made without it."""
    length = len(discretized(problem))
    shapes = dict.fromkeys((_shape(problem), _shape(replace(problem, recompute=False))))
    for shape in shapes:
        for place in sorted((base / shape).glob("*.json")):
            entry = _read(place)
            if entry is not None and len(entry["costs"]) == length:
                yield entry


def _read(place: Path) -> dict[str, Any] | None:
    """An entry, or None if there is none, or another version's, or a damaged one."""
    try:
        entry = json.loads(place.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    wanted = {"version", "costs", "gap", "orders"}
    return entry if isinstance(entry, dict) and wanted <= entry.keys() and entry["version"] == VERSION else None


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


def _distance(here: list[int], there: list[int]) -> float:
    """Mean relative difference."""
    pairs = zip(here, there, strict=True)
    return sum(abs(a - b) / max(a, b, 1) for a, b in pairs) / max(len(here), 1)


def _digest(values: list[int]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
