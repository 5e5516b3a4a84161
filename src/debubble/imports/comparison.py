"""Comparison of an imported job with the best plan that its framework can run: time, memory, settings to change."""

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
    """A setting to change, from its value `now` to its value `then`; None: absent."""

    name: str
    now: Any
    then: Any

    def __str__(self) -> str:
        if self.then is None:
            return f"leave out {self.name}"
        on = "" if self.name.startswith("-") else "true"
        if self.name.endswith(_STAGE_MODULES):
            return f"{self.name} {_stages(self.then)}" + ("" if self.now is None else f" (now {_stages(self.now)})")
        then, now = (on if value is True else self._value(value) for value in (self.then, self.now))
        return f"{self.name}{then and f' {then}'}" + ("" if self.now is None else f" (now {now or 'on'})")

    def _value(self, value: Any) -> str:
        """A value as written in the configuration; command-line values are quoted for the shell."""
        if isinstance(value, str) and self.name.startswith("-"):
            return shlex.quote(value)
        return _value_words(value)


_STAGE_MODULES = "module_fqns_per_model_part"
"""torchtitan's setting that lists the names of the modules of every stage."""


def _stages(stages: Any) -> str:
    """The modules of every stage in brackets, with consecutive layers as a range."""
    if not isinstance(stages, list) or not all(isinstance(stage, list) for stage in stages):
        return str(stages)
    return " ".join(f"[{' '.join(_layer_ranges(stage))}]" for stage in stages)


def _layer_ranges(names: Sequence[str]) -> Iterator[str]:
    """The names, with consecutive layers abbreviated as `layers.0..8`."""
    for is_layer, group in groupby(names, key=lambda name: _LAYER_NAME.fullmatch(name) is not None):
        same = list(group)
        yield from [f"{same[0]}..{same[-1].rpartition('.')[2]}"] if is_layer and len(same) > 1 else same


_LAYER_NAME = re.compile(r".*\.\d+")


@dataclass(frozen=True, kw_only=True)
class JobComparison:
    """A job and its better plan.

    Attributes:
        yours: Time and memory of the job as configured.
        planned: Time and memory of the fastest plan; None: nothing fits.
        changes: The settings to change in order to run the plan.
        reason: Why there is no plan.
        refused: Whether there is none because debubble cannot export such a job to its framework, or the call is wrong.
        corrections: How measured runs of the cluster correct both step times, if they correct them differently.
        notes: Sentences on the effects of the changes, and on searches that were not run.
        advice: Settings that are off in the job and would help it without a new plan.
        planned_degrees: The plan's degrees if they are not the job's.
    """

    yours: Figures
    planned: Figures | None
    changes: tuple[SettingChange, ...] = ()
    reason: str | None = None
    refused: bool = False
    corrections: str | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[SettingAdvice, ...] = ()
    planned_degrees: str | None = None

    @property
    def fits(self) -> bool:
        """True if the job or a plan of it fits, or no plan was searched for."""
        return self.yours.fits or self.planned is not None or self.reason is None or self.refused

    @property
    def _no_better(self) -> str:
        """Why there is no better plan; empty if there is one, or none was searched for."""
        if self.reason is not None:
            if self.refused:
                return f"  It is not planned again: {self.reason}"
            return f"  No {'faster plan was found' if self.yours.fits else 'plan fits'}: {self.reason}"
        return "" if self.planned is None or self._is_better else "  Nothing faster was found."

    @property
    def _is_better(self) -> bool:
        """True if the plan is faster by enough to change settings, or the job does not fit."""
        return self.planned is not None and _is_faster(self.planned, self.yours)

    @property
    def _gain(self) -> str:
        """The time saved per step, with a warning if it lies within the interval of the prediction."""
        assert self.planned is not None
        if not self.yours.fits:
            return ""
        small = self.yours.accuracy["step"].low < self.planned.step_time < self.yours.step_time
        share = 1 - self.planned.step_time / self.yours.step_time
        return f"; {100 * share:.0f}% faster{', less than the interval: measure both' if small else ''}"

    def sentences(self) -> Iterator[str]:
        """The lines of the report: both plans' figures, the changes, and notes."""
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
            if self.planned_degrees is not None:
                yield f"Its degrees: {self.planned_degrees}."
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


