"""A job as it is next to the plan that its framework can run: steps, memory, and the settings to change."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from debubble.costs.calibration import Correction, corrections
from debubble.errors import UnsupportedError
from debubble.exports import exports
from debubble.imports.advice import MIN_GAIN, SettingAdvice, advice_words
from debubble.imports.figures import Figures
from debubble.imports.registry import Importer, Settings
from debubble.ir import DebubbleError, InfeasibleError
from debubble.planners.degrees.remedies import remedies
from debubble.planners.degrees.space import Job
from debubble.plans import Plan
from debubble.targets import targets


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One setting to change: its value now, and then; None: it is not there."""

    name: str
    now: Any
    then: Any

    def __str__(self) -> str:
        if self.then is None:
            return f"leave out {self.name}"
        on = "" if self.name.startswith("-") else "true"
        if self.name.endswith(_MODULES):
            return f"{self.name} {_stages(self.then)}" + ("" if self.now is None else f" (now {_stages(self.now)})")
        then, now = (on if value is True else self._value(value) for value in (self.then, self.now))
        return f"{self.name}{then and f' {then}'}" + ("" if self.now is None else f" (now {now or 'on'})")

    def _value(self, value: Any) -> str:
        """A value as the configuration has it; one of a command line is quoted for the shell."""
        if isinstance(value, str) and self.name.startswith("-"):
            return shlex.quote(value)
        return _words(value)


_MODULES = "module_fqns_per_model_part"
"""The setting that has the names of the modules of every stage."""


def _stages(parts: Any) -> str:
    """The modules of every stage in brackets, the layers that follow each other by the first and the last."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        return str(parts)
    return " ".join(f"[{' '.join(_layer_ranges(part))}]" for part in parts)


def _layer_ranges(names: Sequence[str]) -> Iterator[str]:
    """The names, with `layers.0..8` in place of nine layers."""
    for is_layer, group in groupby(names, key=lambda name: _NUMBERED.fullmatch(name) is not None):
        same = list(group)
        yield from [f"{same[0]}..{same[-1].rpartition('.')[2]}"] if is_layer and len(same) > 1 else same


_NUMBERED = re.compile(r".*\.\d+")


@dataclass(frozen=True, kw_only=True)
class JobComparison:
    """A job and its better plan.

    Attributes:
        yours: What the job takes as it is.
        planned: What the fastest plan takes; None: nothing fits.
        changes: The settings that make the one the other.
        reason: Why there is no plan.
        refused: Whether that is because debubble cannot write such a job for its framework, or the call is wrong.
        corrections: How much longer both take by measured runs of the cluster, if these correct them unlike.
        notes: Sentences on what the changes bring about, and what was not tried.
        advice: The settings that the job leaves off and that would help it as it is.
    """

    yours: Figures
    planned: Figures | None
    changes: tuple[SettingChange, ...] = ()
    reason: str | None = None
    refused: bool = False
    corrections: str | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[SettingAdvice, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the job fits, or a plan of it, or nobody has looked for one."""
        return self.yours.fits or self.planned is not None or self.reason is None or self.refused

    @property
    def _no_better(self) -> str:
        """Words that say why there is no better plan; none where there is, or none was looked for."""
        if self.reason is not None:
            if self.refused:
                return f"  It is not planned again: {self.reason}"
            return f"  No {'faster plan was found' if self.yours.fits else 'plan fits'}: {self.reason}"
        return "" if self.planned is None or self._is_better else "  Nothing faster was found."

    @property
    def _is_better(self) -> bool:
        """True if the plan is worth a change."""
        return self.planned is not None and _is_faster(self.planned, self.yours)

    @property
    def _gain(self) -> str:
        """The time that a step of the plan saves, and whether that is less than the interval of the prediction."""
        assert self.planned is not None
        if not self.yours.fits:
            return ""
        small = self.yours.accuracy["step"].low < self.planned.step_time < self.yours.step_time
        share = 1 - self.planned.step_time / self.yours.step_time
        return f"; {100 * share:.0f}% faster{', less than the interval: measure both' if small else ''}"

    def sentences(self) -> Iterator[str]:
        """The answer, a line for what the plans take and a line for each change."""
        yield f"Yours: {self.yours}.{self._no_better}"
        if self.yours.fits and self.yours.safe_limit is not None and not self._is_better:
            yield (
                "It likely fits: published runs like it took up to the memory in parentheses; --memory-limit"
                f" {self.yours.safe_limit} plans for less."
            )
        if self.advice:
            yield advice_words(self.advice, self.yours)
        if self.planned is not None and self._is_better:
            count = len(self.changes)
            yield f"Planned: {self.planned}{self._gain}."
            if self.planned.safe_limit is not None:
                yield (
                    "It likely fits: published runs like it took up to the memory in parentheses; import with"
                    f" --memory-limit {self.planned.safe_limit} for one that fits even then."
                )
            if self.corrections is not None:
                yield self.corrections
            if self.changes:
                yield f"Change {count} setting{'s' * (count > 1)}:"
            yield from (f"  {change}" for change in self.changes)
        yield from self.notes


def _untried(plan: Plan) -> tuple[str, ...]:
    """What is said of a plan whose search a Ctrl-C ended."""
    return ("Not tried: the rest of the search (Ctrl-C).",) if plan.interrupted else ()


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
        if not _is_faster(planned, figures):
            return JobComparison(yours=figures, planned=figures, notes=_untried(plan)), yours
        changes = tuple(_changes(importer, settings, yours, plan))
    except DebubbleError as error:
        refused = isinstance(error, UnsupportedError) or not isinstance(error, InfeasibleError)
        fitting = () if refused else tuple(_what_fits(yours))
        return JobComparison(yours=figures, planned=None, reason=str(error), refused=refused, notes=fitting), yours
    corrections = _unlike_corrections(yours, plan)
    notes = (
        importer.notes(settings, {change.name: change.then for change in changes}) if changes else _unset(yours, plan)
    )
    comparison = JobComparison(
        yours=figures, planned=planned, changes=changes, corrections=corrections,
        notes=(*_untried(plan), *notes, *_newly_untested(yours, plan)),
    )  # fmt: skip
    return comparison, plan


