"""Problem and Solution: the input and the output of every planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from debubble.costs import StepTail
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.errors import HostMemoryError, UnsupportedError
from debubble.ir import (
    DEFAULT_EFFORT,
    CandidateSummary,
    DebubbleError,
    InfeasibleError,
    InputError,
    Number,
    Placement,
    RunOptions,
    StageCosts,
)
from debubble.ir.stage_costs import limits_of
from debubble.models.runtime_limits import sharing_stages
from debubble.plans import Simulated
from debubble.search.effort import Effort
from debubble.search.problem import Objective
from debubble.simulator import Price, Timeline
from debubble.targets.levers import TargetLevers
from debubble.targets.orders import COMBINED, GivenOrders, OwnOrders, placement_kind
from debubble.targets.target import targets

Swap = Literal["host", "peer", "none"]
"""Destinations of offloaded activations: the host, the paired device p - 1 - s, or none."""
MAX_SEEDS = 2**31
"""Number of seeds: solvers take 31 bits."""


@dataclass(frozen=True)
class FixedStages:
    """Stages with known costs, whose partition is fixed."""

    costs: StageCosts


@dataclass(frozen=True)
class ModelUnits:
    """A model's units, which a planner partitions into stages."""

    units: Units


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of a planner: a workload, the devices, and the effort.

    Attributes:
        workload: The work of a micro-batch: fixed stages, or model units to partition.
        devices: Number of pipeline devices.
        micro_batches: Micro-batches per step; with sliced sequences, the number of slices.
        chunks: Stages per device; None: one for fixed stages, the planner's choice for units.
        effort: Work that a planner may do, in seconds of the reference machine (see `search.effort`).
        deadline: Wall-clock seconds after which a planner stops with its best plan; None: ten times the effort and a
            minute.
        cache: Whether searches start from this machine's cached schedules, and cache theirs.
        seed: Seed of random searches.
        objective: The pipeline's time: the makespan, or, with post-validation, the longest span.
        tail: The work after the pipeline, for a model's units; None: nothing.
        target: The name of the framework whose levers the plan may use, and whose layers are the units; None: all
            levers of debubble.
        peers: Whether activations go to the paired device instead of the host; not every planner supports that.
        robust: Whether plans are compared by their mean step under disturbances (see `planners.robustness`).
        compare: Whether `auto` runs every planner.
        plain: Whether `auto` prefers a plan without recomputation, offload and CPU optimizer to one that is a little
            faster.

    Raises:
        InputError: If the entries contradict each other.
    """

    workload: FixedStages | ModelUnits
    devices: int
    micro_batches: int
    chunks: int | None = None
    effort: float = DEFAULT_EFFORT
    deadline: float | None = None
    cache: bool = False
    seed: int = 0
    objective: Objective = "makespan"
    tail: StepTail | None = None
    target: str | None = None
    peers: bool = False
    robust: bool = False
    compare: bool = False
    plain: bool = True

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"A pipeline needs at least one device, not {self.devices}.")
        if self.micro_batches < 1:
            raise InputError(f"A step needs at least one micro-batch, not {self.micro_batches}.")
        if self.chunks is not None and self.chunks < 1:
            raise InputError(f"A device needs at least one chunk, not {self.chunks}.")
        if not 0 <= self.effort < math.inf:
            raise InputError(f"The effort must be a number of seconds, 0 or more, not {self.effort}.")
        if self.deadline is not None and not self.deadline > 0:
            raise InputError(f"The deadline must be a number of seconds above 0, not {self.deadline}.")
        if not 0 <= self.seed < MAX_SEEDS:
            raise InputError(f"The seed must be a whole number from 0 to {MAX_SEEDS - 1}, not {self.seed}.")
        stages = self.devices * (self.chunks or 1)
        match self.workload:
            case FixedStages(costs) if costs.stages != stages:
                raise InputError(
                    f"The costs are for {costs.stages} stages, but {self.devices} devices"
                    f" with {self.chunks or 1} chunks each have {stages}."
                )
            case ModelUnits(units) if len(units.units) < stages:
                raise InputError(
                    f"{len(units.units)} model units cannot fill {stages} stages; use fewer pipeline devices or chunks."
                )
        if self.micro_batches % self.slices:
            raise InputError(f"{self.micro_batches} micro-batches are not whole sequences of {self.slices} slices.")
        self.entries.check_for(devices=self.devices, micro_batches=self.micro_batches)

    @property
    def entries(self) -> StageCosts | Units:
        """The costs or the units, for the entries that both have."""
        match self.workload:
            case FixedStages(costs):
                return costs
            case ModelUnits(units):
                return units

    @property
    def measured(self) -> bool:
        """True if the units were measured, in seconds."""
        return isinstance(self.workload, ModelUnits) and self.workload.units.seconds

    @property
    def units(self) -> Units:
        """The units of a model's problem."""
        assert isinstance(self.workload, ModelUnits)
        return self.workload.units

    @property
    def levers(self) -> TargetLevers | None:
        """The levers that a plan may use; None: all of them."""
        if self.target is None:
            return None
        options = RunOptions() if self.tail is None else self.tail.options
        return targets[self.target].levers_of(options, pipeline=self.devices)

    def allows(self, schedule: str, placement: Placement | None = None) -> bool:
        """Whether the levers allow a schedule of that name, and stages with this placement."""
        match None if self.levers is None else self.levers.orders:
            case OwnOrders(names):
                return schedule in names
            case GivenOrders(placements) if placements is not None and placement is not None:
                return schedule != COMBINED and placement_kind(placement) in placements
        return schedule != COMBINED

    def swapping(self, swap: Swap) -> Problem:
        """The problem with this destination as the only one of offloaded activations.

        Raises InputError for an unknown destination, or if messages between devices take no time, so that the bandwidth
        to a peer is unknown.
        """
        if swap not in get_args(Swap):
            raise InputError(f"Activations may go to {', '.join(get_args(Swap))}, not to {swap!r}.")
        if swap == "host":
            return self
        match self.workload:
            case FixedStages(costs):
                workload: FixedStages | ModelUnits = self.workload
                if swap == "none":
                    workload = FixedStages(costs.replace(offload=None, reload=None))
            case ModelUnits(units):
                bandwidth = None if swap == "none" else peer_bandwidth(units)
                units = replace(units, offload_bandwidth=bandwidth, module_bandwidth=None, link_groups=())
                workload = ModelUnits(units)
        return replace(self, workload=workload, peers=swap == "peer")

    def begun(self) -> Effort:
        """Start the clock of a search: its effort and its deadline."""
        return Effort.starting(self.effort, self.deadline)

    def time_of(self, run: Timeline | Price) -> Number:
        """The pipeline's time, according to the problem's objective."""
        return run.makespan if self.objective == "makespan" else run.span

    def step_time(self, timeline: Timeline) -> Number:
        """Time of the full step, with gradient reduction and optimizer, by which plans are ranked."""
        tail = 0 if self.tail is None else self.tail.of_schedule(timeline.program.schedule, timeline.program.costs)
        return self.time_of(timeline) + tail

    def step_bound(self, bound: Number) -> Number:
        """A lower bound on the full step, if its pipeline takes at least `bound`."""
        return bound + (0 if self.tail is None else self.tail.min_seconds)

    @property
    def memory_limit(self) -> tuple[Number, ...] | None:
        """Bytes per device, or one entry for all devices; None: no limit."""
        return self.entries.memory_limit

    @property
    def limits(self) -> list[float]:
        """Per device, the memory limit; infinite if there is none."""
        return limits_of(self.memory_limit, self.devices)

    @property
    def equally_long(self) -> bool:
        """True if all micro-batches cost the same."""
        return self.entries.micro_batch_scale is None

    @property
    def slices(self) -> int:
        """Number of slices per sequence; `micro_batches` counts slices."""
        return self.entries.slices

    @property
    def whole_micro_batches(self) -> Number:
        """The number of micro-batches of a step, weighted by their lengths."""
        scales = self.entries.micro_batch_scale
        return self.micro_batches if scales is None else sum(scales)

    @property
    def shortest(self) -> Number:
        """The length of the shortest micro-batch, relative to a full one."""
        return min(self.entries.micro_batch_scale or (1,))

    def host_step_choices(self, placement: Placement) -> list[frozenset[int]]:
        """Choices of stages with a CPU optimizer: the last chunk of every device, the last two, and so on."""
        if self.levers is not None or isinstance(self.workload, FixedStages) or not self.units.hostable:
            return []
        excluded = self.stepped_on_device(placement)
        choices = [placement.last_chunks(chunks) - excluded for chunks in range(1, placement.chunks + 1)]
        return [stages for stages in choices if stages]

    def stepped_on_device(self, placement: Placement) -> frozenset[int]:
        """The stages for which the runtime has no CPU optimizer."""
        return frozenset() if self.tail is None else sharing_stages(self.tail.model, placement)

    @property
    def chunk_choices(self) -> tuple[int, ...]:
        """The numbers of chunks that a planner may choose from."""
        if self.chunks is not None:
            return (self.chunks,)
        match self.workload:
            case FixedStages():
                return (1,)
            case ModelUnits(units):
                choices = (1, 2, 3, 4, 8, 16) if units.gathers else (1, 2, 3, 4)
                return tuple(v for v in choices if self.devices * v <= len(units.units))


