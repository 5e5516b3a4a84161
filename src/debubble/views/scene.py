"""A Scene: a predicted or measured timeline, with all that views draw of it."""

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
"""Limits of more than so many times the peak are off the memory axes."""

STATIC_PARTS = ("weights", "gradients", "optimizer", "workspace")
"""The parts of a device's memory that stay as they are, from the bottom of its curve up."""

Curve = Sequence[tuple[Number, Number]]
"""(time, bytes from then on), in order of time."""


@dataclass(frozen=True)
class Scene:
    """One timeline with its title and memory curves.

    Attributes:
        timeline: The operations with their times.
        title: Its headline.
        seconds: True if times are seconds, and not abstract units.
        phases: The devices' work before and after the program, if it was measured.
        tail: Time of gradient reduction and optimizer after the pipeline, if it was predicted.
        post_validation: True if devices begin the next step one by one, so that the longest span counts and not the
            makespan.
        remarks: Sentences that a reader of the figures has to know.
        plan: The plan that it is the prediction of, if there is one.
        sampled_memory: One curve per device, if memory was measured.
        cores: The cores that its devices share; None: each has its own.
        file: The plan's file; None: the one that its own call wrote, if it did.
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

    @staticmethod
    def predicted(plan: Plan, *, limited: bool = True) -> Scene:
        """The scene of a plan's prediction.

        Args:
            plan: The plan.
            limited: Whether a step that exceeds the memory limit raises OutOfMemoryError; False: it is shown, too.
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
        """The scenes of a plan's prediction (on as few cores as it ran on) and of the typical step that was measured.

        Without memory samples, the measured memory is the plan's own account.

        Raises:
            InputError: If the trace is not of this plan.
        """
        predicted = replace(Scene.predicted(plan), seconds=True)
        if trace.cores is not None:
            predicted = predicted._on(trace.cores)
        timeline = measured_timeline(predicted.timeline.program, trace)
        title = f"Measured: step {trace.typical.step}"
        phases = trace.typical.from_zero().phases
        memory = measured_memory(trace)
        return predicted, Scene(timeline, title=title, seconds=True, phases=phases, sampled_memory=memory)

    def _on(self, cores: int) -> Scene:
        """The scene as predicted if the devices share that many cores."""
        title = f"{self.title}, {self.devices} devices on {cores_words(cores)}"
        return replace(self, title=title, timeline=run_shared(self.timeline.program, cores=cores), cores=cores)

    @cached_property
    def memory(self) -> tuple[Curve, ...]:
        """The memory of each device over time: as it was sampled, or by the timeline's own account."""
        return self.timeline.memory if self.sampled_memory is None else self.sampled_memory

    @property
    def pipeline_time(self) -> Number:
        """Time of the pipeline's part of the step."""
        return self.timeline.span if self.post_validation else self.timeline.makespan

    @property
    def step_time(self) -> Number:
        """Time of the whole step."""
        if self.phases:
            first, last = self.extent
            return last - first
        return self.pipeline_time + self.tail

    @cached_property
    def extent(self) -> tuple[float, float]:
        """First and last moment to draw; the program starts at 0."""
        starts, ends = [phase.start for phase in self.phases], [phase.end for phase in self.phases]
        return min([0.0, *starts]), max([float(self.timeline.makespan), *ends])

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.timeline.program.devices

    @cached_property
    def why(self) -> Explanation | None:
        """The figures that explain the plan; None unless it is a model's."""
        return None if self.plan is None else explanation(self.plan, self.timeline, float(self.step_time))

    @cached_property
    def static_parts(self) -> list[dict[str, float]]:
        """The static bytes of each device by part; empty where the scene was measured."""
        if self.plan is None:
            return []
        if self.why is None:
            return [{"model states": float(static)} for static in self.timeline.program.static]
        return [{part: getattr(parts, part) for part in STATIC_PARTS} for parts in self.why.memory]

    @property
    def parts_at_the_peak(self) -> list[dict[str, float]]:
        """The bytes of each device by part at its peak; empty where the scene was measured."""
        return [
            {**each, "activations": max(float(peak) - sum(each.values()), 0.0)}
            for each, peak in zip(self.static_parts, self.peak_memory, strict=False)
        ]

    @cached_property
    def bubbles(self) -> tuple[tuple[Bubble, ...], ...]:
        """Idle times of each device, with their causes."""
        return bubbles(self.timeline)

    @cached_property
    def critical_path(self) -> tuple[TimedOperation, ...]:
        """The longest chain of operations that wait for each other."""
        return critical_path(self.timeline)

    @cached_property
    def peak_memory(self) -> tuple[Number, ...]:
        """Highest memory of each device, in bytes."""
        return tuple(max(level for _, level in curve) for curve in self.memory)

    @cached_property
    def peak_times(self) -> tuple[Number, ...]:
        """The times at which each device's memory first reaches its peak."""
        return tuple(max(curve, key=lambda sample: sample[1])[0] for curve in self.memory)

    @property
    def fullest(self) -> int:
        """The device with the least room left."""
        return fullest_device(self.peak_memory, self.limits)

    @cached_property
    def limits(self) -> tuple[Number | None, ...]:
        """Memory limit of each device, in bytes; None: it has none."""
        costs = self.timeline.program.costs if self.plan is None else self.plan.costs
        return tuple(costs.limit_of(device) for device in range(self.devices))

    @property
    def misfit(self) -> bool:
        """True if some device's peak exceeds its memory limit."""
        pairs = zip(self.peak_memory, self.limits, strict=True)
        return any(limit is not None and peak > limit for peak, limit in pairs)

    @property
    def highest(self) -> float:
        """The end of a memory axis: the limits are on it unless the curves would be flat below them."""
        most = max(map(float, self.peak_memory))
        return max(
            [most, *(float(limit) for limit in self.limits if limit is not None and limit <= MAX_LIMIT_TO_PEAK * most)]
        )

    def chunk_of(self, stage: int) -> int:
        """The stage's index among its device's stages, counted from 0."""
        placement = self.timeline.program.schedule.placement
        return placement.stages_of[placement.device_of[stage]].index(stage)

    def recomputes(self, operation: TimedOperation) -> bool:
        """Tell whether it is a recomputation, or a backward that begins with one."""
        kind, stage, j = operation.op
        schedule = self.timeline.program.schedule
        fused = stage in schedule.fused_recompute and (stage, j) not in schedule.explicit_recompute
        return kind is Kind.R or (kind in BACKWARDS and fused)

    def recompute_share(self, operation: TimedOperation) -> float:
        """The share of a backward, its first, in which a fused recomputation runs."""
        if operation.op.kind is Kind.R or not self.recomputes(operation):
            return 0.0
        program = self.timeline.program
        _, stage, j = operation.op
        time = program.schedule.recompute_time(program.costs, stage, j)
        return float(time / program.instructions[program.index[operation.op]].duration) if time else 0.0


