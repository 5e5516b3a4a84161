"""Phases 2 and 3 of SCOPE's planner: the ILP.

The poster does not define F, G, C_1..C_3 and b; this is our reading.  In code l is `layers[t][r][s]`, mu micro_batches.

    l[t, r, c, x]   layers of type t with strategy r in chunk c of stage x; position (c, x) is stage s = c P + x
    b[t, c, x]      1 once all layers of types up to t are placed at or before that position
    T_x             time of device x per micro-batch: sum over its chunks of FP, BP and Recom
    B_P = (sum_x T_x - max_x T_x) / C,   B_I = m (max T - mean T),   B_R = m mean(recompute)

so that B_G = B_R + B_I + B_P differs from the step time (m - 1/C) max T + sum T / C by a constant only.

    C_1   every layer is placed once
    C_2   on every device: M_S + alive activations <= D_M.  There is one row per combination of micro-batches in flight
          that the schedule reaches.  SAPP counts per chunk instead, so its plans exceed the limit when chunks hold
          different numbers of layers.
    C_3   order: a position may hold layers of type t only if all earlier types are placed at or before it

OR-Tools' CP-SAT (the poster: Gurobi) solves it, starting from the assignment and the bound of `decomposition`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from debubble.ir import InfeasibleError, Schedule, SolverError
from debubble.papers.scope.decomposition import Decomposition, Layers, decompose
from debubble.papers.scope.instance import DeviceInstance, Instance, LayerType, instance
from debubble.search.effort import Effort, solver_of, status_of

SMALL_GAP = 0.01
FINISH_EFFORT, EFFORT = 1.5, 15.0
"""Effort of the solver if the decomposition's gap is at most SMALL_GAP, and otherwise."""
DECOMPOSITION_SHARE = 0.5
"""Fraction of the effort for the decomposition."""


@dataclass(frozen=True)
class ProgramAnswer:
    """The assignment `layers[t][r][s]`, its step time by the formula, and a lower bound of the step time."""

    layers: Layers
    formula: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative gap between the formula's step time and the bound."""
        return max(0.0, 1.0 - self.bound / self.formula)


def solve(
    types: Sequence[LayerType], schedule: Schedule, *, limits: Sequence[float], static: float, effort: Effort, seed: int
) -> ProgramAnswer:
    """Find the best assignment within the effort.

    Args:
        types: The model's layer types.
        schedule: 1F1B or interleaved 1F1B.
        limits: D_M per device, in bytes.
        static: Bytes on every device besides those of layers.
        effort: The effort to spend from.
        seed: Seed of the solver.

    Raises:
        InfeasibleError: If no assignment exists, or none is found within the effort.
    """
    from ortools.sat.python import cp_model

    inst = instance(types, schedule, limits=limits, static=static)
    start = decompose(inst, effort.split_off(DECOMPOSITION_SHARE * effort.remaining))
    program = _IntegerProgram(cp_model.CpModel(), inst)
    program.set_start(start)
    share = effort.split_off(FINISH_EFFORT if start.gap <= SMALL_GAP else EFFORT)
    solver = solver_of(share, seed=seed)
    status = status_of(solver, program.model, share)
    if start.layers is not None and status == "INFEASIBLE":
        raise SolverError("CP-SAT calls SCOPE's program infeasible that holds an assignment already known.")
    layers, value, bound = start.layers, start.value, float(start.bound)
    if status in ("OPTIMAL", "FEASIBLE"):
        bound = max(bound, solver.best_objective_bound)
        if solver.objective_value < value:
            layers = [[[solver.value(v) for v in row] for row in option] for option in program.layers]
            value = solver.objective_value
    if layers is None:
        raise InfeasibleError(
            "No assignment of layers to stages fits the memory limit, even with every recomputation strategy."
            if status == "INFEASIBLE"
            else "No assignment of layers to stages was found with that effort; raise --effort."
        )
    unit = inst.time_unit / inst.chunks
    return ProgramAnswer(layers, value * unit, bound * unit)


class _IntegerProgram:
    """The CP-SAT model, with one method per family of constraints."""

    def __init__(self, model: Any, inst: Instance) -> None:
        self.model, self.inst = model, inst
        self.layers = [
            [[model.new_int_var(0, count if s in window else 0, "") for s in range(inst.stages)] for _ in inst.times[t]]
            for t, (count, window) in enumerate(zip(inst.counts, inst.windows, strict=True))
        ]
        self._place_every_layer()
        self._keep_the_order()
        self._fill_every_stage()
        self._fit_memory()
        self._minimize_step_time()

    def _stage(self, t: int, stage: int) -> Any:
        return sum(option[stage] for option in self.layers[t])

    def _place_every_layer(self) -> None:
        """Add C_1."""
        for t, count in enumerate(self.inst.counts):
            self.model.add(sum(v for option in self.layers[t] for v in option) == count)

    def _keep_the_order(self) -> None:
        """Add C_3, with b monotone along positions; a type may start in the stage where the previous one ends."""
        for t, (count, following) in enumerate(pairwise(self.inst.counts)):
            placed: Any = 0
            before: Any = None
            for s in range(self.inst.stages):
                placed = placed + self._stage(t, s)
                done = self.model.new_bool_var("")
                self.model.add(placed >= count * done)
                self.model.add(self._stage(t + 1, s) <= following * done)
                if before is not None:
                    self.model.add_implication(before, done)
                before = done

    def _fill_every_stage(self) -> None:
        """Require at least one layer per stage."""
        for s in range(self.inst.stages):
            self.model.add(sum(self._stage(t, s) for t in range(len(self.layers))) >= 1)

    def _fit_memory(self) -> None:
        """Add C_2, including the restored activations of one layer on devices that recompute."""
        for device in self.inst.devices:
            restored = self._restored(device) if device.alive_bytes else 0
            for row in device.alive_bytes:
                alive = sum(
                    (row[t][r][c] + device.static[t]) * option[s]
                    for t, options in enumerate(self.layers)
                    for r, option in enumerate(options)
                    for c, s in enumerate(device.stages)
                )
                self.model.add(alive + restored <= device.capacity)

    def _restored(self, device: DeviceInstance) -> Any:
        """The largest memory that recomputing one of the device's layers restores."""
        largest = self.model.new_int_var(0, max(size for sizes in device.restored for size in sizes), "")
        for t, sizes in enumerate(device.restored):
            for r, size in enumerate(sizes):
                if size > 0:
                    some = self.model.new_bool_var("")
                    here = sum(self.layers[t][r][s] for s in device.stages)
                    self.model.add(here <= self.inst.counts[t] * some)
                    self.model.add(largest >= size * some)
        return largest

    def _minimize_step_time(self) -> None:
        """Minimize C times the step time (m - 1/C) max T + sum T / C, which is B_G plus a constant."""
        times = [
            sum(
                duration * self.layers[t][r][s]
                for s in device.stages
                for t, options in enumerate(self.inst.times)
                for r, duration in enumerate(options)
            )
            for device in self.inst.devices
        ]
        slowest = self.model.new_int_var(0, self.inst.longest, "")
        for duration in times:
            self.model.add(slowest >= duration)
        self.objective = self.inst.weight * slowest + sum(times)
        self.model.minimize(self.objective)

    def set_start(self, start: Decomposition) -> None:
        """Pass the decomposition's assignment and bound to the solver."""
        self.model.add(self.objective >= start.bound)
        if start.layers is not None:
            for variables, values in zip(self.layers, start.layers, strict=True):
                for row, numbers in zip(variables, values, strict=True):
                    for variable, number in zip(row, numbers, strict=True):
                        self.model.add_hint(variable, number)