def _what_fits(yours: Plan) -> list[str]:
    """A line for what fits in place of a job that does not, as options of `debubble plan`."""
    described, options = yours.model_on_cluster, yours.options
    assert described is not None
    free = ("pipeline", "chunks", "slices")
    fixed = {name: value for name, value in vars(yours.degrees).items() if value is not None and name not in free}
    job = Job(
        model=described.model, cluster=described.cluster, global_batch=yours.degrees.global_batch, options=options,
        fixed=fixed, target=yours.target,
    )  # fmt: skip
    found = [f"  {remedy}" for remedy in remedies(job)]
    head = "What fits (tried, in options of `debubble plan`; --degrees plans other degrees):"
    return [head, *found] if found else []


def _newly_untested(yours: Plan, plan: Plan) -> list[str]:
    """Sentences on what the framework's project does not test of the plan, and the job does not have."""

    def untested(of: Plan) -> tuple[str, ...]:
        if of.target is None or of.model is None:
            return ()
        return targets[of.target].untested_parts(of.options, of.model, pipeline=of.devices)

    return [sentence for sentence in untested(plan) if sentence not in untested(yours)]


def _is_faster(planned: Figures, yours: Figures) -> bool:
    """Tell whether a plan is worth a change: the job does not fit, or takes notably longer."""
    return not yours.fits or planned.step_time < yours.step_time * (1 - MIN_GAIN)


def _unset(yours: Plan, plan: Plan) -> list[str]:
    """Say how a plan differs from a job where no setting of the configuration does."""
    pairs = {
        "recompute": (recomputation_words(yours), recomputation_words(plan)),
        "degrees": (str(yours.degrees), str(plan.degrees)),
        "schedule": (yours.schedule.name, plan.schedule.name),
        "offload": tuple("activations" if each.schedule.offloaded else "nothing" for each in (yours, plan)),
        "steps on hosts": tuple("some stages" if each.schedule.host_steps else "none" for each in (yours, plan)),
        "units per stage": (_words([*map(len, yours.partition)]), _words([*map(len, plan.partition)])),
    }
    differing = [f"{name} {then} (now {now})" for name, (now, then) in pairs.items() if then != now]
    return [f"The configuration has no setting for it; change in the script that it starts: {'; '.join(differing)}."]


MIN_CORRECTION_DIFFERENCE = 0.01
"""Share of a step by which two corrections may differ without a word."""


def _unlike_corrections(yours: Plan, plan: Plan) -> str | None:
    """Say by how much measured runs correct the two steps, where that differs."""
    own, other = (_correction(each).factor for each in (yours, plan))
    if abs(own / other - 1) < MIN_CORRECTION_DIFFERENCE:
        return None
    return (
        f"Measured runs correct your step {own:.2f} times and the planned one {other:.2f} times, as it is another job:"
        " measure it before you change."
    )


def _correction(plan: Plan) -> Correction:
    described = plan.model_on_cluster
    return Correction() if described is None else corrections(*described, plan.options)[0]


def recomputation_words(plan: Plan) -> str:
    """Describe what the layers of a plan recompute, such as `selective (core) in every layer` or in how many."""
    units = [unit for stage in plan.partition for unit in stage if unit.layer is not None]
    layers = len({unit.layer for unit in units})
    recomputing = {(unit.strategy, unit.layer) for unit in units if unit.strategy != "none"}
    ways = Counter(strategy for strategy, _ in sorted(recomputing, key=str))
    alike: dict[tuple[bool, int], list[str]] = {}
    for way, count in ways.items():
        alike.setdefault((way == "full", count), []).append(way)
    words = (
        f"{'full' if whole else 'selective (' + ', '.join(same) + ')'} in"
        f" {'every layer' if count == layers else f'{count} of {layers} layers'}"
        for (whole, count), same in alike.items()
    )
    return ", ".join(words) or "nothing"


def _changes(importer: Importer, settings: Settings, yours: Plan, plan: Plan) -> Iterator[SettingChange]:
    """The settings that differ between the plan's export and the job's own, or the job's as it was read.

    A setting may mean the same in other words, as a degree of -1 that takes all ranks.  Those of the job's that the
    plan's exclude or that overrule them are left out, too.
    """
    wanted, before = _exported_settings(importer, plan), _exported_settings(importer, yours)
    for name, value in wanted.items():
        now = settings.get(name)
        of_pass = name in importer.of_pass and name in settings
        alike = before.get(name) == value and not (_file(value) or of_pass)
        if not alike and not (name in settings and _words(now) == _words(value)):
            yield SettingChange(name=name, now=now, then=value)
    asked, had = importer.environment(wanted), importer.environment(before)
    yield from (SettingChange(name=name, now=None, then=asked[name]) for name in asked if name not in had)
    names = sorted(before.keys() | wanted.keys())
    changed = {name: wanted.get(name) for name in names if before.get(name) != wanted.get(name)}
    off = importer.turned_off(settings)
    gone = [name for name, value in changed.items() if value is None and (name in settings or name in off)]
    for name in dict.fromkeys([*gone, *importer.conflicts(settings, changed)]):
        yield SettingChange(name=name, now=settings.get(name), then=off.get(name))
    for name, value in importer.required(settings, changed).items():
        if name not in changed:
            yield SettingChange(name=name, now=settings.get(name), then=value)


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


def _words(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value)
