"""The master of SCOPE's decomposition: how many layers of each run every stage holds, without strategies.

A device's time is a variable here, bounded from below by what the device programs have taught so far; so the
master's optimum bounds the whole program's.  Order is kept as in the whole program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from debubble.papers.scope.program.instance import Instance
from debubble.papers.scope.program.subproblem import Open, TimeBound
from debubble.search.effort import Effort, solver_of, status_of

COARSER = 2**8
"""Time units per unit of the master; bounds are rounded down."""


@dataclass(frozen=True)
class LayerCounts:
    """An answer of the master."""

    loads: tuple[tuple[int, ...], ...]
    """Layers per device and run."""
    opened: tuple[Open, ...]
    """Per device and chunk, the runs whose layers it may hold without breaking the order, whatever the others do."""
    slowest: int
    """The slowest device's time, as far as known."""
    bound: int
    """Bound on the whole program's objective, by all cuts so far."""


class Master:
    """CP-SAT's model of the layer counts; it grows by cuts and starts every time from its last answer."""

    def __init__(self, inst: Instance) -> None:
        from ortools.sat.python import cp_model

        self._inst = inst
        self._model: Any = cp_model.CpModel()
        self._layers = [
            [self._model.new_int_var(0, count if s in window else 0, "") for s in range(inst.stages)]
            for count, window in zip(inst.counts, inst.windows, strict=True)
        ]
        self._place_and_fill()
        self._keep_the_order()
        self._loads = [[self._total(r, device.stages) for r in range(len(inst.counts))] for device in inst.devices]
        most = inst.most // COARSER
        self._times = [self._model.new_int_var(0, most, "") for _ in inst.devices]
        self._slowest = self._model.new_int_var(0, most, "")
        for time in self._times:
            self._model.add(self._slowest >= time)
        self._model.minimize(inst.weight * self._slowest + sum(self._times))
        self._known: set[tuple[int, TimeBound, tuple[int, ...]]] = set()
        self._conditions: dict[tuple[int, int, int, str], Any] = {}

    def _total(self, run: int, stages: Sequence[int]) -> Any:
        load = self._model.new_int_var(0, self._inst.counts[run], "")
        self._model.add(load == sum(self._layers[run][s] for s in stages))
        return load

    def _place_and_fill(self) -> None:
        """C_1; and a stage holds at least one layer."""
        for count, row in zip(self._inst.counts, self._layers, strict=True):
            self._model.add(sum(row) == count)
        for s in range(self._inst.stages):
            self._model.add(sum(row[s] for row in self._layers) >= 1)

    def _keep_the_order(self) -> None:
        """C_3.  `_done[r][s]`: no layer of the runs up to r stands behind stage s, none of the next before it."""
        stages = range(self._inst.stages)
        self._done = [[self._model.new_bool_var("") for _ in stages] for _ in self._layers[1:]]
        for r, done in enumerate(self._done):
            for s in stages:
                self._model.add(self._layers[r + 1][s] == 0).only_enforce_if(~done[s])
                if s > 0:
                    self._model.add_implication(done[s - 1], done[s])
                    self._model.add(self._layers[r][s] == 0).only_enforce_if(done[s - 1])
                if r > 0:
                    self._model.add_implication(done[s], self._done[r - 1][s])

    def learn(self, device: int, opened: Open, cut: TimeBound) -> None:
        """A cut on a device's time, which holds if its chunks may hold no other runs than `opened`."""
        closed = self._closed(device, opened)
        key = (device, cut, tuple(literal.index for literal in closed))
        if key in self._known:
            return
        self._known.add(key)
        floor = cut.constant // COARSER + sum(slope // COARSER * self._loads[device][r] for r, slope in cut.slopes)
        constraint = self._model.add(self._times[device] >= floor)
        if closed:
            constraint.only_enforce_if(closed)

    def learn_time(self, device: int, opened: Open, load: Sequence[int], time: int | None, *, exactly: bool) -> None:
        """Add a cut: with no other runs open and at least (or exactly) this load, the device takes that long or longer.

        `load` is layers per run; a time of None means that the load is impossible.
        """
        conditions = self._closed(device, opened)
        for run, number in enumerate(load):
            if number > 0:
                conditions.append(self._condition(device, run, number, ">="))
            if exactly:
                conditions.append(self._condition(device, run, number, "<="))
        if time is None:
            self._model.add_bool_or([~condition for condition in conditions])
        else:
            self._model.add(self._times[device] >= time // COARSER).only_enforce_if(conditions)

    def _condition(self, device: int, run: int, number: int, sense: Literal[">=", "<="]) -> Any:
        """A literal that is true if the device holds at least or at most that many layers of the run."""
        key = (device, run, number, sense)
        if key not in self._conditions:
            load = self._loads[device][run]
            self._conditions[key] = self._model.new_bool_var("")
            otherwise = load < number if sense == ">=" else load > number
            self._model.add(otherwise).only_enforce_if(~self._conditions[key])
        return self._conditions[key]

    def solve(self, effort: Effort, *, gap: float, seed: int) -> LayerCounts | None:
        """The best counts within a relative gap, or until the effort is spent; None if there are none."""
        solver = solver_of(effort, seed=seed)
        solver.parameters.relative_gap_limit = gap
        if status_of(solver, self._model, effort) not in ("OPTIMAL", "FEASIBLE"):
            return None
        self._start_from(solver)
        return LayerCounts(
            loads=tuple(tuple(solver.value(number) for number in row) for row in self._loads),
            opened=tuple(self._opened(solver, device) for device in range(len(self._inst.devices))),
            slowest=(solver.value(self._slowest) + 1) * COARSER,
            bound=int(solver.best_objective_bound - 1e-6) * COARSER,
        )

    def _start_from(self, solver: Any) -> None:
        self._model.clear_hints()
        for index in range(len(self._model.proto.variables)):
            variable = self._model.get_int_var_from_proto_index(index)
            self._model.add_hint(variable, solver.value(variable))

    def _opened(self, solver: Any, device: int) -> Open:
        """The runs that have begun at a device's stages and are not over."""
        return tuple(
            tuple(r for r in runs if not any(solver.boolean_value(literal) for literal in self._closing(r, s)))
            for s, runs in zip(self._inst.devices[device].stages, widest(self._inst, device), strict=True)
        )

    def _closing(self, run: int, stage: int) -> Iterator[Any]:
        """Literals each of which keeps a run from a stage: it has not begun, or it is over."""
        if run > 0:
            yield ~self._done[run - 1][stage]
        if stage > 0 and run < len(self._done):
            yield self._done[run][stage - 1]

    def _closed(self, device: int, opened: Open) -> list[Any]:
        """Literals that say that no other runs are open: those before are over, those behind have not begun."""
        return [
            self._done[r][s - 1] if r < runs[0] else ~self._done[r - 1][s]
            for s, runs, possible in zip(
                self._inst.devices[device].stages, opened, widest(self._inst, device), strict=True
            )
            for r in possible
            if r not in runs
        ]


def widest(inst: Instance, device: int) -> Open:
    """The runs that each chunk of a device may hold in some answer."""
    stages = inst.devices[device].stages
    return tuple(tuple(r for r, window in enumerate(inst.windows) if s in window) for s in stages)


def merged(pieces: Sequence[Mapping[tuple[int, int, int], int]], inst: Instance) -> list[list[list[int]]]:
    """`layers[run][option][stage]` from every device's {(chunk, run, option): layers}."""
    layers = [[[0] * inst.stages for _ in times] for times in inst.times]
    for device, piece in zip(inst.devices, pieces, strict=True):
        for (chunk, run, option), number in piece.items():
            layers[run][option][device.stages[chunk]] += number
    return layers
