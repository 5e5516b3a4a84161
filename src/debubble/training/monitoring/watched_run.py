"""A run compared with its plan: step time, loss, memory and the slowest device.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

from msgspec import Meta, Struct

from debubble.errors import DebubbleError
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import Timeline
from debubble.simulator.shared_cores import run_shared
from debubble.training.monitoring.run_record import RunRecord, RunStep

RECENT_STEPS = 20
"""Number of last steps whose median is the current step time."""
SLOWDOWN_RATIO = 1.1
"""A device is slow if its measured over planned time exceeds 1, and that of the other devices, by this factor."""
MIN_WAITING_SHARE = 0.05
"""Increase of the bubble fraction over the plan's from which waiting is reported."""


class DeviceState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, measured and planned."""

    busy: Annotated[float, Meta(description="Seconds of computing in a step, the median of the measured steps.")]
    planned_busy: float | None
    peak_memory: Annotated[float, Meta(description="Bytes.")]
    planned_memory: float | None
    memory_limit: float | None


class WatchedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run at its newest step; null: not known (yet)."""

    state: Annotated[str, Meta(description="running, ended, stopped by a signal, failed, or died: it is gone.")]
    error: Annotated[str | None, Meta(description="The error that ended it.")]
    plan: Annotated[str, Meta(description="The plan's file.")]
    step: Annotated[int, Meta(description="Steps done.")]
    steps: Annotated[int, Meta(description="Steps at its end.")]
    age: Annotated[float | None, Meta(description="Seconds since the newest step.")]
    seconds_left: Annotated[float | None, Meta(description="At the pace of the last 20 steps.")]
    first_loss: float | None
    loss: float | None
    validation_loss: Annotated[float | None, Meta(description="The newest.")]
    tokens_per_second: Annotated[float | None, Meta(description="Of the median of the last 20 steps.")]
    mfu: Annotated[float | None, Meta(description="Of the same.")]
    seconds_per_step: Annotated[float | None, Meta(description="The median of the last 20 steps.")]
    planned_seconds: Annotated[
        float | None, Meta(description="Seconds of a whole step by the plan, on so many cores as the run has.")
    ]
    cores: Annotated[int | None, Meta(description="CPU cores that its devices share; null: each has its own.")]
    measured_steps: Annotated[
        list[int], Meta(description="Those of the last 20 steps whose computing and bubble were measured.")
    ]
    measured_seconds: Annotated[float | None, Meta(description="The median of these steps.")]
    bubble_fraction: Annotated[
        float | None, Meta(description="Of the pipeline's time, the median of the measured steps.")
    ]
    planned_bubble: float | None
    devices: Annotated[list[DeviceState], Meta(description="Of the first replica.")]
    slowest: Annotated[int | None, Meta(description="The device that computes longest.")]
    reason: Annotated[str | None, Meta(description="Why it does, and what the others wait for.")]

    @staticmethod
    def from_record(record: RunRecord, plan: Plan | None, *, now: float) -> WatchedRun:
        """Derive the state of a run from its record.

        Args:
            record: The record, read to its end.
            plan: The run's plan, if it is known.
            now: Unix time.
        """
        start, steps = record.start, record.steps
        last = steps[-1] if steps else None
        # A resumed run may have another plan than the steps before it.
        recent = [step for step in steps if step.step > start.done][-RECENT_STEPS:]
        pace = median(step.seconds for step in recent) if recent else None
        validated = [step.validation_loss for step in steps if step.validation_loss is not None]
        mfu = [step.mfu for step in recent if step.mfu is not None]
        if plan is not None and last is not None and len(last.busy) != plan.devices:
            plan = None  # the file now has another plan
        timeline = None if plan is None else _planned_timeline(plan, start.cores)
        # What is not measured in a step is that of an earlier one; earlier versions do not say which.
        measured = [step for step in recent if step.measured_step in (step.step, None)]
        devices = [] if last is None or not measured else _devices(last, _typical_busy(measured), plan, timeline)
        slowest = max(range(len(devices)), key=lambda d: devices[d].busy) if devices else None
        bubbles = [step.bubble_fraction for step in measured if step.bubble_fraction is not None]
        bubble = median(bubbles) if bubbles else None
        planned_bubble = None if timeline is None else timeline.bubble_fraction
        waiting = None
        if bubble is not None and planned_bubble is not None and bubble > planned_bubble + MIN_WAITING_SHARE:
            waiting = f"devices wait {bubble:.0%} of the pipeline's time, {planned_bubble:.0%} by the plan"
        reason = None if slowest is None else _reason(devices, slowest, waiting)
        done = start.done if last is None else last.step
        return WatchedRun(
            state=record.state,
            error=None if record.end is None else record.end.error,
            plan=start.plan,
            step=done,
            steps=start.steps,
            age=None if last is None else max(now - last.time, 0.0),
            seconds_left=None if pace is None else pace * (start.steps - done),
            first_loss=steps[0].loss if steps else None,
            loss=None if last is None else last.loss,
            validation_loss=validated[-1] if validated else None,
            tokens_per_second=median(step.tokens_per_second for step in recent) if recent else None,
            mfu=median(mfu) if mfu else None,
            seconds_per_step=pace,
            planned_seconds=None if plan is None or timeline is None else seconds_per_step(plan, timeline),
            cores=start.cores,
            measured_steps=[step.step for step in measured],
            measured_seconds=median(step.seconds for step in measured) if measured else None,
            bubble_fraction=bubble,
            planned_bubble=planned_bubble,
            devices=devices,
            slowest=slowest,
            reason=reason,
        )


