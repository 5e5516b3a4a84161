"""A Scene: a predicted or measured timeline, with all that views draw of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from debubble.formatting import cores_words
from debubble.ir import Kind, Number, Plan, Trace
from debubble.ir.ops import BACKWARDS
from debubble.ir.trace import TracePhase
from debubble.planners.analysis.remarks import plan_remarks
from debubble.planners.plan_model import tail_of
from debubble.simulator import Bubble, TimedOperation, Timeline, bubbles, critical_path
from debubble.simulator.shared_cores import run_shared
from debubble.views.measured_timeline import measured_memory, measured_timeline

FAR = 3
"""Limits of more than so many times the peak are off the memory axes."""

Curve = Sequence[tuple[Number, Number]]
"""(time, bytes from then on), in order of time."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One timeline with its title and memory curves.

    Attributes:
        title: Its headline.
        timeline: The operations with their times.
        memory: One curve per device.
        seconds: True if times are seconds, and not abstract units.
        phases: The devices' work before and after the program, if it was measured.
        tail: Time of gradient reduction and optimizer after the pipeline, if it was predicted.
        post_validation: True if devices begin the next step one by one, so that the longest span counts and not the
            makespan.
        remarks: Sentences that a reader of the figures has to know.
        plan: The plan that it is the prediction of, if there is one.
    """

    title: str
    timeline: Timeline
    memory: tuple[Curve, ...]
    seconds: bool
    phases: tuple[TracePhase, ...] = ()
    tail: Number = 0
    post_validation: bool = False
    remarks: tuple[str, ...] = ()
    plan: Plan | None = None

    @staticmethod
    def of(
        timeline: Timeline,
        *,
        title: str,
        seconds: bool = False,
        tail: Number = 0,
        post_validation: bool = False,
        remarks: Sequence[str] = (),
    ) -> Scene:
        """The scene of a simulated timeline."""
        return Scene(
            title=title, timeline=timeline, memory=timeline.memory, seconds=seconds, tail=tail,
            post_validation=post_validation, remarks=tuple(remarks),
        )  # fmt: skip

    @staticmethod
    def predicted(plan: Plan) -> Scene:
        """The scene of a plan's prediction."""
        timeline = plan.simulate()
        return Scene(
            title=f"Predicted: {plan.schedule.name}, planned by {plan.planner}",
            timeline=timeline,
            memory=timeline.memory,
            seconds=plan.model is not None,
            tail=tail_of(plan),
            post_validation=plan.options.post_validation,
            remarks=plan_remarks(plan, timeline),
            plan=plan,
        )

    @staticmethod
    def beside(plan: Plan, trace: Trace) -> tuple[Scene, Scene]:
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
        memory = measured_memory(trace) or timeline.memory
        phases = trace.typical.from_zero().phases
        return predicted, Scene(title=title, timeline=timeline, memory=memory, seconds=True, phases=phases)

    def _on(self, cores: int) -> Scene:
        """The scene as predicted if the devices share that many cores."""
        title = f"{self.title}, {self.devices} devices on {cores_words(cores)}"
        timeline = run_shared(self.timeline.program, cores=cores)
        return replace(self, title=title, timeline=timeline, memory=timeline.memory)

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
    def limits(self) -> tuple[Number | None, ...]:
        """Memory limit of each device, in bytes; None: it has none."""
        return tuple(self.timeline.program.costs.limit_of(device) for device in range(self.devices))

    @property
    def highest(self) -> float:
        """The end of a memory axis: the limits are on it unless the curves would be flat below them."""
        most = max(map(float, self.peak_memory))
        return max([most, *(float(limit) for limit in self.limits if limit is not None and limit <= FAR * most)])

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
        time = program.schedule.recompute_time(program.costs, stage) * program.costs.scale_of(j)
        return float(time / program.instructions[program.index[operation.op]].duration) if time else 0.0
