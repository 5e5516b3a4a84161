"""Accuracy of a plan's figures: whether it may exceed its devices by that, and the limit to plan with then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from debubble.costs.accuracy import Accuracy, accuracy_of
from debubble.costs.calibration import Figure
from debubble.costs.devices.known_hardware import GIB
from debubble.ir import Number
from debubble.plans import Plan


def plan_accuracy(what: Figure, plan: Plan) -> Accuracy | None:
    """Accuracy of a plan's step or memory by published runs; None for measured or given costs, and on CPUs."""
    if plan.profile is not None or plan.model_on_cluster is None or is_of_cpus(plan):
        return None
    return accuracy_of(what, *plan.model_on_cluster, plan.options)


def is_of_cpus(plan: Plan) -> bool:
    """True if the plan is for CPUs, of which no run was compared."""
    return plan.cluster is not None and plan.cluster.slowest.name == "CPU"


def memory_excess(plan: Plan) -> float | None:
    """The most that nine in ten runs like the plan's took over what was predicted; None: it was not computed."""
    accuracy = plan_accuracy("memory", plan)
    return None if accuracy is None else accuracy.high


def may_not_fit(plan: Plan, peaks: Sequence[Number]) -> bool:
    """True if published runs like the plan's took so much more than these peaks that it exceeds a device's memory."""
    most = memory_excess(plan)
    return most is not None and any(float(peak) * most > memory for peak, memory in _memories(plan, peaks))


def safe_limit(plan: Plan, peaks: Sequence[Number]) -> str | None:
    """The memory limit under which runs like the plan's fit their devices; None: they do, or it is not known.

    A share of each device's memory where devices differ.
    """
    most = memory_excess(plan)
    if most is None or not may_not_fit(plan, peaks):
        return None
    if len({memory for _, memory in _memories(plan, peaks)}) > 1:
        return f"{int(100 / most)}%"
    tenths = int(10 * min(memory for _, memory in _memories(plan, peaks)) / most / GIB)
    return f"{tenths // 10 if tenths >= 100 else tenths / 10:g}GiB" if tenths else None


def _memories(plan: Plan, peaks: Sequence[Number]) -> Iterator[tuple[float, float]]:
    """Peak and memory of each device that has a limit."""
    assert plan.cluster is not None
    for device, peak in enumerate(peaks):
        limit = plan.costs.limit_of(device)
        if limit is not None:
            yield float(peak), float(limit) + plan.cluster.reserve
