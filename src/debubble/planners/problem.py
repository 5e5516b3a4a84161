"""A Problem: what every planner is given, and the Solution that it answers with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from debubble.costs import StepTail
from debubble.costs.units import Partition, Units
from debubble.ir import CandidateSummary, DebubbleError, InfeasibleError, InputError, Number, Schedule, StageCosts
from debubble.search.effort import Effort
from debubble.simulator import Price, Timeline

if TYPE_CHECKING:
    from debubble.search.problem import Objective


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Plan `micro_batches` over `devices`: either fixed stages (`costs`) or model units (`units`) to partition."""

    devices: int
    micro_batches: int
    costs: StageCosts | None = None
    units: Units | None = None
    chunks: int | None = None
    """Stages per device; None: one for fixed costs, the planner's choice for units."""
    effort: float = 10.0
    """Work that a planner may do, in seconds of the reference machine (see `solver.effort`)."""
    deadline: float | None = None
    """Seconds on the clock after which a planner stops with what it has; None: ten times the effort and a minute."""
    cache: bool = False
    """Whether searches start from schedules that this machine has found before, and keep theirs."""
    seed: int = 0
    objective: Objective = "makespan"
    """What the pipeline's part of a step takes: with post-validation, the longest span of a device."""
    tail: StepTail | None = None
    """What follows the pipeline, if these are a model's units; None: nothing."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"A pipeline needs at least one device, not {self.devices}.")
        if self.micro_batches < 1:
            raise InputError(f"A step needs at least one micro-batch, not {self.micro_batches}.")
        if (self.costs is None) == (self.units is None):
            raise InputError("A problem has either stage costs or model units.")
        if self.chunks is not None and self.chunks < 1:
            raise InputError(f"A device needs at least one chunk, not {self.chunks}.")
        if not 0 <= self.effort < math.inf:
            raise InputError(f"The effort must be a number of seconds, 0 or more, not {self.effort}.")
        if self.deadline is not None and not self.deadline > 0:
            raise InputError(f"The deadline must be a number of seconds above 0, not {self.deadline}.")
        if self.costs is not None and self.costs.stages != self.devices * (self.chunks or 1):
            raise InputError(
                f"The costs are for {self.costs.stages} stages, but {self.devices} devices"
                f" with {self.chunks or 1} chunks each have {self.devices * (self.chunks or 1)}."
            )

        given = self.costs or self.units
        assert given is not None
        given.check_for(devices=self.devices, micro_batches=self.micro_batches)

    def begun(self) -> Effort:
        """The effort of a search that begins now, with the deadline as its brake."""
        return Effort.starting(self.effort, self.deadline)

    def time_of(self, run: Timeline | Price) -> Number:
        """What the pipeline's part of a step takes that runs so."""
        return run.makespan if self.objective == "makespan" else run.span

    def step_time(self, timeline: Timeline) -> Number:
        """What the whole step takes, with gradient reduction and optimizer: what plans are ranked by."""
        tail = 0 if self.tail is None else self.tail.of(timeline.program.schedule)
        return self.time_of(timeline) + tail

    def step_bound(self, bound: Number) -> Number:
        """What every whole step takes at least, if its pipeline takes at least `bound`."""
        return bound + (0 if self.tail is None else self.tail.least)

    @property
    def memory_limit(self) -> tuple[Number, ...] | None:
        return self.units.memory_limit if self.units is not None else self.costs.memory_limit  # type: ignore[union-attr]

    @property
    def limits(self) -> list[float]:
        """The memory limit of each device; infinite if there is none."""
        limit = self.memory_limit
        if limit is None:
            return [float("inf")] * self.devices
        return [float(limit[d if len(limit) > 1 else 0]) for d in range(self.devices)]

    @property
    def chunk_choices(self) -> tuple[int, ...]:
        """The numbers of chunks that a planner may choose from."""
        if self.chunks is not None:
            return (self.chunks,)
        if self.units is None:
            return (1,)
        return tuple(v for v in (1, 2, 3, 4) if self.devices * v <= len(self.units.units))


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A schedule with the costs that it was made for, and the partition if it was open."""

    schedule: Schedule
    costs: StageCosts
    partition: Partition | None = None
    lower_bound: Number = 0
    """Of the pipeline's part of a step, as far as the planner knows; the generic bound is added to it."""
    candidates: tuple[CandidateSummary, ...] = ()
    """What else was tried, if the planner compares others."""
    remark: str | None = None
    """What the planner says of its search, in its own terms."""
    cut_off: bool = False
    """Whether the deadline stopped the search."""


def cut(units: Units, counts: Sequence[int], *, strategy: str = "none") -> list[list[tuple[int, str]]]:
    """The partition with that many units per stage, all with one strategy (those that lack it: `none`)."""
    partition: list[list[tuple[int, str]]] = []
    index = 0
    for count in counts:
        chosen = range(index, index + count)
        partition.append([(i, strategy if strategy in units.units[i].strategies else "none") for i in chosen])
        index += count
    return partition


def closest(reasons: Sequence[DebubbleError]) -> DebubbleError:
    """Of the reasons why nothing fits, the one that misses the limit by least; the first if none knows."""
    known = [reason for reason in reasons if isinstance(reason, InfeasibleError) and reason.missing is not None]
    return min(known, key=lambda reason: reason.missing or 0.0, default=reasons[0])