def subject(plan: Plan) -> str:
    """The model and its cluster."""
    described = plan.model_on_cluster
    return f"Given costs on {plan.devices} devices" if described is None else model_title(*described)


def planner_of(plan: Plan) -> str:
    """The planner whose answer a plan is: of those that `auto` asked, that of the fastest."""
    # The fastest answer is the first, by the step under disturbances if that was asked for.
    return plan.candidates[0].planner if plan.candidates else plan.planner


def planned_words(plan: Plan) -> str:
    """The schedule, who planned it and for which framework; a planner's own orders have its name."""
    planner = planner_of(plan)
    named = "" if plan.schedule.name == planner else f"{plan.schedule.name}, "
    target = "" if plan.target is None else f" for {targets[plan.target].title}"
    made = "imported" if planner == IMPORTED else f"planned by {planner}"
    return f"{named}{made}{target}"


def _parameter_words(parameters: int) -> str:
    """The parameters of a model in billions, or of a small one in millions."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"


def model_title(model: Model, cluster: Cluster) -> str:
    """The name by which a model is known, or its family and size, and the devices."""
    names = [name for name, other in models.items() if other.config == model.config]
    itself = (name for name in names if models[name] is model)
    # Of names for the same layers the newest is the last.
    name = next(itself, names[-1] if names else f"{model.family}, {_parameter_words(model.parameters)} parameters")
    return f"{name} on {cluster.file['devices'].replace('x', ' x ', 1)}"


def measured_timeline(program: Program, trace: Trace) -> Timeline:
    """The typical step of a trace.

    A message that was not timed takes no time, as soon as what it waits for has happened.  Raises InputError if the
    trace is not of this program.
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
            happened = (starts[i] if moment is Moment.START else ends[i] for i, moment in before[index])
            starts[index] = ends[index] = max(happened, default=0)
    return Timeline.of(program, starts, ends)


def measured_memory(trace: Trace) -> tuple[tuple[tuple[Number, Number], ...], ...] | None:
    """The sampled (time, bytes) of each device in the typical step; None if some device has no sample."""
    samples = sorted(trace.typical.from_zero().memory, key=lambda sample: sample.time)
    curves = tuple(tuple((s.time, s.bytes) for s in samples if s.device == d) for d in range(trace.devices))
    return curves if all(curves) else None


def measured_peaks(trace: Trace) -> tuple[Number, ...] | None:
    """The most bytes of each device sampled in any warm step; None if some device has no sample."""
    samples = [sample for step in trace.warm for sample in step.memory]
    sampled = [[s.bytes for s in samples if s.device == device] for device in range(trace.devices)]
    return tuple(map(max, sampled)) if all(sampled) else None


def _check(program: Program, trace: Trace) -> None:
    if trace.devices != program.devices:
        raise InputError(f"The trace is of {trace.devices} devices, but the plan is for {program.devices}.")
    step = trace.typical
    measured = {event.name for event in step.events}
    planned = {instruction.op.name for instruction in program.instructions}
    if strange := measured - planned:
        raise InputError(f"The trace is not of this plan: it measured {min(strange)}, which the plan does not have.")
    needed = {i.op.name for i in program.instructions if i.op.kind in SCHEDULED}
    if missing := needed - measured:
        raise InputError(f"The trace is not of this plan: step {step.step} did not measure {min(missing)}.")