@dataclass(frozen=True, kw_only=True)
class Solution(Simulated):
    """A planner's answer.

    Attributes:
        partition: The partition, unless the problem has fixed stages.
        deeper: The partition with the strategies of the micro-batches that the schedule recomputes deeper.
        lower_bound: The planner's lower bound on the pipeline's time; the generic bound applies too.
        candidates: Summaries of all candidates, if the planner compares other planners.
        remark: The planner's remark on its search.
        cut_off: Whether the deadline or Ctrl-C stopped the search.
        interrupted: Whether Ctrl-C stopped it.
    """

    partition: Partition | None = None
    deeper: Partition | None = None
    lower_bound: Number = 0
    candidates: tuple[CandidateSummary, ...] = ()
    remark: str | None = None
    cut_off: bool = False
    interrupted: bool = False

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if one ended its search, so that an enclosing search ends too."""
        if self.interrupted or any(candidate.interrupted for candidate in self.candidates):
            raise KeyboardInterrupt

    @property
    def complexity(self) -> tuple[int, int, float]:
        """Stages, operations and peak bytes: of equally fast answers the smallest is chosen.

        Raises OutOfMemoryError if it does not fit.
        """
        peak = max(map(float, self.simulate().peak_memory))
        return self.schedule.stages, sum(map(len, self.schedule.orders)), peak


def peer_bandwidth(units: Units) -> Number:
    """Bytes per second between two devices, from a message of the size that a fully recomputed unit keeps.

    Raises InputError if the units do not state the time of a message.
    """
    message = min((u.strategies["full"].activation for u in units.units if "full" in u.strategies), default=0)
    if not message or not units.communication:
        raise InputError("Swapping to a peer needs the time of messages and units that recompute fully; use the host.")
    return message / units.communication


def closest(reasons: Sequence[DebubbleError]) -> DebubbleError:
    """The error that misses the limit by the fewest bytes; if none states them, the first of a planner that searched.

    Errors about host memory come first, as that is the cheapest to add.
    """
    searched = [r for r in reasons if isinstance(r, InfeasibleError) and not isinstance(r, UnsupportedError)]
    known = [reason for reason in searched if reason.missing is not None]
    known = [reason for reason in known if isinstance(reason, HostMemoryError)] or known
    return min(known, key=lambda reason: reason.missing or 0.0, default=[*searched, *reasons][0])
