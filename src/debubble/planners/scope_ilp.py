"""Phases 2 and 3 of SCOPE's planner: the integer programme.

The poster leaves F, G, C_1..C_3 and the meaning of b open; this is our reading, complete and consistent.

    l[t, r, c, x]   layers of type t with strategy r in chunk c of stage x; position (c, x) is stage s = c P + x
    b[t, c, x]      1 once all layers of types up to t are placed at or before that position
    T_x             time of device x per micro-batch: sum over its chunks of forward, backward and recomputation
    B_P = (sum_x T_x - max_x T_x) / C,   B_I = m (max T - mean T),   B_R = m mean(recompute)

so that B_G = B_R + B_I + B_P differs from the step time (m - 1/C) max T + sum T / C by a constant only.  With several
chunks max T is `pooled`, max_x sum_c T_{c,x}, as if chunks could make up for each other, or `per chunk`,
sum_c max_x T_{c,x}, as if they could not; the truth lies between, and simulation chooses.

    C_1   every layer is placed once
    C_2   on every device: M_S + what is alive <= D_M.  What is alive is not one count per chunk, as in SAPP, whose
          plans break the limit when chunks hold different numbers of layers: there is one row for each combination of
          counts that the schedule's order really reaches.
    C_3   order: layers of type t may only stand where all of the types before it have been placed

CP-SAT of OR-Tools solves it; the poster used Gurobi.  Its numbers are integers: times are rounded to about a millionth
of the slowest layer, bytes are rounded up to about a millionth of the limit, so that no answer breaks it.  Both units
are powers of two, so that small integers stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from debubble.ir import InfeasibleError, Kind, Schedule
from debubble.planners.scope_runs import Run


@dataclass(frozen=True)
class Answer:
    """`layers[run][option][stage]`, the formula's step time, and the solver's bound on it."""

    layers: list[list[list[int]]]
    formula: float
    bound: float


def alive(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Per device, every maximal combination of micro-batches alive per chunk that its order reaches."""
    result = []
    for device, order in enumerate(schedule.orders):
        chunk = {stage: k for k, stage in enumerate(schedule.placement.stages_of[device])}
        held = [0] * len(chunk)
        reached: set[tuple[int, ...]] = set()
        for op in order:
            if op.kind is Kind.F:
                held[chunk[op.stage]] += 1
                reached.add(tuple(held))
            elif op.kind in (Kind.B, Kind.W):
                held[chunk[op.stage]] -= 1
        result.append(
            sorted(
                a
                for a in reached
                if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in reached)
            )
        )
    return result


