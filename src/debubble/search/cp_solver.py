"""CP-SAT under an effort: one worker, its deterministic time limited and counted, so that it answers alike anywhere."""

from __future__ import annotations

import math
from typing import Any

from debubble.search.effort import DETERMINISTIC, Effort


def solver_of(effort: Effort, *, seed: int = 0) -> Any:
    """A solver that does what is left of an effort."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    if effort.left < math.inf:
        solver.parameters.max_deterministic_time = effort.left / DETERMINISTIC
    if effort.brake.left < math.inf:
        solver.parameters.max_time_in_seconds = max(0.01, effort.brake.left)
    return solver


def status_of(solver: Any, model: Any, effort: Effort, callback: Any = None) -> str:
    """Solve a model and count what that took: the name of the solver's status."""
    status: str = solver.status_name(solver.solve(model, callback))
    effort.spend(solver.response_proto.deterministic_time * DETERMINISTIC)
    if status in ("FEASIBLE", "UNKNOWN") and effort.left > 0:
        effort.brake.check()
    return status
