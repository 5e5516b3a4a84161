"""One device of SCOPE's program: given how many layers of each run it holds, how fast it can be.

The device program assigns these layers to its chunks and strategies in the least time that fits its memory.  It is
solved exactly by CP-SAT; the dual of its linear relaxation bounds the time for every other number of layers as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from debubble.papers.scope.program.instance import RESOLUTION, DeviceInstance, Instance
from debubble.search.effort import Effort, solver_of, status_of

Open = tuple[tuple[int, ...], ...]
"""Per chunk of a device, the runs whose layers it may hold."""

PATIENCE = 3.0
"""Effort for one device: an answer is needed, whatever is left."""
CLOSE = 1e-4
"""Relative gap at which a device program stops."""


@dataclass(frozen=True)
class Assignment:
    """Layers of a device as {(chunk, run, option): number}, and what is known of it."""

    layers: Mapping[tuple[int, int, int], int]
    """Empty: none was found in time."""
    bound: int
    """No assignment has less."""

    def times(self, inst: Instance) -> list[int]:
        """Time per chunk."""
        times = [0] * inst.chunks
        for (chunk, run, option), number in self.layers.items():
            times[chunk] += number * inst.times[run][option]
        return times

    @property
    def fills(self) -> set[int]:
        """Chunks that hold a layer."""
        return {chunk for chunk, _, _ in self.layers}


@dataclass(frozen=True)
class TimeBound:
    """time >= constant + sum of slopes[run] x layers of the run; runs that the device cannot hold have no slope."""

    constant: int
    slopes: tuple[tuple[int, int], ...]

    def at(self, load: Sequence[int]) -> int:
        """The bound for these layers per run."""
        return self.constant + sum(slope * load[run] for run, slope in self.slopes)


def fastest(
    inst: Instance,
    device: DeviceInstance,
    load: Sequence[int],
    opened: Open,
    effort: Effort,
    *,
    filled: bool,
    caps: Sequence[int] | None = None,
) -> Assignment | None:
    """The fastest assignment of a device's layers that fits; None if there is none.

    Args:
        inst: The instance.
        device: The device.
        load: Layers that it holds, per run.
        opened: Runs that each of its chunks may hold.
        effort: Counter of the work.
        filled: Every chunk holds at least one layer.
        caps: Times per chunk that are, first of all, to be exceeded by least.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    layers = {key: model.new_int_var(0, load[key[1]], "") for key in _keys(inst, opened) if load[key[1]]}
    for run, number in enumerate(load):
        model.add(sum(v for (_, r, _), v in layers.items() if r == run) == number)
    if filled:
        for chunk in range(inst.chunks):
            model.add(sum(v for (c, _, _), v in layers.items() if c == chunk) >= 1)
    if device.kept:
        _fit(model, device, layers)
    chunk_times = [
        sum(inst.times[r][o] * v for (c, r, o), v in layers.items() if c == chunk) for chunk in range(inst.chunks)
    ]
    excess: Any = 0
    for time, cap in zip(chunk_times, caps or (), strict=bool(caps)):
        over = model.new_int_var(0, inst.most, "")
        model.add(over >= time - cap)
        excess += over
    model.minimize(inst.weight * excess + sum(chunk_times))
    share = Effort(PATIENCE, brake=effort.brake, whole=effort)
    solver = solver_of(share)
    solver.parameters.relative_gap_limit = CLOSE
    solver.parameters.cp_model_presolve = False  # would take longer than such a small program
    status = status_of(solver, model, share)
    if status == "INFEASIBLE":
        return None
    known = status in ("OPTIMAL", "FEASIBLE")
    values = {key: solver.value(v) for key, v in layers.items()} if known else {}
    return Assignment({key: n for key, n in values.items() if n}, math.ceil(solver.best_objective_bound - 1e-6))


def _keys(inst: Instance, opened: Open) -> list[tuple[int, int, int]]:
    return [(c, r, o) for c, runs in enumerate(opened) for r in runs for o in range(len(inst.times[r]))]


def _fit(model: Any, device: DeviceInstance, layers: Mapping[tuple[int, int, int], Any]) -> None:
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
            sum((row[r][o][c] + device.static[r]) * v for (c, r, o), v in layers.items()) + restored <= device.room
        )


def time_bound(inst: Instance, device: DeviceInstance, load: Sequence[int], opened: Open) -> TimeBound | None:
    """The linear bound on the device's time that is tightest at `held`; None if no fraction of layers fits.

    Whatever prices a combination alive and an empty chunk are given, the cheapest way to hold a layer bounds the time;
    the relaxation's dual gives the best prices, and the bound is computed from them in integers.
    """
    prices = _prices(inst, device, load, opened)
    return None if prices is None else bound_of_prices(inst, device, opened, *prices)


def bound_of_prices(
    inst: Instance, device: DeviceInstance, opened: Open, memory: Sequence[float], filling: Sequence[float]
) -> TimeBound:
    """The bound for prices >= 0 of a byte of each combination alive, and of filling each chunk."""
    cheapest: dict[int, float] = {}
    for c, r, o in _keys(inst, opened):
        rows = zip(memory, device.kept, strict=True)
        price = inst.times[r][o] + sum(p * (row[r][o][c] + device.static[r]) for p, row in rows) - filling[c]
        cheapest[r] = min(price, cheapest.get(r, price))
    constant = sum(filling) - sum(memory) * device.room
    return TimeBound(math.floor(constant - 1e-3), tuple((r, math.floor(p - 1e-6)) for r, p in sorted(cheapest.items())))


def _prices(
    inst: Instance, device: DeviceInstance, load: Sequence[int], opened: Open
) -> tuple[list[float], list[float]] | None:
    """The dual of the device program's linear relaxation, without what recomputation brings back."""
    from ortools.math_opt.python import mathopt

    program = mathopt.Model()
    layers = {key: program.add_variable(lb=0) for key in _keys(inst, opened)}

    def row(low: float, high: float, entries: Mapping[Any, float]) -> Any:
        constraint = program.add_linear_constraint(lb=low, ub=high)
        for key, entry in entries.items():
            constraint.set_coefficient(layers[key], entry)
        return constraint

    for run, number in enumerate(load):
        row(number, number, {key: 1 for key in layers if key[1] == run})
    memory = [
        row(
            -math.inf,
            device.room / RESOLUTION,
            {(c, r, o): (kept[r][o][c] + device.static[r]) / RESOLUTION for c, r, o in layers},
        )
        for kept in device.kept
    ]
    filling = [row(1, math.inf, {key: 1 for key in layers if key[0] == c}) for c in range(inst.chunks)]
    for (_, r, o), layer in layers.items():
        program.objective.set_linear_coefficient(layer, inst.times[r][o] / RESOLUTION)
    result = mathopt.solve(program, mathopt.SolverType.GLOP)
    if result.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        return None
    dual = result.dual_values()
    return (
        [max(0.0, -dual[constraint]) for constraint in memory],
        [max(0.0, dual[constraint]) * RESOLUTION for constraint in filling],
    )