def solve(
    found: Sequence[Run],
    schedule: Schedule,
    *,
    limits: Sequence[float],
    static: float,
    seconds: float,
    seed: int,
    per_chunk: bool = False,
) -> Answer:
    """The best assignment within `seconds`, for the pooled or the per-chunk reading of max T.

    Raises InfeasibleError if there is none, or none was found in time.
    """
    from ortools.sat.python import cp_model

    programme = _Programme(cp_model.CpModel(), found, schedule)
    programme.fit_memory(limits, static)
    programme.minimise(per_chunk=per_chunk)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 2
    status = solver.solve(programme.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InfeasibleError(
            "No assignment of layers to stages fits the memory limit, even with every recomputation strategy."
            if status == cp_model.INFEASIBLE
            else f"No assignment of layers to stages was found in {seconds:.1f} s; raise --effort."
        )
    layers = [[[solver.value(v) for v in row] for row in option] for option in programme.layers]
    unit = programme.time_unit / programme.chunks
    return Answer(layers, solver.objective_value * unit, solver.best_objective_bound * unit)


RESOLUTION = 2**20


class _Programme:
    """The model, one method per family of constraints."""

    def __init__(self, model: Any, found: Sequence[Run], schedule: Schedule) -> None:
        self.model, self.found, self.schedule = model, found, schedule
        self.stages, self.chunks = schedule.stages, schedule.placement.chunks
        self.time_unit = _unit(max(option.time for run in found for option in run.options))
        self.layers = [
            [[model.new_int_var(0, run.count, "") for _ in range(self.stages)] for _ in run.options] for run in found
        ]
        self._place_every_layer()
        self._keep_the_order()
        self._fill_every_stage()

    def _stage(self, run: int, stage: int) -> Any:
        return sum(option[stage] for option in self.layers[run])

    def _place_every_layer(self) -> None:
        """C_1."""
        for r, run in enumerate(self.found):
            self.model.add(sum(v for option in self.layers[r] for v in option) == run.count)

    def _keep_the_order(self) -> None:
        """C_3, with b monotone along the positions; a run may share a stage with the end of the one before it."""
        for r in range(len(self.found) - 1):
            count, following = self.found[r].count, self.found[r + 1].count
            placed: Any = 0
            before: Any = None
            for s in range(self.stages):
                placed = placed + self._stage(r, s)
                done = self.model.new_bool_var("")
                self.model.add(placed >= count * done)
                self.model.add(self._stage(r + 1, s) <= following * done)
                if before is not None:
                    self.model.add_implication(before, done)
                before = done

    def _fill_every_stage(self) -> None:
        """A stage holds at least one layer."""
        for s in range(self.stages):
            self.model.add(sum(self._stage(r, s) for r in range(len(self.found))) >= 1)

    def fit_memory(self, limits: Sequence[float], static: float) -> None:
        """C_2, with one restored unit on devices that recompute."""
        everywhere = max((run.workspace for run in self.found if run.count > 1), default=0.0)
        for x, (stages, counts) in enumerate(zip(self.schedule.placement.stages_of, alive(self.schedule), strict=True)):
            if limits[x] == float("inf"):
                continue
            unit = _unit(limits[x])
            fixed = sum(
                _up((run.static + max(0.0, run.workspace - everywhere) * (run.count == 1)) / unit) * self._stage(r, s)
                for r, run in enumerate(self.found)
                for s in stages
            )
            room = math.floor(limits[x] / unit) - _up((static + everywhere) / unit)
            restored = self._restored(stages, unit)
            for combination in counts:
                kept = sum(
                    _up(number * option.activation / unit) * self.layers[r][o][s]
                    for number, s in zip(combination, stages, strict=True)
                    for r, run in enumerate(self.found)
                    for o, option in enumerate(run.options)
                )
                self.model.add(fixed + kept + restored <= room)

    def _restored(self, stages: Sequence[int], unit: float) -> Any:
        """The largest unit that a device's backward brings back, if one of its layers recomputes."""
        sizes = {_up(option.restored / unit) for run in self.found for option in run.options if option.restored > 0}
        if not sizes:
            return 0
        largest = self.model.new_int_var(0, max(sizes), "")
        for r, run in enumerate(self.found):
            for o, option in enumerate(run.options):
                if option.restored <= 0:
                    continue
                some = self.model.new_bool_var("")
                self.model.add(sum(self.layers[r][o][s] for s in stages) <= run.count * some)
                self.model.add(largest >= _up(option.restored / unit) * some)
        return largest

    def minimise(self, *, per_chunk: bool) -> None:
        """The step time (m - 1/C) max T + sum T / C, which is B_G and a constant; here times C."""
        times = [
            sum(
                round(option.time / self.time_unit) * self.layers[r][o][s]
                for r, run in enumerate(self.found)
                for o, option in enumerate(run.options)
            )
            for s in range(self.stages)
        ]
        held = self.schedule.placement.stages_of
        pooled = [sum(times[s] for s in stages) for stages in held]
        if per_chunk:
            slowest = sum(self._largest([times[stages[c]] for stages in held]) for c in range(self.chunks))
        else:
            slowest = self._largest(pooled)
        self.model.minimize((self.schedule.micro_batches * self.chunks - 1) * slowest + sum(pooled))

    def _largest(self, times: Sequence[Any]) -> Any:
        most = sum(run.count * max(option.time for option in run.options) for run in self.found)
        largest = self.model.new_int_var(0, _up(most / self.time_unit), "")
        for time in times:
            self.model.add(largest >= time)
        return largest


def _unit(largest: float) -> float:
    """The power of two of which `largest` has about RESOLUTION."""
    return 2.0 ** math.ceil(math.log2(largest)) / RESOLUTION


def _up(number: float) -> int:
    return math.ceil(number)
