"""SCOPE's program with fractions of layers: a bound on it that takes no search."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from debubble.planners.scope.instance import RESOLUTION, Instance
from debubble.search.effort import LINEAR, Effort

LAYERS_PER_LINEAR = 300
"""Variables of a linear program that takes LINEAR."""
ROUNDING = 1e-6
"""Share of the optimum by which the solver's arithmetic may be wrong."""


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the relaxation, in time units: a bound on weight x (max T) + sum T, and its part max T."""

    bound: int
    slowest: float


def relaxed(inst: Instance, effort: Effort, *, least: float = 0.0) -> Relaxation | None:
    """Solve the program without integrality and without the order of runs: a relaxation of it.

    Args:
        inst: The instance; every row of memory counts, but not what recomputation brings back at a time.
        effort: Counter of the work.
        least: Time below which no device can be the slowest, in time units.

    Returns:
        None if not even fractions of layers fit.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    layers = {
        (r, o, s): solver.NumVar(0, count, "")
        for r, (count, window) in enumerate(zip(inst.counts, inst.windows, strict=True))
        for o in range(len(inst.times[r]))
        for s in window
    }
    effort.spend(LINEAR * len(layers) / LAYERS_PER_LINEAR)
    here = defaultdict(list)
    for (r, o, s), number in layers.items():
        here[s].append((r, o, number))
    for run, count in enumerate(inst.counts):
        solver.Add(sum(number for (r, _, _), number in layers.items() if r == run) == count)
    for s in range(inst.stages):
        solver.Add(sum(number for _, _, number in here[s]) >= 1)
    for device in inst.devices:
        for row in device.kept:
            held = sum(
                (row[r][o][c] + device.static[r]) / RESOLUTION * number
                for c, s in enumerate(device.stages)
                for r, o, number in here[s]
            )
            solver.Add(held <= device.room / RESOLUTION)
    times = [sum(inst.times[r][o] / RESOLUTION * number for r, o, number in here[s]) for s in range(inst.stages)]
    slowest = solver.NumVar(least / RESOLUTION, solver.infinity(), "")
    for device in inst.devices:
        solver.Add(slowest >= sum(times[s] for s in device.stages))
    solver.Minimize(inst.weight * slowest + sum(times))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    bound = solver.Objective().Value() * RESOLUTION * (1 - ROUNDING)
    return Relaxation(math.floor(bound), slowest.solution_value() * RESOLUTION)
