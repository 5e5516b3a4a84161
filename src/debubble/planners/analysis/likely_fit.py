"""Accuracy of a plan's predictions: whether it may exceed device memory, and a safer memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from debubble.costs.accuracy import Accuracy, accuracy_of
from debubble.costs.calibration import Figure
from debubble.costs.devices.known_hardware import GIB
from debubble.ir import Number
from debubble.plans import Plan


def plan_accuracy(figure: Figure, plan: Plan) -> Accuracy | None:
    """Accuracy of the predicted step or memory on published runs; None for measured or abstract costs and on CPUs."""
    if plan.profile is not None or plan.model_on_cluster is None or is_of_cpus(plan):
        return None
    return accuracy_of(figure, *plan.model_on_cluster, plan.options)


def is_of_cpus(plan: Plan) -> bool:
    """True if the plan is for CPUs, for which there are no published runs."""
    return plan.cluster is not None and plan.cluster.slowest.name == "CPU"


def memory_excess(plan: Plan) -> float | None:
    """Ratio of measured to predicted memory that nine in ten similar runs stay below; None if it is unknown."""
    accuracy = plan_accuracy("memory", plan)
    return None if accuracy is None else accuracy.high


def may_not_fit(plan: Plan, peaks: Sequence[Number]) -> bool:
    """True if the plan may exceed a device's memory with the excess of similar published runs."""
    excess = memory_excess(plan)
    return excess is not None and any(float(peak) * excess > memory for peak, memory in _memories(plan, peaks))


def safe_limit(plan: Plan, peaks: Sequence[Number]) -> str | None:
    """The memory limit under which similar runs fit; None if the plan fits or the excess is unknown.

    The limit is a percentage of each device's memory if devices differ.
    """
    excess = memory_excess(plan)
    if excess is None or not may_not_fit(plan, peaks):
        return None
    if len({memory for _, memory in _memories(plan, peaks)}) > 1:
        return f"{int(100 / excess)}%"
    tenths = int(10 * min(memory for _, memory in _memories(plan, peaks)) / excess / GIB)
    return f"{tenths // 10 if tenths >= 100 else tenths / 10:g}GiB" if tenths else None


def _memories(plan: Plan, peaks: Sequence[Number]) -> Iterator[tuple[float, float]]:
    """(peak, memory) in bytes of each device that has a limit."""
    assert plan.cluster is not None
    for device, peak in enumerate(peaks):
        limit = plan.costs.limit_of(device)
        if limit is not None:
            yield float(peak), float(limit) + plan.cluster.reserve
