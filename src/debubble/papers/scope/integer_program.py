"""Phases 2 and 3 of SCOPE's planner: the integer program.

The poster leaves F, G, C_1..C_3 and the meaning of b open; this is our reading, complete and consistent.

    l[t, r, c, x]   layers of type t with strategy r in chunk c of stage x; position (c, x) is stage s = c P + x
    b[t, c, x]      1 once all layers of types up to t are placed at or before that position
    T_x             time of device x per micro-batch: sum over its chunks of forward, backward and recomputation
    B_P = (sum_x T_x - max_x T_x) / C,   B_I = m (max T - mean T),   B_R = m mean(recompute)

so that B_G = B_R + B_I + B_P differs from the step time (m - 1/C) max T + sum T / C by a constant only.

    C_1   every layer is placed once
    C_2   on every device: M_S + what is alive <= D_M.  What is alive is not one count per chunk, as in SAPP, whose
          plans break the limit when chunks hold different numbers of layers: there is one row for each combination of
          counts that the schedule's order really reaches.
    C_3   order: layers of type t may only stand where all of the types before it have been placed

CP-SAT of OR-Tools solves it (the poster used Gurobi), from the assignment and the bound that `decomposition` gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from debubble.ir import InfeasibleError, Schedule, SolverError
from debubble.papers.scope.decomposition import Decomposition, Layers, decompose
from debubble.papers.scope.instance import DeviceInstance, Instance, LayerRun, instance
from debubble.search.effort import Effort, solver_of, status_of

SMALL_GAP = 0.01
FINISH_EFFORT, EFFORT = 1.5, 15.0
"""Effort for the whole program where no more than a SMALL_GAP is left, and elsewhere."""
DECOMPOSITION_SHARE = 0.5
"""Share of the effort for the decomposition."""


@dataclass(frozen=True)
class ProgramAnswer:
    """`layers[run][option][stage]`, the formula's step time, and a bound on the best there is."""

    layers: Layers
    formula: float
    bound: float

    @property
    def gap(self) -> float:
        """Share of the step time that a better answer of the same program could save at most."""
        return max(0.0, 1.0 - self.bound / self.formula)


def solve(
    runs: Sequence[LayerRun], schedule: Schedule, *, limits: Sequence[float], static: float, effort: Effort, seed: int
) -> ProgramAnswer:
    """The best assignment that the effort finds.

    Args:
        runs: The model's layer types.
        schedule: The order of operations, 1F1B or interleaved 1F1B.
        limits: Bytes per device.
        static: Bytes on every device next to its layers' own.
        effort: Counter of the work.
        seed: The solver's.

    Raises:
        InfeasibleError: If there is no assignment, or the effort does not find one.
    """
    from ortools.sat.python import cp_model

    inst = instance(runs, schedule, limits=limits, static=static)
    start = decompose(inst, effort.split_off(DECOMPOSITION_SHARE * effort.remaining))
    program = _IntegerProgram(cp_model.CpModel(), inst)
    program.start_from(start)
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
    """The model, one method per family of constraints."""

    def __init__(self, model: Any, inst: Instance) -> None:
        self.model, self.inst = model, inst
        self.layers = [
            [
                [model.new_int_var(0, count if s in window else 0, "") for s in range(inst.stages)]
                for _ in inst.times[run]
            ]
            for run, (count, window) in enumerate(zip(inst.counts, inst.windows, strict=True))
        ]
        self._place_every_layer()
        self._keep_the_order()
        self._fill_every_stage()
        self._fit_memory()
        self._minimise_step_time()

    def _stage(self, run: int, stage: int) -> Any:
        return sum(option[stage] for option in self.layers[run])

    def _place_every_layer(self) -> None:
        """C_1."""
        for r, count in enumerate(self.inst.counts):
            self.model.add(sum(v for option in self.layers[r] for v in option) == count)

    def _keep_the_order(self) -> None:
        """C_3, with b monotone along the positions; a run may share a stage with the end of the one before it."""
        for r, (count, following) in enumerate(pairwise(self.inst.counts)):
            placed: Any = 0
            before: Any = None
            for s in range(self.inst.stages):
                placed = placed + self._stage(r, s)
                done = self.model.new_bool_var("")
                self.model.add(placed >= count * done)
                self.model.add(self._stage(r + 1, s) <= following * done)
                if before is not None:
                    self.model.add_implication(before, done)
                before = done

    def _fill_every_stage(self) -> None:
        """A stage holds at least one layer."""
        for s in range(self.inst.stages):
            self.model.add(sum(self._stage(r, s) for r in range(len(self.layers))) >= 1)

    def _fit_memory(self) -> None:
        """C_2, with one restored layer on devices that recompute."""
        for device in self.inst.devices:
            restored = self._restored(device) if device.kept else 0
            for row in device.kept:
                alive = sum(
                    (row[r][o][c] + device.static[r]) * option[s]
                    for r, options in enumerate(self.layers)
                    for o, option in enumerate(options)
                    for c, s in enumerate(device.stages)
                )
                self.model.add(alive + restored <= device.capacity)

    def _restored(self, device: DeviceInstance) -> Any:
        """The most that a device's backward brings back, if one of its layers recomputes."""
        largest = self.model.new_int_var(0, max(size for sizes in device.restored for size in sizes), "")
        for r, sizes in enumerate(device.restored):
            for o, size in enumerate(sizes):
                if size > 0:
                    some = self.model.new_bool_var("")
                    here = sum(self.layers[r][o][s] for s in device.stages)
                    self.model.add(here <= self.inst.counts[r] * some)
                    self.model.add(largest >= size * some)
        return largest

    def _minimise_step_time(self) -> None:
        """The step time (m - 1/C) max T + sum T / C, which is B_G and a constant; here times C."""
        times = [
            sum(
                time * self.layers[r][o][s]
                for s in device.stages
                for r, options in enumerate(self.inst.times)
                for o, time in enumerate(options)
            )
            for device in self.inst.devices
        ]
        slowest = self.model.new_int_var(0, self.inst.longest, "")
        for time in times:
            self.model.add(slowest >= time)
        self.objective = self.inst.weight * slowest + sum(times)
        self.model.minimize(self.objective)

    def start_from(self, start: Decomposition) -> None:
        """Give the solver an assignment, and a bound."""
        self.model.add(self.objective >= start.bound)
        if start.layers is not None:
            for variables, values in zip(self.layers, start.layers, strict=True):
                for row, numbers in zip(variables, values, strict=True):
                    for variable, number in zip(row, numbers, strict=True):
                        self.model.add_hint(variable, number)