def _planned_timeline(plan: Plan, cores: int | None) -> Timeline:
    """The plan's simulated step, on shared cores if there are any."""
    timeline = plan.simulate()
    return timeline if cores is None else run_shared(timeline.program, cores=cores)


def plan_of(record: RunRecord) -> Plan | None:
    """Load and simulate the run's plan; None if its file is missing or invalid."""
    try:
        plan = Plan.load(Path(record.start.plan))
        plan.simulate()
    except DebubbleError:
        return None
    return plan


def _typical_busy(steps: Sequence[RunStep]) -> list[float]:
    """Per device, the median compute seconds in these steps."""
    return [median(times) for times in zip(*(step.busy for step in steps), strict=True)]


def _devices(
    last: RunStep, typical_busy: Sequence[float], plan: Plan | None, timeline: Timeline | None
) -> list[DeviceState]:
    measured = zip(typical_busy, last.peak_memory, strict=True)
    if plan is None or timeline is None:
        return [
            DeviceState(busy=busy, planned_busy=None, peak_memory=peak, planned_memory=None, memory_limit=None)
            for busy, peak in measured
        ]
    limits = [plan.costs.limit_of(device) for device in range(plan.devices)]
    planned = zip(timeline.busy, timeline.peak_memory, limits, strict=True)
    return [
        DeviceState(
            busy=busy, planned_busy=float(planned_busy), peak_memory=peak, planned_memory=float(planned_peak),
            memory_limit=None if limit is None else float(limit),
        )
        for (busy, peak), (planned_busy, planned_peak, limit) in zip(measured, planned, strict=True)
    ]  # fmt: skip


EQUAL_WORK_RATIO = 0.99
"""Two devices have the same work if the ratio is above this."""


def _reason(devices: list[DeviceState], slowest: int, waiting: str | None) -> str:
    """State why this device computes longest (the device itself, the plan, or unknown), and why others wait."""
    ratios = [device.busy / device.planned_busy for device in devices if device.planned_busy]
    if len(devices) == 1 or len(ratios) < len(devices):
        words = "it computes longest"
    else:
        peer_ratio = median(ratio for device, ratio in enumerate(ratios) if device != slowest)
        if ratios[slowest] > SLOWDOWN_RATIO * max(peer_ratio, 1.0):
            return "; ".join(
                [
                    f"it takes {ratios[slowest]:.2f} times as long as planned, the others {peer_ratio:.2f} times:"
                    " look at its clock, its heat and other processes on it",
                    *([] if waiting is None else [waiting]),
                ]
            )
        planned = devices[slowest].planned_busy or 0.0
        max_planned = max(device.planned_busy or 0.0 for device in devices)
        same = "others as much" if planned > EQUAL_WORK_RATIO * max_planned else "others more"
        share = "it the most" if planned == max_planned else same
        next_busy = sorted(device.busy for device in devices)[-2]
        equal = next_busy > EQUAL_WORK_RATIO * devices[slowest].busy
        words = "another computes as long" if equal else f"the plan gives {share} work"
    return words if waiting is None else f"{words}; {waiting}: look at messages, loading of data and the host"
