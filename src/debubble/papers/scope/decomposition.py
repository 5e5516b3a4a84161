"""Decomposition of SCOPE's integer program by device, for large models.

With the number of layers of each type on a device fixed, and the types that its chunks may hold, the device's
recomputation strategies no longer depend on other devices: CP-SAT solves this small program in milliseconds.

1. The stages in which long runs of a type end are chosen by the best relaxation; short runs are placed there too.
2. The relaxation's loads are rounded, and every device's program is solved.
3. Single layers move from the slowest device to another one as long as that helps.

The relaxation without fixed ends gives the lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from debubble.papers.scope.instance import DeviceInstance, Instance
from debubble.papers.scope.relaxation import Relaxation, relaxed
from debubble.search.effort import Effort, solver_of, status_of

TOLERANCE = 1e-3
"""Relative gap at which moves of layers stop."""
MAX_ENDS = 16
"""Maximum number of stages tried as the end of a long run, those closest to equal work first."""
DEVICE_BUILD_SECONDS = 1.3e-3
"""Effort of building a device's program, in seconds of the reference machine."""
DEVICE_EFFORT = 0.5
"""Maximum effort of solving one."""
DEVICE_GAP = 1e-4
"""Relative gap at which its solver stops."""

Layers = list[list[list[int]]]
"""`layers[t][r][stage]`: l of the poster, with position (c, x) as one stage index."""
Load = tuple[int, ...]
"""Layers of a device per type t."""
Spans = tuple[range, ...]
"""Per type t, the stages that may hold its layers."""
Key = tuple[int, int, int]
"""Chunk c, type t and strategy r."""


@dataclass(frozen=True)
class DeviceAssignment:
    """A device's layers by (c, t, r), and their time per micro-batch in time units."""

    layers: Mapping[Key, int]
    time: int


@dataclass(frozen=True)
class Decomposition:
    """The best assignment (None if none fits), its objective and a lower bound, both in time units."""

    layers: Layers | None
    value: float
    bound: int

    @property
    def gap(self) -> float:
        """Relative gap between value and bound; 1 without an assignment."""
        return 1.0 if self.layers is None else 1.0 - self.bound / self.value


def decompose(inst: Instance, effort: Effort) -> Decomposition:
    """Find a good assignment and a lower bound within the effort."""
    root = None if effort.over else relaxed(inst, effort)
    if root is None:
        return Decomposition(None, math.inf, 0)
    spans, relaxation = _best_spans(inst, effort)
    if relaxation is None:
        return Decomposition(None, math.inf, root.bound)
    devices = _Devices(inst, spans, effort)
    pieces = _improved(inst, devices, _rounded(relaxation, inst.counts), effort, bound=root.bound)
    if pieces is None:
        return Decomposition(None, math.inf, root.bound)
    return Decomposition(_merged(pieces, inst), _objective(inst, [piece.time for piece in pieces]), root.bound)


def _best_spans(inst: Instance, effort: Effort) -> tuple[Spans, Relaxation | None]:
    """The stages that may hold each type, chosen so that the order C_3 is kept, and their relaxation."""
    long = [t for t, count in enumerate(inst.counts) if count > len(inst.devices)]
    ends = _balanced_ends(inst, long)
    best = _spans(inst, long, ends), relaxed(inst, effort, _spans(inst, long, ends))
    for i in range(len(ends)):
        low, high = ends[i - 1] + 1 if i else 0, ends[i + 1] if i + 1 < len(ends) else inst.stages - 1
        for end in sorted(range(low, high), key=lambda stage: abs(stage - ends[i]))[1:MAX_ENDS]:
            candidate = (*ends[:i], end, *ends[i + 1 :])
            relaxation = relaxed(inst, effort, _spans(inst, long, candidate))
            if relaxation is not None and (best[1] is None or relaxation.bound < best[1].bound):
                best, ends = (_spans(inst, long, candidate), relaxation), candidate
    return best


def _balanced_ends(inst: Instance, long: Sequence[int]) -> tuple[int, ...]:
    """The last stage of each long run except the last, for about equal work per stage."""
    work = [inst.counts[t] * min(inst.times[t]) for t in long]
    ends: list[int] = []
    for i in range(len(long) - 1):
        end = round(inst.stages * sum(work[: i + 1]) / sum(work)) - 1
        ends.append(min(max(end, ends[-1] + 1 if ends else 0), inst.stages - len(long) + i))
    return tuple(ends)


def _spans(inst: Instance, long: Sequence[int], ends: Sequence[int]) -> Spans:
    """The stages per type: a long run begins where the previous one ends; short runs share that stage or the last."""
    begins, stops = (0, *ends), (*(end + 1 for end in ends), inst.stages)
    spans = []
    for t in range(len(inst.counts)):
        following = sum(other < t for other in long)
        if t in long:
            spans.append(range(begins[following], stops[following]))
        else:
            stage = begins[following] if following < len(long) else inst.stages - 1
            spans.append(range(stage, stage + 1))
    return tuple(spans)


def _rounded(relaxation: Relaxation, counts: Sequence[int]) -> list[Load]:
    """Round the relaxation's loads to integers with the same totals, by largest remainders."""
    columns = []
    for count, shares in zip(counts, zip(*relaxation.loads, strict=True), strict=True):
        rounded = [math.floor(share + 1e-6) for share in shares]
        by_remainder = sorted(range(len(rounded)), key=lambda d: rounded[d] - shares[d])
        for device in by_remainder[: count - sum(rounded)]:
            rounded[device] += 1
        columns.append(rounded)
    return list(zip(*columns, strict=True))


