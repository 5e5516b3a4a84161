"""A job as it is next to the plan that its framework can run: steps, memory, and the settings to change."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debubble.exports import exports
from debubble.formatting import size_words, time_words
from debubble.imports.registry import Importer, Settings
from debubble.ir import DebubbleError, OutOfMemoryError
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import simulate


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Time and memory of a plan.

    Attributes:
        step_time: Seconds of a step.
        peak_memory: Bytes on the fullest device, next to what no plan may use.
        fits: Whether that is within the limit of every device.
    """

    step_time: float
    peak_memory: float
    fits: bool

    @staticmethod
    def of(plan: Plan) -> Figures:
        """Simulate a plan, without its memory limit if it exceeds it."""
        try:
            timeline, fits = plan.simulate(), True
        except OutOfMemoryError:
            timeline, fits = simulate(plan.schedule, plan.costs.with_limit(None)), False
        seconds = seconds_per_step(plan, timeline)
        return Figures(step_time=seconds, peak_memory=float(max(timeline.peak_memory)), fits=fits)

    def __str__(self) -> str:
        much = "" if self.fits else ", which does not fit"
        return f"{time_words(self.step_time, seconds=True)}, {size_words(self.peak_memory)}{much}"


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One setting to change: its value now, and then; None: it is not there."""

    name: str
    now: Any
    then: Any

    def __str__(self) -> str:
        if self.then is None:
            return f"leave out {self.name}"
        then, now = _short(_words(self.then)), _short(_words(self.now))
        return f"{self.name}{then and f' {then}'}" + ("" if self.now is None else f" (now {now or 'on'})")


@dataclass(frozen=True, kw_only=True)
class JobComparison:
    """A job and its better plan.

    Attributes:
        yours: What the job takes as it is.
        planned: What the fastest plan takes; None: nothing fits.
        changes: The settings that make the one the other.
        reason: Why there is no plan.
    """

    yours: Figures
    planned: Figures | None
    changes: tuple[SettingChange, ...] = ()
    reason: str | None = None

    def sentences(self) -> Iterator[str]:
        """The answer, a line for what the plans take and a line for each change."""
        if self.planned is None:
            found = "faster plan was found" if self.yours.fits else "plan fits"
            yield f"Yours: {self.yours}.  No {found}: {self.reason}"
        elif not self.changes:
            yield f"Yours: {self.yours}.  Nothing faster was found."
        else:
            count = len(self.changes)
            yield f"Yours: {self.yours}; planned: {self.planned}; change {count} setting{'s' * (count > 1)}:"
            yield from (f"  {change}" for change in self.changes)


def compare(
    importer: Importer, settings: Settings, yours: Plan, again: Callable[[], Plan]
) -> tuple[JobComparison, Plan]:
    """Plan a job again, and say what to change.

    Args:
        importer: The framework's.
        settings: The job's settings.
        yours: The job's plan.
        again: Makes the fastest plan for the framework.

    Returns:
        The comparison, and the faster of the two plans.
    """
    figures = Figures.of(yours)
    try:
        plan = again()
        planned = Figures.of(plan)
        if figures.fits and planned.step_time >= figures.step_time * (1 - NEGLIGIBLE):
            return JobComparison(yours=figures, planned=figures), yours
        changes = tuple(_changes(importer, settings, yours, plan))
    except DebubbleError as error:
        return JobComparison(yours=figures, planned=None, reason=str(error)), yours
    return JobComparison(yours=figures, planned=planned, changes=changes), plan


NEGLIGIBLE = 1e-3
"""Share of a step by which another plan must be faster to be worth a change."""


def _changes(importer: Importer, settings: Settings, yours: Plan, plan: Plan) -> Iterator[SettingChange]:
    """The settings that differ between the plan's export and the job's own, or the job's as it was read.

    A setting may mean the same in other words, as a degree of -1 that takes all ranks.  Those of the job's that the
    plan's exclude or that overrule them are left out, too.
    """
    wanted, before = _exported_settings(importer, plan), _exported_settings(importer, yours)
    for name, value in wanted.items():
        now = settings.get(name)
        alike = before.get(name) == value and not _file(value)
        if not alike and not (name in settings and _words(now) == _words(value)):
            yield SettingChange(name=name, now=now, then=value)
    asked, had = importer.environment(wanted), importer.environment(before)
    yield from (SettingChange(name=name, now=None, then=asked[name]) for name in asked if name not in had)
    names = sorted(before.keys() | wanted.keys())
    changed = {name: wanted.get(name) for name in names if before.get(name) != wanted.get(name)}
    gone = [name for name, value in changed.items() if value is None and name in settings]
    for name in dict.fromkeys([*gone, *importer.conflicts(settings, changed)]):
        yield SettingChange(name=name, now=settings[name], then=None)


def _exported_settings(importer: Importer, plan: Plan) -> Mapping[str, Any]:
    """The settings of a plan's export; none if the framework does not take the plan."""
    try:
        made = exports[importer.name](plan)
    except DebubbleError:
        if importer.name != plan.target:
            raise
        return {}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in made.files.items():
            (Path(folder) / name).write_text(content)
        return importer.settings(Path(folder) / importer.file)


def _file(value: Any) -> bool:
    """Tell whether a setting names a file of the export, whose content is the plan's."""
    return str(value).endswith(".csv")


def _short(words: str) -> str:
    """The words, or their beginning: lists of modules fill pages, and an export writes them."""
    return words if len(words) <= MOST_LETTERS else f"{words[:MOST_LETTERS]} ..."


MOST_LETTERS = 80
"""Letters of a value that are shown."""


def _words(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value)
