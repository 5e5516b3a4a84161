"""SCOPE's program with fractions of layers: a bound on it that takes no search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from debubble.planners.scope.ends import Ends, ends_of_long_runs
from debubble.planners.scope.instance import RESOLUTION, Instance
from debubble.planners.scope.loads import dealable
from debubble.planners.scope.subproblem import Open
from debubble.search.effort import LINEAR, Effort

LAYERS_PER_LINEAR = 100
"""Variables of a linear program that takes LINEAR."""
ROUNDING = 1e-6
"""Share of the optimum by which the solver's arithmetic may be wrong."""


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the relaxation, in time units: a bound on weight x (max T) + sum T, and its part max T."""

    bound: int
    slowest: tuple[float, ...]
    """One time; by the per-chunk reading one of each chunk, of which max T is the sum."""


def relaxed(
    inst: Instance,
    effort: Effort,
    *,
    least: float = 0.0,
    opened: Sequence[Open] | None = None,
    per_chunk: bool = False,
) -> Relaxation | None:
    """Solve the program without integrality and without the order of runs: a relaxation of it.

    Args:
        inst: The instance; every row of memory counts, but not what recomputation brings back at a time.
        effort: Counter of the work.
        least: Time below which no device can be the slowest, in time units.
        opened: Per device and chunk, the runs that it may hold; None: those of some order.
        per_chunk: Chunks cannot make up for each other.

    Returns:
        None if not even fractions of layers fit.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    if opened is None:
        runs = [tuple(r for r, window in enumerate(inst.windows) if s in window) for s in range(inst.stages)]
        opened = [tuple(runs[s] for s in device.stages) for device in inst.devices]
    layers = [
        {(c, r, o): solver.NumVar(0, inst.counts[r], "") for c, some in enumerate(chunks) for r in some
         for o in range(len(inst.times[r]))}
        for chunks in opened
    ]  # fmt: skip
    effort.spend(LINEAR * sum(map(len, layers)) / LAYERS_PER_LINEAR)

    def row(low: float, high: float, entries: Iterable[tuple[Any, float]]) -> None:
        constraint = solver.Constraint(low, high)
        for variable, entry in entries:
            constraint.SetCoefficient(variable, entry)

    for run, count in enumerate(inst.counts):
        row(count, count, ((v, 1) for held in layers for (_, r, _), v in held.items() if r == run))
    slowest = [solver.NumVar(0, math.inf, "") for _ in range(inst.chunks if per_chunk else 1)]
    row(least / RESOLUTION, math.inf, ((time, 1) for time in slowest))
    for device, held in zip(inst.devices, layers, strict=True):
        for kept in device.kept:
            sizes = ((v, (kept[r][o][c] + device.static[r]) / RESOLUTION) for (c, r, o), v in held.items())
            row(-math.inf, device.room / RESOLUTION, sizes)
        for chunk in range(inst.chunks):
            row(1, math.inf, ((v, 1) for (c, _, _), v in held.items() if c == chunk))
        for at, time in enumerate(slowest):
            times = [(v, -inst.times[r][o] / RESOLUTION) for (c, r, o), v in held.items() if c == at or not per_chunk]
            row(0, math.inf, [(time, 1), *times])
    objective = solver.Objective()
    for time in slowest:
        objective.SetCoefficient(time, inst.weight)
    for held in layers:
        for (_, r, o), v in held.items():
            objective.SetCoefficient(v, inst.times[r][o] / RESOLUTION)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    bound = objective.Value() * RESOLUTION * (1 - ROUNDING)
    return Relaxation(math.floor(bound), tuple(time.solution_value() * RESOLUTION for time in slowest))


def relaxations(inst: Instance, effort: Effort) -> list[tuple[Relaxation, Ends]]:
    """The relaxations of the per-chunk reading for every choice of ends of long runs, the best first."""
    if not dealable(inst):
        return []
    each = ((relaxed(inst, effort, opened=ends.opened(inst), per_chunk=True), ends) for ends in ends_of_long_runs(inst))
    found = [(relaxation, ends) for relaxation, ends in each if relaxation is not None]
    return sorted(found, key=lambda pair: pair[0].bound)
