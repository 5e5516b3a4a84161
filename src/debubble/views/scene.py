"""A Scene: a predicted or measured timeline with the figures that views draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

from debubble.costs import Cluster
from debubble.formatting import cores_words
from debubble.ir import InputError, Kind, Number, OutOfMemoryError, Program, Trace
from debubble.ir.ops import BACKWARDS, SCHEDULED
from debubble.ir.program import Moment
from debubble.ir.trace import TracePhase
from debubble.models import Model, models
from debubble.planners.analysis.explanation import Explanation, explanation, fullest_device
from debubble.planners.analysis.remarks import plan_remarks
from debubble.planners.plan_step import tail_of
from debubble.plans import IMPORTED, Plan
from debubble.simulator import Bubble, TimedOperation, Timeline, bubbles, critical_path, simulate
from debubble.simulator.shared_cores import run_shared
from debubble.targets.target import targets

MAX_LIMIT_TO_PEAK = 3
"""Largest ratio of memory limit to peak at which memory axes include the limit."""

STATIC_PARTS = ("weights", "gradients", "optimizer", "workspace")
"""The parts of a device's memory that are constant over the step, from the bottom of its curve up."""

Curve = Sequence[tuple[Number, Number]]
"""(time, bytes from then on), in order of time."""


@dataclass(frozen=True)
class Scene:
    """A timeline with its title and memory curves.

    Attributes:
        timeline: The operations with their times.
        title: The scene's title.
        seconds: True if times are in seconds; False: in abstract units.
        phases: Measured work of the devices before and after the program.
        tail: Predicted time of gradient reduction and optimizer after the pipeline.
        post_validation: True if devices begin the next step independently, so that the step takes the longest span
            instead of the makespan.
        remarks: Sentences to show with the figures.
        plan: The plan whose prediction this is; None for measured or simulated scenes.
        sampled_memory: Measured memory curves, one per device; None: the timeline's memory is used.
        cores: Number of cores that the devices share; None: each device has a core.
        file: The plan's file; None: unknown.
        measured: Whether the timeline was measured.
    """

    timeline: Timeline
    _: KW_ONLY
    title: str
    seconds: bool = False
    phases: tuple[TracePhase, ...] = ()
    tail: Number = 0
    post_validation: bool = False
    remarks: tuple[str, ...] = ()
    plan: Plan | None = None
    sampled_memory: tuple[Curve, ...] | None = None
    cores: int | None = None
    file: str | None = None
    measured: bool = False

    @staticmethod
    def predicted(plan: Plan, *, limited: bool = True) -> Scene:
        """Return the scene of a plan's prediction.

        Args:
            plan: The plan.
            limited: Whether exceeding the memory limit raises OutOfMemoryError; False: the scene has a remark.
        """
        said: str = "Predicted"
        misfit: tuple[str, ...] = ()
        try:
            timeline = plan.simulate()
        except OutOfMemoryError as error:
            if limited:
                raise
            timeline = simulate(plan.schedule, plan.costs.with_limit(None))
            way = f"{error.problem}; `debubble import` tells settings that help." if plan.planner == IMPORTED else error
            said, misfit = "Does not fit; predicted without the limit", (f"It does not fit: {way}",)
        return Scene(
            timeline,
            title=f"{said}: {planned_words(plan)}",
            seconds=plan.in_seconds,
            tail=tail_of(plan),
            post_validation=plan.options.post_validation,
            remarks=(*misfit, *plan_remarks(plan, timeline)),
            plan=plan,
        )

    @staticmethod
    def pair(plan: Plan, trace: Trace) -> tuple[Scene, Scene]:
        """Return the scenes of a plan's prediction, on the cores of the run, and of the typical measured step.

        Without memory samples, the measured scene shows the memory that the plan predicts.

        Raises:
            InputError: If the trace is not of this plan.
        """
        predicted = replace(Scene.predicted(plan), seconds=True)
        if trace.cores is not None:
            predicted = predicted._on_shared_cores(trace.cores)
        timeline = measured_timeline(predicted.timeline.program, trace)
        title = f"Measured: step {trace.typical.step}"
        phases = trace.typical.from_zero().phases
        memory = measured_memory(trace)
        measured = Scene(
            timeline, title=title, seconds=True, phases=phases, sampled_memory=memory, measured=True
        )  # fmt: skip
        return predicted, measured

    def _on_shared_cores(self, cores: int) -> Scene:
        """Predict the scene for devices that share this number of cores."""
        title = f"{self.title}, {self.devices} devices on {cores_words(cores)}"
        return replace(self, title=title, timeline=run_shared(self.timeline.program, cores=cores), cores=cores)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """The memory of each device over time: sampled, or simulated."""
        return self.timeline.memory if self.sampled_memory is None else self.sampled_memory

    @property
    def pipeline_time(self) -> Number:
        """Time of the pipeline in the step."""
        return self.timeline.span if self.post_validation else self.timeline.makespan

    @property
    def step_time(self) -> Number:
        """Time of the full step."""
        if self.phases:
            first, last = self.extent
            return last - first
        return self.pipeline_time + self.tail

    @cached_property
    def extent(self) -> tuple[float, float]:
        """First and last time to draw; the program starts at 0."""
        starts, ends = [phase.start for phase in self.phases], [phase.end for phase in self.phases]
        return min([0.0, *starts]), max([float(self.timeline.makespan), *ends])

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.timeline.program.devices

    @cached_property
    def why(self) -> Explanation | None:
        """The explanation of the plan's step; None unless it is a model's."""
        return None if self.plan is None else explanation(self.plan, self.timeline, float(self.step_time))

    @cached_property
    def static_parts(self) -> list[dict[str, float]]:
        """The static bytes of each device by part; empty for scenes without a plan."""
        if self.plan is None:
            return []
        if self.why is None:
            return [{"model states": float(static)} for static in self.timeline.program.static]
        return [{name: getattr(parts, name) for name in STATIC_PARTS} for parts in self.why.memory]

    @property
    def parts_at_the_peak(self) -> list[dict[str, float]]:
        """The bytes of each device by part at its peak; empty for scenes without a plan."""
        return [
            {**static, "activations": max(float(peak) - sum(static.values()), 0.0)}
            for static, peak in zip(self.static_parts, self.peak_memory, strict=False)
        ]

    @cached_property
    def bubbles(self) -> tuple[tuple[Bubble, ...], ...]:
        """Idle intervals of each device, with their causes."""
        return bubbles(self.timeline)

    @cached_property
    def critical_path(self) -> tuple[TimedOperation, ...]:
        """The longest chain of operations that wait for each other."""
        return critical_path(self.timeline)

    @cached_property
    def peak_memory(self) -> tuple[Number, ...]:
        """Peak memory of each device, in bytes."""
        return tuple(max(level for _, level in curve) for curve in self.memory)

    @cached_property
    def peak_times(self) -> tuple[Number, ...]:
        """The times at which each device's memory first reaches its peak."""
        return tuple(max(curve, key=lambda sample: sample[1])[0] for curve in self.memory)

    @property
    def fullest(self) -> int:
        """The device with the least free memory."""
        return fullest_device(self.peak_memory, self.limits)

    @cached_property
    def limits(self) -> tuple[Number | None, ...]:
        """Memory limit of each device, in bytes; None: no limit."""
        costs = self.timeline.program.costs if self.plan is None else self.plan.costs
        return tuple(costs.limit_of(device) for device in range(self.devices))

    @property
    def misfit(self) -> bool:
        """True if some device's peak exceeds its memory limit."""
        pairs = zip(self.peak_memory, self.limits, strict=True)
        return any(limit is not None and peak > limit for peak, limit in pairs)

    @property
    def highest(self) -> float:
        """The end of memory axes: the highest limit, unless it is far above the peaks."""
        peak = max(map(float, self.peak_memory))
        return max(
            [peak, *(float(limit) for limit in self.limits if limit is not None and limit <= MAX_LIMIT_TO_PEAK * peak)]
        )

    def chunk_of(self, stage: int) -> int:
        """The stage's index among its device's stages, counted from 0."""
        placement = self.timeline.program.schedule.placement
        return placement.stages_of[placement.device_of[stage]].index(stage)

    def recomputes(self, operation: TimedOperation) -> bool:
        """Tell whether an operation is a recomputation or a backward that begins with one."""
        kind, stage, j = operation.op
        schedule = self.timeline.program.schedule
        fused = stage in schedule.fused_recompute and (stage, j) not in schedule.explicit_recompute
        return kind is Kind.R or (kind in BACKWARDS and fused)

    def recompute_share(self, operation: TimedOperation) -> float:
        """The fraction of a backward that its fused recomputation takes, at its start."""
        if operation.op.kind is Kind.R or not self.recomputes(operation):
            return 0.0
        program = self.timeline.program
        _, stage, j = operation.op
        time = program.schedule.recompute_time(program.costs, stage, j)
        return float(time / program.instructions[program.index[operation.op]].duration) if time else 0.0


