"""The intermediate representation: schedules, costs, programs and traces.  Imports no other package of debubble."""

from debubble.errors import (
    CutOffError,
    DeadlockError,
    DebubbleError,
    ExportError,
    InfeasibleError,
    InputError,
    OutOfMemoryError,
    PluginError,
    ScheduleError,
    SolverError,
    UnsupportedError,
)
from debubble.ir.lowering.lower import lower, lower_forwards
from debubble.ir.ops import Kind, Lane, Op
from debubble.ir.placement import Placement
from debubble.ir.plan_entries import (
    DEFAULT_EFFORT,
    CandidateSummary,
    Origin,
    PlannedUnit,
    Robustness,
    RunOptions,
    WhatIf,
)
from debubble.ir.program import Instruction, Moment, Program, Queue
from debubble.ir.schedule import Schedule
from debubble.ir.schedule_checks import check
from debubble.ir.stage_costs import Number, StageCosts
from debubble.ir.trace import MemorySample, Trace, TraceEvent, TraceStep

__all__ = [
    "DEFAULT_EFFORT",
    "CandidateSummary",
    "CutOffError",
    "DeadlockError",
    "DebubbleError",
    "ExportError",
    "InfeasibleError",
    "InputError",
    "Instruction",
    "Kind",
    "Lane",
    "MemorySample",
    "Moment",
    "Number",
    "Op",
    "Origin",
    "OutOfMemoryError",
    "Placement",
    "PlannedUnit",
    "PluginError",
    "Program",
    "Queue",
    "Robustness",
    "RunOptions",
    "Schedule",
    "ScheduleError",
    "SolverError",
    "StageCosts",
    "Trace",
    "TraceEvent",
    "TraceStep",
    "UnsupportedError",
    "WhatIf",
    "check",
    "lower",
    "lower_forwards",
]
