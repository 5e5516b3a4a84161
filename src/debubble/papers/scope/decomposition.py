"""SCOPE's program at scale, device by device.

Once it is given how many layers of each run a device holds, and which runs its chunks may hold, its strategies are its
own affair: a small integer program, which CP-SAT solves in milliseconds.  So it is decided in three steps:

1. The stages in which long runs end are those with the best relaxation; short runs stand there too.
2. The relaxation's loads of the devices are rounded, and each device's program is solved.
3. While that helps, one layer moves from the slowest device to another one.

The relaxation without given ends bounds the program.
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
"""Relative gap at which layers no longer move."""
ENDS_TRIED = 16
"""Stages in which the end of a long run is tried, those nearest to equal work first."""
DEVICE_PROGRAM = 1.3e-3
"""Seconds to build a device's program."""
DEVICE_EFFORT = 0.5
"""Effort for one of them at most."""
DEVICE_GAP = 1e-4
"""Relative gap at which it stops."""

Layers = list[list[list[int]]]
"""`layers[run][option][stage]`."""
Load = tuple[int, ...]
"""Layers per run."""
Spans = tuple[range, ...]
"""Per run, the stages that may hold its layers."""
Key = tuple[int, int, int]
"""Chunk, run and option."""


@dataclass(frozen=True)
class DeviceAssignment:
    """A device's layers, by chunk, run and option, and their time per micro-batch."""

    layers: Mapping[Key, int]
    time: int


@dataclass(frozen=True)
class Decomposition:
    """An assignment, if one was found, its objective, and a bound on the objective, both in time units."""

    layers: Layers | None
    value: float
    bound: int

    @property
    def gap(self) -> float:
        """Relative to the value; 1 if no assignment was found."""
        return 1.0 if self.layers is None else 1.0 - self.bound / self.value


def decompose(inst: Instance, effort: Effort) -> Decomposition:
    """A good assignment and a bound on the program's optimum, as far as the effort goes."""
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
    """The stages that may hold each run, so that runs keep their order, and the relaxation with these."""
    long = [r for r, count in enumerate(inst.counts) if count > len(inst.devices)]
    ends = _balanced_ends(inst, long)
    best = _spans(inst, long, ends), relaxed(inst, effort, _spans(inst, long, ends))
    for i in range(len(ends)):
        low, high = ends[i - 1] + 1 if i else 0, ends[i + 1] if i + 1 < len(ends) else inst.stages - 1
        for end in sorted(range(low, high), key=lambda stage: abs(stage - ends[i]))[1:ENDS_TRIED]:
            tried = (*ends[:i], end, *ends[i + 1 :])
            relaxation = relaxed(inst, effort, _spans(inst, long, tried))
            if relaxation is not None and (best[1] is None or relaxation.bound < best[1].bound):
                best, ends = (_spans(inst, long, tried), relaxation), tried
    return best


def _balanced_ends(inst: Instance, long: Sequence[int]) -> tuple[int, ...]:
    """The last stage of each long run but the last, if stages have about equal work."""
    work = [inst.counts[r] * min(inst.times[r]) for r in long]
    ends: list[int] = []
    for i in range(len(long) - 1):
        end = round(inst.stages * sum(work[: i + 1]) / sum(work)) - 1
        ends.append(min(max(end, ends[-1] + 1 if ends else 0), inst.stages - len(long) + i))
    return tuple(ends)


def _spans(inst: Instance, long: Sequence[int], ends: Sequence[int]) -> Spans:
    """A long run begins in the stage in which the one before it ends; short ones stand there, or in the last stage."""
    begins, stops = (0, *ends), (*(end + 1 for end in ends), inst.stages)
    spans = []
    for r in range(len(inst.counts)):
        following = sum(run < r for run in long)
        if r in long:
            spans.append(range(begins[following], stops[following]))
        else:
            stage = begins[following] if following < len(long) else inst.stages - 1
            spans.append(range(stage, stage + 1))
    return tuple(spans)


def _rounded(relaxation: Relaxation, counts: Sequence[int]) -> list[Load]:
    """The relaxation's loads as whole numbers with the same totals, by largest remainders."""
    columns = []
    for count, shares in zip(counts, zip(*relaxation.loads, strict=True), strict=True):
        whole = [math.floor(share + 1e-6) for share in shares]
        by_remainder = sorted(range(len(whole)), key=lambda d: whole[d] - shares[d])
        for device in by_remainder[: count - sum(whole)]:
            whole[device] += 1
        columns.append(whole)
    return list(zip(*columns, strict=True))