def subject(plan: Plan) -> str:
    """Words for the plan's model and cluster."""
    described = plan.model_on_cluster
    return f"Given costs on {plan.devices} devices" if described is None else model_title(*described)


def planner_of(plan: Plan) -> str:
    """The planner that made the plan; for `auto`, the one whose answer was taken."""
    # The first candidate is the answer that was taken.
    return plan.candidates[0].planner if plan.candidates else plan.planner


def planned_words(plan: Plan) -> str:
    """Words for the schedule, its planner and its framework."""
    planner = planner_of(plan)
    named = "" if plan.schedule.name == planner else f"{plan.schedule.name}, "
    target = "" if plan.target is None else f" for {targets[plan.target].title}"
    made = "imported" if planner == IMPORTED else f"planned by {planner}"
    return f"{named}{made}{target}"


def _parameter_words(parameters: int) -> str:
    """Words for a number of parameters, in billions or millions."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"


def model_title(model: Model, cluster: Cluster) -> str:
    """Words for a model, by known name or family and size, and its devices."""
    names = [name for name, other in models.items() if other.config == model.config]
    itself = (name for name in names if models[name] is model)
    # The last of several names for the same layers is the newest.
    name = next(itself, names[-1] if names else f"{model.family}, {_parameter_words(model.parameters)} parameters")
    return f"{name} on {cluster.file['devices'].replace('x', ' x ', 1)}"


def measured_timeline(program: Program, trace: Trace) -> Timeline:
    """Return the timeline of a trace's typical step.

    Messages without events take no time and start once their dependencies are met.  Raises InputError if the trace is
    not of this program.
    """
    _check(program, trace)
    events = {event.name: event for event in trace.typical.from_zero().events}
    before = program.preceding
    starts: list[Number] = [0] * len(before)
    ends: list[Number] = [0] * len(before)
    for index in program.topological_order():
        event = events.get(program.instructions[index].op.name)
        if event is not None:
            starts[index], ends[index] = event.start, event.end
        else:
            met = (starts[i] if moment is Moment.START else ends[i] for i, moment in before[index])
            starts[index] = ends[index] = max(met, default=0)
    return Timeline.of(program, starts, ends)


def measured_memory(trace: Trace) -> tuple[tuple[tuple[Number, Number], ...], ...] | None:
    """The sampled (time, bytes) of each device in the typical step; None if some device has no sample."""
    samples = sorted(trace.typical.from_zero().memory, key=lambda sample: sample.time)
    curves = tuple(tuple((s.time, s.bytes) for s in samples if s.device == d) for d in range(trace.devices))
    return curves if all(curves) else None


def measured_peaks(trace: Trace) -> tuple[Number, ...] | None:
    """The largest sampled bytes of each device over all warm steps; None if some device has no sample."""
    samples = [sample for step in trace.warm for sample in step.memory]
    sampled = [[s.bytes for s in samples if s.device == device] for device in range(trace.devices)]
    return tuple(map(max, sampled)) if all(sampled) else None


def _check(program: Program, trace: Trace) -> None:
    if trace.devices != program.devices:
        raise InputError(f"The trace is of {trace.devices} devices, but the plan is for {program.devices}.")
    step = trace.typical
    measured = {event.name for event in step.events}
    planned = {instruction.op.name for instruction in program.instructions}
    if unplanned := measured - planned:
        raise InputError(f"The trace is not of this plan: it measured {min(unplanned)}, which the plan does not have.")
    needed = {i.op.name for i in program.instructions if i.op.kind in SCHEDULED}
    if missing := needed - measured:
        raise InputError(f"The trace is not of this plan: step {step.step} did not measure {min(missing)}.")
