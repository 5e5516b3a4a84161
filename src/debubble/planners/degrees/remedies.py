"""Changes that help where nothing fits: each was tried, and fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from debubble.costs import model_units
from debubble.errors import readable
from debubble.ir import DebubbleError, RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.estimate import quick_bound, quick_step, step_bound
from debubble.planners.degrees.memory import too_large
from debubble.planners.degrees.search import Ranking, rank
from debubble.planners.degrees.space import Job, configurations
from debubble.search.effort import Effort

TRIED = 1.0
"""Seconds of the reference machine for the quick plans of one change, once one of them fits."""
MULTIPLES = (2, 3, 4, 5, 6, 8, 12, 16)
"""How many times as many devices are tried."""
LORA_RANK = 16
MOST = 3
"""Changes that are told."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with which the job fits, and what a quick plan of it takes."""

    change: str
    degrees: Degrees
    step_time: float
    """Seconds of a step."""

    def __str__(self) -> str:
        return f"{self.change}: {self.step_time:.4g} s per step"


def remedies(job: Job) -> list[Remedy]:
    """The first changes that fit, cheapest first: other degrees, LoRA, a smaller optimizer, more devices.

    Args:
        job: What did not fit; its fixed degrees are kept by all changes but the first.
    """
    return list(islice(_remedies(job), MOST))


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A job of which no choice of degrees fits.

    Attributes:
        job: The job.
        reason: A sentence that says why.
        remedies: Changes that were tried, and fit.
    """

    job: Job
    reason: str
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        changes = "; ".join(map(str, self.remedies))
        tried = f"What fits (quick plans, tried): {changes}." if changes else "No change that was tried fits."
        return f"Nothing fits.  {self.reason}  {states_sentence(self.job)}.  {tried}"


def misfit(job: Job, reason: str) -> Misfit:
    """Try changes of a job that does not fit, for a reason that planners gave."""
    return Misfit(job=job, reason=reason, remedies=tuple(remedies(job)))


def states_sentence(job: Job) -> str:
    """Say what the model's undivided states take, and what all devices together have."""
    options = replace(job.options, tensor=1, data=1, context=1, expert=1, zero=0, micro_batch_size=1)
    units = model_units(job.model, job.cluster, options, pipeline=job.cluster.count).units
    states = sum(float(unit.static) for unit in units)
    hosted = sum(float(unit.on_host.static if unit.on_host else unit.static) for unit in units)
    room = float(sum(job.cluster.memory_limits))
    return (
        f"One copy of the model's states is {readable(states)} ({readable(hosted)} with the optimizer on the host), and"
        f" a plan may use {readable(room)} on all {job.cluster.count} devices together"
    )


def option_words(degrees: Degrees) -> str:
    """The degrees as options of `plan`."""
    names = ("pipeline", "tensor", "data", "context", "expert", "zero", "micro_batch_size")
    values = degrees.to_dict()
    told = [(name, values[name]) for name in names if values[name] != getattr(Degrees(), name)]
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in told) or "--pipeline 1"


def _remedies(job: Job) -> Iterator[Remedy]:
    """Every change that fits."""
    if job.fixed:
        yield from _remedy("", replace(job, fixed={}))
    if not job.options.lora:
        yield from _remedy(f"--lora {LORA_RANK}", replace(job, options=replace(job.options, lora=LORA_RANK)))
    for multiple in MULTIPLES:
        larger = job.cluster.with_count(multiple * job.cluster.count)
        if larger is not None:
            change = f"--cluster {larger.to_dict()['devices']}"
            fitting = list(_remedy(change, replace(job, cluster=larger, fixed={})))
            yield from fitting
            if fitting:
                break
    if job.options.optimizer in ("adam", "adamw") and not job.options.lora:
        yield from _remedy("--optimizer adamw-8bit", _with(job, optimizer="adamw-8bit"))


def _remedy(change: str, job: Job) -> Iterator[Remedy]:
    """The remedy that a change is, with the best degrees for it, if it fits."""
    best = _best(job)
    if best is not None:
        degrees, step = best
        yield Remedy(change=" ".join(filter(None, [change, option_words(degrees)])), degrees=degrees, step_time=step)


def _with(job: Job, **options: str) -> Job:
    changed: RunOptions = replace(job.options, **options)  # type: ignore[arg-type]
    return replace(job, options=changed)


def _best(job: Job) -> tuple[Degrees, float] | None:
    """The fastest quick plan; None if none fits."""
    try:
        problems = {degrees: job.problem(degrees) for degrees in configurations(job)}
    except DebubbleError:
        return None
    effort = Effort(TRIED)
    ranking: Ranking[Degrees] = Ranking()
    rank(
        [degrees for degrees, problem in problems.items() if too_large(problem) is None],
        bounds=[lambda degrees: step_bound(problems[degrees]), lambda degrees: quick_bound(problems[degrees])],
        step=lambda degrees: quick_step(problems[degrees], spend=effort.spend)[0],
        count=1, ranking=ranking, over=lambda: effort.over,
    )  # fmt: skip
    return next(((degrees, ranking.steps[degrees]) for degrees in ranking.best(1)), None)
