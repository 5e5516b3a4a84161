"""Linear relaxation of SCOPE's integer program: a lower bound, and fractional loads of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from debubble.papers.scope.instance import RESOLUTION, Instance
from debubble.search.effort import LINEAR_PROGRAM_PRICE, Effort

LINEAR_VARIABLES = 100
"""Number of variables of a linear program that costs an effort of LINEAR_PROGRAM_PRICE."""
SOLVER_TOLERANCE = 1e-6
"""Relative tolerance by which the solver's optimum is lowered to give a valid bound."""


@dataclass(frozen=True)
class Relaxation:
    """An optimum of the linear program.

    Attributes:
        bound: Lower bound of the objective, in time units.
        loads: `loads[device][t]`: fractional number of layers of type t.
    """

    bound: int
    loads: tuple[tuple[float, ...], ...]


def relaxed(inst: Instance, effort: Effort, spans: Sequence[range] | None = None) -> Relaxation | None:
    """Solve the program without integrality, without C_3 and without the memory that recomputation restores.

    Args:
        inst: The program.
        effort: The effort to spend from.
        spans: Per type t, the stages that may hold its layers; by default all that any assignment could use.

    Returns:
        The optimum; None if the relaxation is infeasible.
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
            (c, t, r): solver.NumVar(0, inst.counts[t], "")
            for c, stage in enumerate(device.stages)
            for t, span in enumerate(allowed)
            if stage in span
            for r in range(len(inst.times[t]))
        }
        for device in inst.devices
    ]
    effort.spend(LINEAR_PROGRAM_PRICE * sum(map(len, layers)) / LINEAR_VARIABLES)
    for layer_type, count in enumerate(inst.counts):
        row(count, count, ((v, 1) for here in layers for (_, t, _), v in here.items() if t == layer_type))
    slowest = solver.NumVar(0, math.inf, "")
    objective = solver.Objective()
    objective.SetMinimization()
    objective.SetCoefficient(slowest, inst.weight)
    for device, here in zip(inst.devices, layers, strict=True):
        for alive_bytes in device.alive_bytes:
            sizes = ((v, (alive_bytes[t][r][c] + device.static[t]) / RESOLUTION) for (c, t, r), v in here.items())
            row(-math.inf, device.capacity / RESOLUTION, sizes)
        for chunk in range(inst.chunks):
            row(1, math.inf, ((v, 1) for (c, _, _), v in here.items() if c == chunk))
        times = {v: inst.times[t][r] / RESOLUTION for (_, t, r), v in here.items()}
        row(0, math.inf, [(slowest, 1), *((v, -time) for v, time in times.items())])
        for v, time in times.items():
            objective.SetCoefficient(v, time)
    if solver.Solve() != solver.OPTIMAL:
        return None
    types = range(len(inst.counts))
    return Relaxation(
        math.floor(objective.Value() * RESOLUTION * (1 - SOLVER_TOLERANCE)),
        tuple(
            tuple(sum(v.solution_value() for (_, t, _), v in here.items() if t == layer_type) for layer_type in types)
            for here in layers
        ),
    )
