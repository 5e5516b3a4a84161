"""How much a measured run says about similar runs: the shares that `debubble calibrate` uses, and their gain.

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
"""Whether a measured run has the model, kind and dtype, and options and degrees of the predicted one -> description."""
HEAD = ("what", "measured", "runs", "half within", "nine in ten within", "in the interval", "its ends' ratio")
"""Columns of the table."""
SHARES = ("model", "dtype", "job")
MAX_SHARED = 0.9
"""Upper limit of the error shared by runs of one job: those with the same memory are of one source."""
UNIT = {name: ErrorShares(**{other: float(other == name) for other in SHARES}) for name in SHARES}


@dataclass(frozen=True)
class Target:
    """A run whose figure is predicted with the help of other runs of its source.

    Attributes:
        row: The run.
        run: The run as a cluster file describes it.
        peers: Measured runs that have something in common with it.
    """

    row: Row
    run: MeasuredRun
    peers: tuple[MeasuredRun, ...]


def measured_run(row: Row, figure: Figure) -> MeasuredRun:
    """A record as `debubble calibrate` writes it; other switches count as another job here."""
    record = row["record"]
    measured = record.seconds if figure == "step" else record.memory
    run = described_run(record.model, record.cluster, record.options, run=record.name)
    switches = (str(getattr(record.options, name)) for name in (*SWITCHES, "framework"))
    job = ", ".join([run.job, *switches])
    return msgspec.structs.replace(run, job=job, **{figure: Deviation(predicted=row[figure], measured=measured)})


def targets(rows: Sequence[Row], figure: Figure, half: str | None = None) -> Iterator[Target]:
    """Runs of a half that have related runs of their source, in that half or in both.

    Args:
        rows: All runs.
        figure: The figure.
        half: The half of the others; None: both.
    """
    known = [(row, measured_run(row, figure)) for row in rows if f"{figure}_error" in row]
    for row, run in known:
        peers = tuple(
            other
            for known_row, other in known
            if known_row is not row
            and half in (None, known_row["record"].half)
            and known_row["record"].entries["source"] == row["record"].entries["source"]
            and any(_relation(run, other, figure))
        )
        if peers:
            yield Target(row, run, peers)


def _relation(a: MeasuredRun, b: MeasuredRun, figure: Figure) -> tuple[bool, bool, bool]:
    """Whether two runs have the same model, the same kind and dtype, and the same job."""
    model, dtype, job = (bool(UNIT[name].between(a, b, figure)) for name in SHARES)
    return model, dtype, job


def estimated(rows: Sequence[Row], figure: Figure) -> ErrorShares:
    """Shares that minimize the squared remaining deviations of the fit half.

    Deviations are relative to the spread of their group (kind of model and generation of hardware), and a run counts
    once for each kind of related runs, however many there are.
    """
    fit_rows = [row for row in rows if row["record"].half == "fit"]
    spread = _spreads(fit_rows, figure)
    lhs, rhs = [], []
    for target in targets(fit_rows, figure):
        value = _relative(target.run, target.run, figure)
        for kind in KINDS:
            peers = [other for other in target.peers if _relation(target.run, other, figure) == kind]
            for other in peers:
                weight = 1 / math.sqrt(len(peers)) / spread[_group(target.row)]
                known = _relative(other, target.run, figure)
                lhs.append([weight * known * common for common in kind])
                rhs.append(weight * value)
    model, dtype, job = (
        round(max(0.0, float(share)), 2) for share in np.linalg.lstsq(np.array(lhs), np.array(rhs), rcond=None)[0]
    )
    return ErrorShares(model=model, dtype=dtype, job=round(min(job, MAX_SHARED - model - dtype), 2))


def _relative(run: MeasuredRun, target: MeasuredRun, figure: Figure) -> float:
    """A run's deviation, relative to the target's measured memory."""
    value = run.deviation(figure)
    assert value is not None
    return value if figure == "step" else value / (target.memory or Deviation(predicted=1, measured=1)).measured


def _spreads(rows: Sequence[Row], figure: Figure) -> dict[tuple[str, ...], float]:
    """Group -> root mean square of its deviations."""
    squares: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if f"{figure}_error" in row:
            squares.setdefault(_group(row), []).append(math.log1p(row[f"{figure}_error"]) ** 2)
    return {group: math.sqrt(sum(group_squares) / len(group_squares)) for group, group_squares in squares.items()}


def _group(row: Row) -> tuple[str, ...]:
    """Kind of model and generation of hardware."""
    record = row["record"]
    return group_of(record.model, record.device, record.entries.get("dtype", "bf16"))[:2]


@dataclass(frozen=True)
class Outcome:
    """A prediction with measured runs.

    Attributes:
        weight: Weight of the outcome; those of a run, one per choice of related runs, sum to one.
        error: The share by which the prediction is off.
        inside: Whether what was measured is in the interval.
        width: The interval's upper end over its lower one.
    """

    weight: float
    error: float
    inside: bool
    width: float


def outcomes(
    target: Target, figure: Figure, stated: Stated, chosen: Sequence[Sequence[MeasuredRun]]
) -> Iterator[Outcome]:
    """Predictions of a run from each choice of measured runs."""
    record = target.row["record"]
    groups = groups_of(record.model, record.device, record.entries.get("dtype", "bf16"))
    accuracy = next(stated[figure][name] for name in groups if name in stated[figure])
    predicted, measured = target.row[figure], record.seconds if figure == "step" else record.memory
    for runs in chosen:
        change = correction(figure, runs, target.run)
        value = change.corrected(figure, predicted)
        interval = accuracy.corrected(change).scaled_to(value)
        yield Outcome(
            weight=1 / len(chosen), error=abs(value / measured - 1),
            inside=bool(interval.low <= measured <= interval.high), width=interval.high / interval.low,
        )  # fmt: skip


def lines(rows: Sequence[Row], stated: Stated) -> Iterator[tuple[str, ...]]:
    """Gain of calibration on the test half: from one related run of each kind, and from all."""
    for figure in FIGURES:
        test_targets = [target for target in targets(rows, figure) if target.row["record"].half == "test"]
        for kind, words in KINDS.items():
            yield from _line(figure, f"one run of {words}", test_targets, stated, _one(kind, figure))
        yield from _line(figure, "all of these", test_targets, stated, lambda target: [target.peers])


def _one(kind: tuple[bool, bool, bool], figure: Figure) -> Callable[[Target], Sequence[Sequence[MeasuredRun]]]:
    return lambda target: [[other] for other in target.peers if _relation(target.run, other, figure) == kind]


def _line(
    figure: Figure, words: str, test_targets: Sequence[Target], stated: Stated,
    choices: Callable[[Target], Sequence[Sequence[MeasuredRun]]],
) -> Iterator[tuple[str, ...]]:  # fmt: skip
    """A line of the table; none if no run has such related runs."""
    having = [target for target in test_targets if choices(target)]
    if not having:
        return
    before = [outcome for target in having for outcome in outcomes(target, figure, stated, [()])]
    after = [outcome for target in having for outcome in outcomes(target, figure, stated, choices(target))]
    half, ninth_decile = ([f"{_quantile(sample, share):.1%}" for sample in (before, after)] for share in (0.5, 0.9))
    inside = [f"{_mean(sample, lambda outcome: outcome.inside):.0%}" for sample in (before, after)]
    widths = [f"{math.exp(_mean(sample, lambda outcome: math.log(outcome.width))):.2f}" for sample in (before, after)]
    yield (figure, words, str(len(having)), *(" > ".join(pair) for pair in (half, ninth_decile, inside, widths)))


def _quantile(outcomes: Sequence[Outcome], share: float) -> float:
    """The error that this share of the weight does not exceed."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.error)
    weights = np.cumsum([outcome.weight for outcome in ordered])
    return ordered[min(len(ordered) - 1, int(np.searchsorted(weights, share * weights[-1], side="right")))].error


def _mean(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return sum(outcome.weight * value(outcome) for outcome in outcomes) / sum(outcome.weight for outcome in outcomes)