class _Devices:
    """The devices' programs, and what they have answered."""

    def __init__(self, inst: Instance, spans: Spans, effort: Effort) -> None:
        self._inst, self._effort = inst, effort
        self.runs = [
            tuple(tuple(r for r, span in enumerate(spans) if stage in span) for stage in device.stages)
            for device in inst.devices
        ]
        """Per device and chunk, the runs that it may hold."""
        self._answers: dict[tuple[int, Load], DeviceAssignment | None] = {}

    def answer(self, device: int, load: Load) -> DeviceAssignment | None:
        """The fastest assignment of a device's load; None if none fits."""
        if (device, load) not in self._answers:
            self._effort.spend(DEVICE_PROGRAM)
            self._answers[device, load] = fastest(
                self._inst, self._inst.devices[device], load, self.runs[device], self._effort
            )
        return self._answers[device, load]

    def holders(self, run: int) -> Iterator[int]:
        """The devices that may hold a run."""
        return (d for d, chunks in enumerate(self.runs) if any(run in runs for runs in chunks))


def _improved(
    inst: Instance, devices: _Devices, loads: list[Load], effort: Effort, *, bound: int
) -> list[DeviceAssignment] | None:
    """The devices' assignments after moves of single layers from the slowest device; None if a load does not fit."""
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
    found = [piece for piece in pieces if piece is not None]
    return found if len(found) == len(pieces) else None


def _moved(devices: _Devices, loads: Sequence[Load], times: Sequence[float], slowest: int) -> dict[int, Load] | None:
    """The loads of two devices after a move of one layer that makes the slower of them faster; None if none does."""
    for run, number in enumerate(loads[slowest]):
        if number == 0:
            continue
        fewer = _with(loads[slowest], run, number - 1)
        for device in sorted(devices.holders(run), key=lambda d: times[d]):
            if device == slowest:
                continue
            more = _with(loads[device], run, loads[device][run] + 1)
            receiver, giver = devices.answer(device, more), devices.answer(slowest, fewer)
            if (
                receiver is not None
                and receiver.time < times[slowest]
                and (giver is not None or times[slowest] == math.inf)
            ):
                return {slowest: fewer, device: more}
    return None


def _with(load: Load, run: int, number: int) -> Load:
    return (*load[:run], number, *load[run + 1 :])


def _objective(inst: Instance, times: Sequence[float]) -> float:
    return inst.weight * max(times) + sum(times)


def fastest(
    inst: Instance, device: DeviceInstance, load: Sequence[int], runs: Sequence[Sequence[int]], effort: Effort
) -> DeviceAssignment | None:
    """The fastest assignment of a device's layers to its chunks and strategies that fits; None if none is found.

    Args:
        inst: The program.
        device: The device.
        load: Layers that it holds, per run.
        runs: Per chunk, the runs that it may hold.
        effort: Counter of the work.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    layers = {
        (c, r, o): model.new_int_var(0, load[r], "")
        for c, here in enumerate(runs)
        for r in here
        if load[r]
        for o in range(len(inst.times[r]))
    }
    for run, number in enumerate(load):
        model.add(sum(v for (_, r, _), v in layers.items() if r == run) == number)
    for chunk in range(inst.chunks):
        model.add(sum(v for (c, _, _), v in layers.items() if c == chunk) >= 1)
    if device.kept:
        _fit(model, device, layers)
    time = sum(inst.times[r][o] * v for (_, r, o), v in layers.items())
    model.minimize(time)
    share = Effort(DEVICE_EFFORT, deadline=effort.deadline, parent=effort)
    solver = solver_of(share)
    solver.parameters.relative_gap_limit = DEVICE_GAP
    solver.parameters.cp_model_presolve = False  # would take longer than such a small program
    if status_of(solver, model, share) not in ("OPTIMAL", "FEASIBLE"):
        return None
    return DeviceAssignment({key: n for key, v in layers.items() if (n := solver.value(v))}, solver.value(time))


def _fit(model: Any, device: DeviceInstance, layers: Mapping[Key, Any]) -> None:
    """C_2: what is alive at each combination, with the largest that its recomputation brings back at a time."""
    sizes = {device.restored[r][o] for _, r, o in layers}
    restored = model.new_int_var(0, max(sizes, default=0), "")
    for size in sorted(sizes - {0}):
        some = model.new_bool_var("")
        for (_, r, o), v in layers.items():
            if device.restored[r][o] == size:
                model.add(v == 0).only_enforce_if(~some)
        model.add(restored >= size).only_enforce_if(some)
    for row in device.kept:
        model.add(
            sum((row[r][o][c] + device.static[r]) * v for (c, r, o), v in layers.items()) + restored <= device.capacity
        )


def _merged(pieces: Sequence[DeviceAssignment], inst: Instance) -> Layers:
    """All devices' layers by stage."""
    layers = [[[0] * inst.stages for _ in times] for times in inst.times]
    for device, piece in zip(inst.devices, pieces, strict=True):
        for (chunk, run, option), number in piece.layers.items():
            layers[run][option][device.stages[chunk]] += number
    return layers
