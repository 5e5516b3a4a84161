"""debubble plans, simulates and runs pipeline-parallel LLM training under a memory limit.

Everything here is loaded when it is first used, so that `import debubble` is quick and needs neither torch nor a
solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from debubble.costs import Cluster, hardware
    from debubble.exports import exports
    from debubble.ir import (
        DeadlockError,
        DebubbleError,
        InfeasibleError,
        InputError,
        Op,
        OutOfMemoryError,
        Placement,
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
    from debubble.planners.analysis.explanation import explain
    from debubble.planners.fits import fits
    from debubble.planners.plan_model import plan
    from debubble.planners.plan_step import seconds_per_step as seconds_per_step
    from debubble.planners.sweep import Sweep, sweep
    from debubble.plans import Plan
    from debubble.profiler.modules import profile
    from debubble.runtime import Pipeline
    from debubble.schedules import schedules
    from debubble.simulator import Timeline, simulate
    from debubble.views.notebook import Report, inline_html, show

__version__ = "0.2.0"

_NAMES_IN = {
    "costs": ("Cluster", "hardware"),
    "exports": ("exports",),
    "ir": (
        "DeadlockError", "DebubbleError", "InfeasibleError", "InputError", "Op", "OutOfMemoryError", "Placement",
        "PluginError", "Program", "Schedule", "ScheduleError", "SolverError", "StageCosts", "Trace", "lower",
    ),
    "models": ("Model", "models"),
    "planners": ("Problem", "planners"),
    "planners.analysis.explanation": ("explain",),
    "planners.fits": ("fits",),
    "planners.plan_model": ("plan",),
    "planners.plan_step": ("seconds_per_step",),
    "planners.sweep": ("Sweep", "sweep"),
    "plans": ("Plan",),
    "profiler.modules": ("profile",),
    "runtime": ("Pipeline",),
    "schedules": ("schedules",),
    "simulator": ("Timeline", "simulate"),
    "views.notebook": ("Report", "inline_html", "show"),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES_IN.items() for name in names}

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
    "Sweep",
    "Timeline",
    "Trace",
    "__version__",
    "explain",
    "exports",
    "fits",
    "hardware",
    "inline_html",
    "lower",
    "models",
    "plan",
    "planners",
    "profile",
    "schedules",
    "show",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'debubble' has no attribute '{name}'")
    return getattr(importlib.import_module(f"debubble.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
