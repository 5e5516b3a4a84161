"""Settings that a job leaves off and that would help it, each predicted by reading the job with them on."""

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
"""Share of a step by which settings, or another plan, must shorten it to be worth a change."""


@dataclass(frozen=True, kw_only=True)
class SettingAdvice:
    """Settings that would help a job.

    Attributes:
        settings: By name, as they then are; true: without a value; None: left out.
        step_time: Seconds of a step with them.
        peak_memory: Bytes on the fullest device with them.
        fits: Whether all peaks are within the limits with them.
    """

    settings: Mapping[str, Any]
    step_time: float
    peak_memory: float
    fits: bool

    @staticmethod
    def of(settings: Mapping[str, Any], plan: Plan) -> SettingAdvice:
        """The settings with the figures of the plan that has them."""
        then = Figures.of(plan)
        return SettingAdvice(settings=settings, step_time=then.step_time, peak_memory=then.peak_memory, fits=then.fits)

    def words(self, yours: Figures) -> str:
        """The settings and what they bring, such as `--sequence-parallel: 4% faster, 3.00 GiB less`."""
        names = " ".join(_said(name, value) for name, value in self.settings.items())
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


def _said(name: str, value: Any) -> str:
    return f"leave out {name}" if value is None else name if value is True else f"{name} {value}"


def advised(
    importer: Importer, settings: Settings, path: Path, given: UserFacts, yours: Plan
) -> tuple[SettingAdvice, ...]:
    """Predict a job with each of its framework's switches on, and in smaller micro-batches, and keep what helps.

    Args:
        importer: The framework's.
        settings: The job's settings.
        path: Their file.
        given: What its user adds.
        yours: The job's plan.

    Returns:
        The settings with which the job fits where it did not, or its step is at least 1% shorter than without them and
        than with fewer of them, the fastest first.  Where it fits with none, those that leave it the least memory.
    """
    found = [now := SettingAdvice.of({}, yours)]
    least = now
    for on, job in _changed_jobs(importer, settings, path, given, yours.options):
        with suppress(DebubbleError):
            then = SettingAdvice.of(on, job.plan(given.cluster))
            fewer = [each for each in found if each.settings.items() <= on.items()]
            faster = then.step_time <= (1 - MIN_GAIN) * min(each.step_time for each in fewer)
            least = min(least, then, key=lambda each: each.peak_memory)
            if then.fits and (faster or not any(each.fits for each in fewer)):
                found.append(then)
            if SIZE in on and then.fits:
                # Smaller ones are slower.
                break
    if not any(each.fits for each in found) and least.peak_memory < (1 - MIN_GAIN) * now.peak_memory:
        return (least,)
    return tuple(sorted(found[1:], key=lambda each: each.step_time))


def _changed_jobs(
    importer: Importer, settings: Settings, path: Path, given: UserFacts, options: RunOptions
) -> Iterator[tuple[Settings, ImportedJob]]:
    """The job with each switch on, and in smaller micro-batches, of which it takes more."""
    for on in importer.switches(settings, options):
        changed = {name: value for name, value in {**settings, **on}.items() if on.get(name, ...) is not None}
        with suppress(DebubbleError):
            yield on, importer.job(changed, path, given)
    job, size = importer.job(settings, path, given), options.micro_batch_size
    while size % 2 == 0:
        size //= 2
        number = job.micro_batches * options.micro_batch_size // size
        # What a framework does may follow from how many micro-batches there are.
        again = importer.job(settings, path, replace(given, micro_batches=number))
        yield {SIZE: size}, replace(again, options=replace(again.options, micro_batch_size=size), passes=job.passes)


SIZE = "micro-batch size"
"""The name of smaller micro-batches, whatever a framework's setting for them is."""


def advice_words(advice: Sequence[SettingAdvice], yours: Figures) -> str:
    """Say in a line which settings would help the job as it is, or, if it fits with none, which take least memory."""
    label = "Would help" if any(each.fits for each in advice) else "Least memory"
    return f"{label}: {'; '.join(each.words(yours) for each in advice)}."