def _interruption_note(plan: Plan) -> tuple[str, ...]:
    """The note on a plan whose search was interrupted by Ctrl-C."""
    return ("Not tried: the rest of the search (Ctrl-C).",) if plan.interrupted else ()


def compare(
    importer: Importer, settings: Settings, yours: Plan, replan: Callable[[], Plan]
) -> tuple[JobComparison, Plan]:
    """Plan a job again, and list the settings to change.

    Args:
        importer: The importer of the framework.
        settings: The job's settings.
        yours: The job's plan.
        replan: Searches the fastest plan for the framework.

    Returns:
        The comparison, and the faster of the two plans.
    """
    figures = Figures.from_plan(yours)
    try:
        plan = replan()
        planned = Figures.from_plan(plan)
        if not _is_faster(planned, figures):
            return JobComparison(yours=figures, planned=figures, notes=_interruption_note(plan)), yours
        changes = tuple(_changes(importer, settings, yours, plan))
    except DebubbleError as error:
        refused = isinstance(error, UnsupportedError) or not isinstance(error, InfeasibleError)
        fitting = () if refused else tuple(_fitting_options(yours))
        return JobComparison(yours=figures, planned=None, reason=str(error), refused=refused, notes=fitting), yours
    corrections = _correction_difference(yours, plan)
    values = {change.name: change.then for change in changes}
    notes = importer.notes(settings, values) if changes else _script_changes(yours, plan)
    comparison = JobComparison(
        yours=figures, planned=planned, changes=changes, corrections=corrections,
        notes=(*_interruption_note(plan), *notes, *_newly_untested(yours, plan)),
        planned_degrees=str(plan.degrees) if plan.degrees != yours.degrees else None,
    )  # fmt: skip
    return comparison, plan


def _fitting_options(yours: Plan) -> list[str]:
    """Options of `debubble plan` under which a job that does not fit would fit, one per line."""
    described, options = yours.model_on_cluster, yours.options
    assert described is not None
    free = ("pipeline", "chunks", "slices")
    fixed = {name: value for name, value in vars(yours.degrees).items() if value is not None and name not in free}
    job = Job(
        model=described.model, cluster=described.cluster, global_batch=yours.degrees.global_batch, options=options,
        fixed=fixed, target=yours.target,
    )  # fmt: skip
    lines = [f"  {remedy}" for remedy in remedies(job)]
    head = "What fits (tried, in options of `debubble plan`; --degrees plans other degrees):"
    return [head, *lines] if lines else []


def _newly_untested(yours: Plan, plan: Plan) -> list[str]:
    """Sentences on features of the plan that the framework's own tests do not cover and the job does not use."""

    def untested(candidate: Plan) -> tuple[str, ...]:
        if candidate.target is None or candidate.model is None:
            return ()
        return targets[candidate.target].untested_parts(candidate.options, candidate.model, pipeline=candidate.devices)

    return [sentence for sentence in untested(plan) if sentence not in untested(yours)]


def _is_faster(planned: Figures, yours: Figures) -> bool:
    """Tell whether the job does not fit, or the plan's step is shorter by at least MIN_GAIN."""
    return not yours.fits or planned.step_time < yours.step_time * (1 - MIN_GAIN)


def _script_changes(yours: Plan, plan: Plan) -> list[str]:
    """Describe the differences between plan and job that no setting of the configuration expresses."""
    pairs = {
        "recompute": (recomputation_words(yours), recomputation_words(plan)),
        "degrees": (str(yours.degrees), str(plan.degrees)),
        "schedule": (yours.schedule.name, plan.schedule.name),
        "offload": tuple("activations" if p.schedule.offloaded else "nothing" for p in (yours, plan)),
        "steps on hosts": tuple("some stages" if p.schedule.host_steps else "none" for p in (yours, plan)),
        "units per stage": (_value_words([*map(len, yours.partition)]), _value_words([*map(len, plan.partition)])),
    }
    differing = [f"{name} {then} (now {now})" for name, (now, then) in pairs.items() if then != now]
    return [f"The configuration has no setting for it; change in the script that it starts: {'; '.join(differing)}."]


