"""Completions for shells: names that begin with what was typed."""

from __future__ import annotations

from collections.abc import Iterable


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def model_names(incomplete: str) -> list[str]:
    """Built-in models."""
    from debubble.models import models

    return _beginning(models, incomplete)


def device_names(incomplete: str) -> list[str]:
    """Known devices, behind the number and the `x` that were typed."""
    from debubble.costs import hardware

    number, times, _ = incomplete.rpartition("x")
    return _beginning((f"{number or 8}{times or 'x'}{name}" for name in hardware), incomplete)


def optimizer_names(incomplete: str) -> list[str]:
    """Optimizers whose states are known."""
    from debubble.costs.step import MOMENTS

    return _beginning(MOMENTS, incomplete)


def planner_names(incomplete: str) -> list[str]:
    """Registered planners."""
    from debubble.planners import planners

    return _beginning(planners, incomplete)


def schedule_names(incomplete: str) -> list[str]:
    """Registered schedules."""
    from debubble.schedules import schedules

    return _beginning(schedules, incomplete)


def export_names(incomplete: str) -> list[str]:
    """Registered targets of exports."""
    from debubble.exports import exports

    return _beginning(exports, incomplete)


def framework_names(incomplete: str) -> list[str]:
    """Frameworks that plans are made for."""
    from debubble.targets.target import targets

    return _beginning(targets, incomplete)


def report_names(incomplete: str) -> list[str]:
    """Papers whose tables are computed, and all of them."""
    from debubble.reproduce import papers

    return _beginning([*papers, "all"], incomplete)