class _Devices:
    """The devices' programs with a cache of their solutions."""

    def __init__(self, inst: Instance, spans: Spans, effort: Effort) -> None:
        self._inst, self._effort = inst, effort
        self.types = [
            tuple(tuple(t for t, span in enumerate(spans) if stage in span) for stage in device.stages)
            for device in inst.devices
        ]
        """Per device and chunk, the types that it may hold."""
        self._answers: dict[tuple[int, Load], DeviceAssignment | None] = {}

    def answer(self, device: int, load: Load) -> DeviceAssignment | None:
        """The fastest assignment of a device for its load; None if none fits."""
        if (device, load) not in self._answers:
            self._effort.spend(DEVICE_BUILD_SECONDS)
            self._answers[device, load] = fastest(
                self._inst, self._inst.devices[device], load, self.types[device], self._effort
            )
        return self._answers[device, load]

    def holders(self, t: int) -> Iterator[int]:
        """The devices that may hold layers of type t."""
        return (d for d, chunks in enumerate(self.types) if any(t in types for types in chunks))


def _improved(
    inst: Instance, devices: _Devices, loads: list[Load], effort: Effort, *, bound: int
) -> list[DeviceAssignment] | None:
    """Improve the assignments by moving single layers off the slowest device; None if a load does not fit."""
    pieces = [devices.answer(device, load) for device, load in enumerate(loads)]

    def times() -> list[float]:
        return [math.inf if piece is None else piece.time for piece in pieces]

    while not effort.over and bound < (1 - TOLERANCE) * _objective(inst, times()):
        slowest = max(range(len(pieces)), key=lambda device: times()[device])
        moved = _moved(devices, loads, times(), slowest)
        if moved is None:
            break
        for device, load in moved.items():
            loads[device], pieces[device] = load, devices.answer(device, load)
    assignments = [piece for piece in pieces if piece is not None]
    return assignments if len(assignments) == len(pieces) else None


def _moved(devices: _Devices, loads: Sequence[Load], times: Sequence[float], slowest: int) -> dict[int, Load] | None:
    """The loads of two devices after moving one layer off the slowest; None if no move is an improvement."""
    for t, number in enumerate(loads[slowest]):
        if number == 0:
            continue
        fewer = _with(loads[slowest], t, number - 1)
        for device in sorted(devices.holders(t), key=lambda d: times[d]):
            if device == slowest:
                continue
            more = _with(loads[device], t, loads[device][t] + 1)
            receiver, giver = devices.answer(device, more), devices.answer(slowest, fewer)
            if (
                receiver is not None
                and receiver.time < times[slowest]
                and (giver is not None or times[slowest] == math.inf)
            ):
                return {slowest: fewer, device: more}
    return None


def _with(load: Load, t: int, number: int) -> Load:
    return (*load[:t], number, *load[t + 1 :])


def _objective(inst: Instance, times: Sequence[float]) -> float:
    return inst.weight * max(times) + sum(times)


def fastest(
    inst: Instance, device: DeviceInstance, load: Sequence[int], types: Sequence[Sequence[int]], effort: Effort
) -> DeviceAssignment | None:
    """Find the fastest assignment of a device's layers to chunks and strategies; None if none is found.

    Args:
        inst: The program.
        device: The device.
        load: Its number of layers per type.
        types: Per chunk, the types that it may hold.
        effort: The effort to spend from.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    layers = {
        (c, t, r): model.new_int_var(0, load[t], "")
        for c, here in enumerate(types)
        for t in here
        if load[t]
        for r in range(len(inst.times[t]))
    }
    for layer_type, number in enumerate(load):
        model.add(sum(v for (_, t, _), v in layers.items() if t == layer_type) == number)
    for chunk in range(inst.chunks):
        model.add(sum(v for (c, _, _), v in layers.items() if c == chunk) >= 1)
    if device.alive_bytes:
        _fit(model, device, layers)
    time = sum(inst.times[t][r] * v for (_, t, r), v in layers.items())
    model.minimize(time)
    share = Effort(DEVICE_EFFORT, deadline=effort.deadline, parent=effort)
    solver = solver_of(share)
    solver.parameters.relative_gap_limit = DEVICE_GAP
    solver.parameters.cp_model_presolve = False  # would take longer than such a small program
    if status_of(solver, model, share) not in ("OPTIMAL", "FEASIBLE"):
        return None
    return DeviceAssignment({key: n for key, v in layers.items() if (n := solver.value(v))}, solver.value(time))


def _fit(model: Any, device: DeviceInstance, layers: Mapping[Key, Any]) -> None:
    """Add C_2: alive bytes at each combination, plus the largest memory that recomputing one layer restores."""
    sizes = {device.restored[t][r] for _, t, r in layers}
    restored = model.new_int_var(0, max(sizes, default=0), "")
    for size in sorted(sizes - {0}):
        some = model.new_bool_var("")
        for (_, t, r), v in layers.items():
            if device.restored[t][r] == size:
                model.add(v == 0).only_enforce_if(~some)
        model.add(restored >= size).only_enforce_if(some)
    for row in device.alive_bytes:
        model.add(
            sum((row[t][r][c] + device.static[t]) * v for (c, t, r), v in layers.items()) + restored <= device.capacity
        )


def _merged(pieces: Sequence[DeviceAssignment], inst: Instance) -> Layers:
    """Collect the devices' layers as `layers[t][r][stage]`."""
    layers = [[[0] * inst.stages for _ in times] for times in inst.times]
    for device, piece in zip(inst.devices, pieces, strict=True):
        for (chunk, t, r), number in piece.layers.items():
            layers[t][r][device.stages[chunk]] += number
    return layers