MIN_CORRECTION_DIFFERENCE = 0.01
"""Smallest relative difference of two step-time corrections that is reported."""


def _correction_difference(yours: Plan, plan: Plan) -> str | None:
    """Describe the corrections of both step times by measured runs, if they differ."""
    job_factor, plan_factor = (_correction(candidate).factor for candidate in (yours, plan))
    if abs(job_factor / plan_factor - 1) < MIN_CORRECTION_DIFFERENCE:
        return None
    return (
        f"Measured runs correct your step {job_factor:.2f} times and the planned one {plan_factor:.2f} times, as it is"
        " another job: measure it before you change."
    )


def _correction(plan: Plan) -> Correction:
    described = plan.model_on_cluster
    return Correction() if described is None else corrections(*described, plan.options)[0]


def recomputation_words(plan: Plan) -> str:
    """Describe the recomputation of a plan, such as `selective (core) in every layer` or `full in 3 of 32 layers`."""
    units = [unit for stage in plan.partition for unit in stage if unit.layer is not None]
    layers = len({unit.layer for unit in units})
    recomputing = {(unit.strategy, unit.layer) for unit in units if unit.strategy != "none"}
    counts = Counter(strategy for strategy, _ in sorted(recomputing, key=str))
    by_extent: dict[tuple[bool, int], list[str]] = {}
    for strategy, count in counts.items():
        by_extent.setdefault((strategy == "full", count), []).append(strategy)
    words = (
        f"{'full' if is_full else 'selective (' + ', '.join(strategies) + ')'} in"
        f" {'every layer' if count == layers else f'{count} of {layers} layers'}"
        for (is_full, count), strategies in by_extent.items()
    )
    return ", ".join(words) or "nothing"


def _changes(importer: Importer, settings: Settings, yours: Plan, plan: Plan) -> Iterator[SettingChange]:
    """The settings that differ between the export of the plan and both the export of the job and its configuration.

    The job's export is compared because a value may have two spellings, such as a degree of -1 for all ranks.  Settings
    of the job that conflict with the plan's, or override them, are removed.
    """
    planned, current = _exported_settings(importer, plan), _exported_settings(importer, yours)
    for name, value in planned.items():
        now = settings.get(name)
        per_pass = name in importer.per_pass and name in settings
        unchanged = current.get(name) == value and not (_is_export_file(value) or per_pass)
        if not unchanged and not (name in settings and _value_words(now) == _value_words(value)):
            yield SettingChange(name=name, now=now, then=value)
    needed, present = importer.environment(planned), importer.environment(current)
    yield from (SettingChange(name=name, now=None, then=needed[name]) for name in needed if name not in present)
    names = sorted(current.keys() | planned.keys())
    changed = {name: planned.get(name) for name in names if current.get(name) != planned.get(name)}
    off = importer.turned_off(settings)
    removed = [name for name, value in changed.items() if value is None and (name in settings or name in off)]
    for name in dict.fromkeys([*removed, *importer.conflicts(settings, changed)]):
        yield SettingChange(name=name, now=settings.get(name), then=off.get(name))
    for name, value in importer.required(settings, changed).items():
        if name not in changed:
            yield SettingChange(name=name, now=settings.get(name), then=value)


def _exported_settings(importer: Importer, plan: Plan) -> Mapping[str, Any]:
    """The settings of a plan's export; empty if the framework cannot run the plan."""
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


def _is_export_file(value: Any) -> bool:
    """Tell whether a setting names a file that the export writes."""
    return str(value).endswith(".csv")


def _value_words(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(_value_words, value))
    return str(value)
