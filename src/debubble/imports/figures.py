"""Predicted time and memory of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from debubble.costs.accuracy import Accuracy, accuracy_of
from debubble.costs.calibration import Figure
from debubble.formatting import mfu_words, size_words, time_words
from debubble.ir import OutOfMemoryError
from debubble.planners.analysis.explanation import Explanation
from debubble.planners.analysis.likely_fit import safe_limit
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Time and memory of a plan.

    Attributes:
        step_time: Seconds per step.
        peak_memory: Bytes on the fullest device, without memory that is reserved from plans.
        memory_limit: Bytes that a plan may use on that device; None: unlimited.
        host_memory: Largest number of bytes of host memory per device for offloaded optimizer states and activations.
        host_memory_limit: Bytes of host memory available per device; None: unknown.
        fits: Whether all device peaks and the host memory are within their limits.
        tokens_per_second_per_device: Throughput of all devices divided by their number.
        mfu: Model FLOPs utilization, a fraction; None: the devices' peak is unknown.
        accuracy: Errors of `step` and `memory` on similar published runs, with intervals that cover 90% of them.
        safe_limit: The `--memory-limit` at which similar runs fit; None: they fit already, or it is unknown.
    """

    step_time: float
    peak_memory: float
    memory_limit: float | None
    host_memory: float
    host_memory_limit: float | None
    fits: bool
    tokens_per_second_per_device: float
    mfu: float | None
    accuracy: dict[str, Accuracy]
    safe_limit: str | None = None

    @staticmethod
    def from_plan(plan: Plan) -> Figures:
        """Simulate a model's plan, ignoring its memory limit if it exceeds it."""
        described = plan.model_on_cluster
        assert described is not None
        try:
            timeline, fits = plan.simulate(), True
        except OutOfMemoryError:
            timeline, fits = simulate(plan.schedule, plan.costs.with_limit(None)), False
        seconds, peak = seconds_per_step(plan, timeline), float(max(timeline.peak_memory))
        explanation = Explanation(plan, timeline, seconds, *described)
        hosted, on_host = max(explanation.host_memory), explanation.units.host_memory
        predicted: Mapping[Figure, float] = {"step": seconds, "memory": peak}
        limit = plan.costs.limit_of(timeline.peak_memory.index(max(timeline.peak_memory)))
        return Figures(
            step_time=seconds,
            peak_memory=peak,
            memory_limit=None if limit is None else float(limit),
            host_memory=hosted,
            host_memory_limit=None if on_host is None else float(on_host),
            fits=fits and (on_host is None or hosted <= on_host),
            tokens_per_second_per_device=explanation.tokens_per_second_per_device,
            mfu=explanation.mfu,
            safe_limit=safe_limit(plan, timeline.peak_memory) if fits else None,
            accuracy={
                name: accuracy_of(name, *described, plan.options).scaled_to(value) for name, value in predicted.items()
            },
        )

    def __str__(self) -> str:
        step, memory = self.accuracy["step"], self.accuracy["memory"]
        low, high = (time_words(value, seconds=True) for value in (step.low, step.high))
        return (
            f"{time_words(self.step_time, seconds=True)} ({low} to {high}),"
            f" {self.tokens_per_second_per_device:,.0f} tokens/s per GPU, MFU {mfu_words(self.mfu)};"
            f" {size_words(self.peak_memory)} of {size_words(self.memory_limit)} (up to {size_words(memory.high)})"
            f"{self._on_host}{'' if self.fits else ', which does not fit'}"
        )

    @property
    def _on_host(self) -> str:
        """The clause on the use of host memory."""
        if not self.host_memory:
            return ""
        limit = "" if self.host_memory_limit is None else f" of {size_words(self.host_memory_limit)}"
        return f", and {size_words(self.host_memory)}{limit} of host memory per GPU"
