"""The base of a plan and of a planner's answer, which is lowered and simulated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from debubble.ir import Schedule, StageCosts
from debubble.simulator import Timeline, simulate


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulated:
    """A schedule with its stages' costs, which is lowered and simulated once.

    Attributes:
        schedule: The order of operations.
        costs: What they take.
        timeline: The simulated step, if that was worked out already; dropped if it is of other operations or costs.
    """

    schedule: Schedule
    costs: StageCosts
    timeline: Timeline | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        program = None if self.timeline is None else self.timeline.program
        if program is not None and (program.schedule is not self.schedule or program.costs is not self.costs):
            object.__setattr__(self, "timeline", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "timeline": None}

    def simulate(self) -> Timeline:
        """The predicted timeline, worked out once; raises OutOfMemoryError if the step does not fit."""
        timeline = self.timeline
        if timeline is None:
            timeline = simulate(self.schedule, self.costs)
            object.__setattr__(self, "timeline", timeline)
        return timeline
