"""How much a measured run says of runs like it: the shares that `debubble calibrate` uses, and what it gains.

The shares are estimated on the half of the records that is there to fit costs to; what is gained is told of the other
half alone.  Runs are compared with those of the same source, on the same devices and with the same framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from debubble.costs.accuracy import Accuracy, group_of, groups_of
from debubble.costs.calibration import (
    FIGURES,
    SWITCHES,
    Deviation,
    ErrorShares,
    Figure,
    MeasuredRun,
    correction,
    described_run,
)

Row = Mapping[str, Any]
Stated = Mapping[Figure, Mapping[str, Accuracy]]
KINDS: Mapping[tuple[bool, bool, bool], str] = {
    (True, True, True): "the same job",
    (True, True, False): "the same model and dtype",
    (True, False, False): "the same model, another dtype",
    (False, True, False): "another model, the same dtype",
}
"""Whether a measured run has the model, kind and dtype, and options and degrees of the predicted one -> its words."""
HEAD = ("what", "measured", "runs", "half within", "nine in ten within", "in the interval", "its ends' ratio")
"""The columns of the table."""
SHARES = ("model", "dtype", "job")
MOST_SHARED = 0.9
"""The most that runs of one job are taken to share: those whose memory is alike are of one source."""
UNIT = {name: ErrorShares(**{each: float(each == name) for each in SHARES}) for name in SHARES}


@dataclass(frozen=True)
class Target:
    """A run whose figure is predicted with the help of others of its source.

    Attributes:
        row: The run.
        run: The run as a cluster file describes it.
        others: Measured runs that have something in common with it.
    """

    row: Row
    run: MeasuredRun
    others: tuple[MeasuredRun, ...]


def measured_run(row: Row, what: Figure) -> MeasuredRun:
    """A record as `debubble calibrate` writes it; one with other switches counts as another job here."""
    record = row["record"]
    measured = record.seconds if what == "step" else record.memory
    run = described_run(record.model, record.cluster, record.options, run=record.name)
    switches = (str(getattr(record.options, name)) for name in (*SWITCHES, "framework"))
    job = ", ".join([run.job, *switches])
    return msgspec.structs.replace(run, job=job, **{what: Deviation(predicted=row[what], measured=measured)})


def targets(rows: Sequence[Row], what: Figure, half: str | None = None) -> Iterator[Target]:
    """The runs of a half that others of their source have something in common with, of that half or of both.

    Args:
        rows: All runs.
        what: The figure.
        half: The half of the others; None: both.
    """
    known = [(row, measured_run(row, what)) for row in rows if f"{what}_error" in row]
    for row, run in known:
        others = tuple(
            other
            for each, other in known
            if each is not row
            and half in (None, each["record"].half)
            and each["record"].entries["source"] == row["record"].entries["source"]
            and any(_alike(run, other, what))
        )
        if others:
            yield Target(row, run, others)


def _alike(a: MeasuredRun, b: MeasuredRun, what: Figure) -> tuple[bool, bool, bool]:
    """Whether two runs are of the same model, of the same kind and dtype, and of the same job."""
    model, dtype, job = (bool(UNIT[name].between(a, b, what)) for name in SHARES)
    return model, dtype, job


def estimated(rows: Sequence[Row], what: Figure) -> ErrorShares:
    """The shares that give the least squares of what is left of the deviations of the half to fit costs to.

    A deviation is counted in units of its group's (kind of model and generation of hardware), and a run once with each
    kind of neighbours, however many it has.
    """
    given = [row for row in rows if row["record"].half == "fit"]
    spread = _spreads(given, what)
    left, right = [], []
    for target in targets(given, what):
        value = _relative(target.run, target.run, what)
        for kind in KINDS:
            others = [other for other in target.others if _alike(target.run, other, what) == kind]
            for other in others:
                weight = 1 / math.sqrt(len(others)) / spread[_group(target.row)]
                known = _relative(other, target.run, what)
                left.append([weight * known * common for common in kind])
                right.append(weight * value)
    model, dtype, job = (
        round(max(0.0, float(share)), 2) for share in np.linalg.lstsq(np.array(left), np.array(right), rcond=None)[0]
    )
    return ErrorShares(model=model, dtype=dtype, job=round(min(job, MOST_SHARED - model - dtype), 2))


def _relative(run: MeasuredRun, target: MeasuredRun, what: Figure) -> float:
    """A run's deviation, as a share of the target's measured memory."""
    value = run.deviation(what)
    assert value is not None
    return value if what == "step" else value / (target.memory or Deviation(predicted=1, measured=1)).measured


def _spreads(rows: Sequence[Row], what: Figure) -> dict[tuple[str, ...], float]:
    """Group -> the root of the mean square of its deviations."""
    squares: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if f"{what}_error" in row:
            squares.setdefault(_group(row), []).append(math.log1p(row[f"{what}_error"]) ** 2)
    return {group: math.sqrt(sum(each) / len(each)) for group, each in squares.items()}


def _group(row: Row) -> tuple[str, ...]:
    """Kind of model and generation of hardware."""
    record = row["record"]
    return group_of(record.model, record.device, record.entries.get("dtype", "bf16"))[:2]


@dataclass(frozen=True)
class Outcome:
    """A prediction with measured runs.

    Attributes:
        weight: What it counts: a run counts once, however many neighbours it is predicted from.
        error: The share by which the prediction is off.
        inside: Whether what was measured is in the interval.
        width: The interval's upper end over its lower one.
    """

    weight: float
    error: float
    inside: bool
    width: float


def outcomes(
    target: Target, what: Figure, stated: Stated, chosen: Sequence[Sequence[MeasuredRun]]
) -> Iterator[Outcome]:
    """The predictions of a run from each choice of measured runs."""
    record = target.row["record"]
    groups = groups_of(record.model, record.device, record.entries.get("dtype", "bf16"))
    accuracy = next(stated[what][name] for name in groups if name in stated[what])
    predicted, measured = target.row[what], record.seconds if what == "step" else record.memory
    for runs in chosen:
        found = correction(what, runs, target.run)
        value = found.corrected(what, predicted)
        interval = accuracy.corrected(found).scaled_to(value)
        yield Outcome(
            weight=1 / len(chosen), error=abs(value / measured - 1),
            inside=bool(interval.low <= measured <= interval.high), width=interval.high / interval.low,
        )  # fmt: skip


def lines(rows: Sequence[Row], stated: Stated) -> Iterator[tuple[str, ...]]:
    """What calibration gains on the half that is kept for testing: from one neighbour of each kind, and from all."""
    for what in FIGURES:
        found = [target for target in targets(rows, what) if target.row["record"].half == "test"]
        for kind, words in KINDS.items():
            yield from _line(what, f"one run of {words}", found, stated, _one(kind, what))
        yield from _line(what, "all of these", found, stated, lambda target: [target.others])


def _one(kind: tuple[bool, bool, bool], what: Figure) -> Callable[[Target], Sequence[Sequence[MeasuredRun]]]:
    return lambda target: [[other] for other in target.others if _alike(target.run, other, what) == kind]


def _line(
    what: Figure, words: str, found: Sequence[Target], stated: Stated,
    choices: Callable[[Target], Sequence[Sequence[MeasuredRun]]],
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    """A line of the table; none if no run has such neighbours."""
    having = [target for target in found if choices(target)]
    if not having:
        return
    before = [each for target in having for each in outcomes(target, what, stated, [()])]
    after = [each for target in having for each in outcomes(target, what, stated, choices(target))]
    half, most = ([f"{_quantile(each, share):.1%}" for each in (before, after)] for share in (0.5, 0.9))
    inside = [f"{_mean(each, lambda outcome: outcome.inside):.0%}" for each in (before, after)]
    widths = [f"{math.exp(_mean(each, lambda outcome: math.log(outcome.width))):.2f}" for each in (before, after)]
    yield (what, words, str(len(having)), *(" > ".join(pair) for pair in (half, most, inside, widths)))


def _quantile(outcomes: Sequence[Outcome], share: float) -> float:
    """The error that this share of the weight does not exceed."""
    ordered = sorted(outcomes, key=lambda each: each.error)
    weights = np.cumsum([each.weight for each in ordered])
    return ordered[min(len(ordered) - 1, int(np.searchsorted(weights, share * weights[-1], side="right")))].error


def _mean(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return sum(each.weight * value(each) for each in outcomes) / sum(each.weight for each in outcomes)
