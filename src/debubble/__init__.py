"""debubble plans, simulates and runs pipeline-parallel LLM training under a memory limit.

Everything here is loaded when it is first used, so that `import debubble` is quick and needs neither torch nor a
solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from debubble.costs import Cluster, hardware
    from debubble.ir import (
        DeadlockError,
        DebubbleError,
        InfeasibleError,
        InputError,
        Op,
        OutOfMemoryError,
        Placement,
        Plan,
        PluginError,
        Program,
        Schedule,
        ScheduleError,
        SolverError,
        StageCosts,
        Trace,
        lower,
    )
    from debubble.models import Model, models
    from debubble.planners import Problem, planners
    from debubble.planners.plan_model import plan
    from debubble.runtime import Pipeline
    from debubble.schedules import schedules
    from debubble.simulator import Timeline, simulate
    from debubble.views.notebook import Report, inline_html, show

__version__ = "0.1.0"

_HOME = {
    "Cluster": "costs",
    "DeadlockError": "ir",
    "DebubbleError": "ir",
    "InfeasibleError": "ir",
    "InputError": "ir",
    "Model": "models",
    "Op": "ir",
    "OutOfMemoryError": "ir",
    "Pipeline": "runtime",
    "Placement": "ir",
    "Plan": "ir",
    "PluginError": "ir",
    "Problem": "planners",
    "Program": "ir",
    "Report": "views.notebook",
    "Schedule": "ir",
    "ScheduleError": "ir",
    "SolverError": "ir",
    "StageCosts": "ir",
    "Timeline": "simulator",
    "Trace": "ir",
    "hardware": "costs",
    "inline_html": "views.notebook",
    "lower": "ir",
    "models": "models",
    "plan": "planners.plan_model",
    "planners": "planners",
    "schedules": "schedules",
    "show": "views.notebook",
    "simulate": "simulator",
}

__all__ = [
    "Cluster",
    "DeadlockError",
    "DebubbleError",
    "InfeasibleError",
    "InputError",
    "Model",
    "Op",
    "OutOfMemoryError",
    "Pipeline",
    "Placement",
    "Plan",
    "PluginError",
    "Problem",
    "Program",
    "Report",
    "Schedule",
    "ScheduleError",
    "SolverError",
    "StageCosts",
    "Timeline",
    "Trace",
    "__version__",
    "hardware",
    "inline_html",
    "lower",
    "models",
    "plan",
    "planners",
    "schedules",
    "show",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'debubble' has no attribute '{name}'")
    return getattr(importlib.import_module(f"debubble.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
