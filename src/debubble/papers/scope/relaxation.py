"""SCOPE's program with fractions of layers: a bound on it that takes no search, and the loads that it gives devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from debubble.papers.scope.instance import RESOLUTION, Instance
from debubble.search.effort import LINEAR_PROGRAM_PRICE, Effort

VARIABLES_PER_LINEAR = 100
"""Variables of a linear program that takes LINEAR_PROGRAM_PRICE."""
ROUNDING = 1e-6
"""Share of the optimum by which the solver's arithmetic may be wrong."""


@dataclass(frozen=True)
class Relaxation:
    """An optimum of the linear program.

    Attributes:
        bound: No assignment has a smaller objective, in time units.
        loads: Per device and run, the layers that it holds, with fractions.
    """

    bound: int
    loads: tuple[tuple[float, ...], ...]


def relaxed(inst: Instance, effort: Effort, spans: Sequence[range] | None = None) -> Relaxation | None:
    """The program without integrality, without the order of runs and without what recomputation brings back at a time.

    Args:
        inst: The program.
        effort: Counter of the work.
        spans: Per run, the stages that may hold its layers; None: all that may in some assignment.

    Returns:
        None if not even fractions of layers fit.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")

    def row(low: float, high: float, entries: Iterable[tuple[Any, float]]) -> None:
        constraint = solver.Constraint(low, high)
        for variable, entry in entries:
            constraint.SetCoefficient(variable, entry)

    allowed = inst.windows if spans is None else spans
    layers = [
        {
            (c, r, o): solver.NumVar(0, inst.counts[r], "")
            for c, stage in enumerate(device.stages)
            for r, span in enumerate(allowed)
            if stage in span
            for o in range(len(inst.times[r]))
        }
        for device in inst.devices
    ]
    effort.spend(LINEAR_PROGRAM_PRICE * sum(map(len, layers)) / VARIABLES_PER_LINEAR)
    for run, count in enumerate(inst.counts):
        row(count, count, ((v, 1) for here in layers for (_, r, _), v in here.items() if r == run))
    slowest = solver.NumVar(0, math.inf, "")
    objective = solver.Objective()
    objective.SetMinimization()
    objective.SetCoefficient(slowest, inst.weight)
    for device, here in zip(inst.devices, layers, strict=True):
        for kept in device.kept:
            sizes = ((v, (kept[r][o][c] + device.static[r]) / RESOLUTION) for (c, r, o), v in here.items())
            row(-math.inf, device.capacity / RESOLUTION, sizes)
        for chunk in range(inst.chunks):
            row(1, math.inf, ((v, 1) for (c, _, _), v in here.items() if c == chunk))
        times = {v: inst.times[r][o] / RESOLUTION for (_, r, o), v in here.items()}
        row(0, math.inf, [(slowest, 1), *((v, -time) for v, time in times.items())])
        for v, time in times.items():
            objective.SetCoefficient(v, time)
    if solver.Solve() != solver.OPTIMAL:
        return None
    runs = range(len(inst.counts))
    return Relaxation(
        math.floor(objective.Value() * RESOLUTION * (1 - ROUNDING)),
        tuple(
            tuple(sum(v.solution_value() for (_, r, _), v in here.items() if r == run) for run in runs)
            for here in layers
        ),
    )
