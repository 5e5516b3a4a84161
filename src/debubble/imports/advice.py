"""Settings that would make a job faster or smaller, predicted by importing the job again with them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from debubble.formatting import size_words, time_words
from debubble.imports.figures import Figures
from debubble.imports.job import ImportedJob
from debubble.imports.registry import Importer, Settings, UserFacts
from debubble.ir import DebubbleError, RunOptions
from debubble.plans import Plan

MIN_GAIN = 0.01
"""Smallest relative gain in step time or memory for which a change is advised."""


@dataclass(frozen=True, kw_only=True)
class SettingAdvice:
    """Changed settings and their predicted effect on a job.

    Attributes:
        settings: Name -> new value; true: a flag without a value; None: remove the setting.
        step_time: Seconds of a step with them.
        peak_memory: Bytes on the fullest device with them.
        fits: Whether all peaks are within the limits with them.
    """

    settings: Mapping[str, Any]
    step_time: float
    peak_memory: float
    fits: bool

    @staticmethod
    def from_plan(settings: Mapping[str, Any], plan: Plan) -> SettingAdvice:
        """Simulate the plan of the job with these settings."""
        step = Figures.from_plan(plan)
        return SettingAdvice(settings=settings, step_time=step.step_time, peak_memory=step.peak_memory, fits=step.fits)

    def words(self, yours: Figures) -> str:
        """Describe the settings and their gains, such as `--sequence-parallel: 4% faster, 3.00 GiB less`."""
        names = " ".join(_setting_words(name, value) for name, value in self.settings.items())
        return f"{names}: {', '.join(self._effects(yours))}"

    def _effects(self, yours: Figures) -> Iterator[str]:
        if self.fits and not yours.fits:
            yield f"fits with {time_words(self.step_time, seconds=True)} per step"
        share = 1 - self.step_time / yours.step_time
        if abs(share) >= MIN_GAIN:
            yield f"{100 * abs(share):.0f}% {'faster' if share > 0 else 'slower'}"
        less = yours.peak_memory - self.peak_memory
        if abs(less) >= MIN_GAIN * yours.peak_memory:
            yield f"{size_words(abs(less))} {'less' if less > 0 else 'more'}"
        if not self.fits:
            yield "which does not fit either"


def _setting_words(name: str, value: Any) -> str:
    return f"leave out {name}" if value is None else name if value is True else f"{name} {value}"


def setting_advice(
    importer: Importer, settings: Settings, path: Path, facts: UserFacts, yours: Plan
) -> tuple[SettingAdvice, ...]:
    """Predict a job with each switch of its framework on, and with smaller micro-batches; return what helps.

    Args:
        importer: The importer of the framework.
        settings: The job's settings.
        path: The file of the settings.
        facts: Facts that the user adds.
        yours: The job's plan.

    Returns:
        Settings that make the job fit, or shorten its step by at least 1% over the job and over every advised subset of
        them, fastest first.  If no settings make it fit, those with the lowest peak memory.
    """
    helpful = [current := SettingAdvice.from_plan({}, yours)]
    leanest = current
    for changes, job in _changed_jobs(importer, settings, path, facts, yours.options):
        with suppress(DebubbleError):
            candidate = SettingAdvice.from_plan(changes, job.plan(facts.cluster))
            subsets = [advice for advice in helpful if advice.settings.items() <= changes.items()]
            faster = candidate.step_time <= (1 - MIN_GAIN) * min(advice.step_time for advice in subsets)
            leanest = min(leanest, candidate, key=lambda advice: advice.peak_memory)
            if candidate.fits and (faster or not any(advice.fits for advice in subsets)):
                helpful.append(candidate)
            if MICRO_BATCH_SIZE in changes and candidate.fits:
                # Even smaller micro-batches are slower.
                break
    if not any(advice.fits for advice in helpful) and leanest.peak_memory < (1 - MIN_GAIN) * current.peak_memory:
        return (leanest,)
    return tuple(sorted(helpful[1:], key=lambda advice: advice.step_time))


def _changed_jobs(
    importer: Importer, settings: Settings, path: Path, facts: UserFacts, options: RunOptions
) -> Iterator[tuple[Settings, ImportedJob]]:
    """The job with each switch on, then with its micro-batch size halved repeatedly at the same global batch."""
    for changes in importer.switches(settings, options):
        changed = {name: value for name, value in {**settings, **changes}.items() if changes.get(name, ...) is not None}
        with suppress(DebubbleError):
            yield changes, importer.job(changed, path, facts)
    job, size = importer.job(settings, path, facts), options.micro_batch_size
    while size % 2 == 0:
        size //= 2
        micro_batches = job.micro_batches * options.micro_batch_size // size
        # A framework may choose its schedule by the number of micro-batches.
        smaller = importer.job(settings, path, replace(facts, micro_batches=micro_batches))
        smaller_options = replace(smaller.options, micro_batch_size=size)
        yield {MICRO_BATCH_SIZE: size}, replace(smaller, options=smaller_options, passes=job.passes)


MICRO_BATCH_SIZE = "micro-batch size"
"""The name of the micro-batch size in advice for every framework."""


def advice_words(advice: Sequence[SettingAdvice], yours: Figures) -> str:
    """One line on the settings that would help the job, or on those with the least memory if nothing fits."""
    label = "Would help" if any(settings.fits for settings in advice) else "Least memory"
    return f"{label}: {'; '.join(settings.words(yours) for settings in advice)}."
