"""A cluster whose predictions are corrected by a measured run of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from debubble import __version__
from debubble.costs import Cluster
from debubble.costs.accuracy import Accuracy, accuracy_of
from debubble.costs.calibration import FIGURES, Deviation, Figure, MeasuredRun, corrections, described_run, error_shares
from debubble.formatting import percent, size_words, time_words
from debubble.imports.figures import Figures
from debubble.imports.logs import MeasuredFigures
from debubble.ir import InputError
from debubble.plans import ModelOnCluster, Plan

RUNS = 3
"""Runs for which it is told how much more they correct than one."""


@dataclass(frozen=True, kw_only=True)
class CalibratedFigure:
    """A figure of the measured plan: seconds, or bytes of the fullest device.

    Attributes:
        predicted: Without corrections.
        measured: What the run measured.
        corrected: What is now predicted for the plan.
        before: The interval without corrections, with the published runs that it is from.
        after: The interval now.
    """

    predicted: float
    measured: float
    corrected: float
    before: Accuracy
    after: Accuracy

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class CalibratedCluster:
    """A cluster with one more measured run.

    Attributes:
        cluster: The cluster.
        run: The measured run.
        replaced: Whether the cluster had that run before.
        figures: Its figures, those that were measured.
    """

    cluster: Cluster
    run: MeasuredRun
    replaced: bool
    figures: dict[Figure, CalibratedFigure]

    def sentences(self) -> Iterator[str]:
        """Say what was predicted and measured, what is predicted now, and for which runs."""
        for what, figure in self.figures.items():
            words = size_words if what == "memory" else _seconds
            before, after = ([words(end) for end in (each.low, each.high)] for each in (figure.before, figure.after))
            yield (
                f"{what.capitalize()}: predicted {words(figure.predicted)}, measured {words(figure.measured)}"
                f" ({figure.ratio:.3f} times); now predicted {words(figure.corrected)}, {after[0]} to {after[1]}"
                f" (before: {before[0]} to {before[1]})."
            )
        for what in self.figures:
            shares = error_shares()[what]
            several = RUNS * shares.of_model / (1 + (RUNS - 1) * shares.of_model)
            yield (
                f"The run moves the {what} of its own job by {100 * shares.of_job:.0f}% of the difference, and that of"
                f" other jobs of its model and dtype by {100 * shares.of_model:.0f}% ({RUNS} such runs by"
                f" {100 * several:.0f}%): so much is common to published runs that are alike."
            )
        if self.replaced:
            yield "The cluster file had this run already: its figures are replaced."
        run = self.run
        yield f"It corrects {run.family} of hidden size {run.hidden}, and less so other {run.kind}, on {run.where}."


def calibrate(
    plan: Plan, measured: MeasuredFigures, *, cluster: Cluster | None = None, date: str = ""
) -> CalibratedCluster:
    """Correct a cluster's predictions by what a plan's run measured.

    What the same run, of equal degrees, lengths, schedule and recomputation, measured before is replaced.

    Args:
        plan: The plan that ran, at computed costs.
        measured: What was measured.
        cluster: The cluster, with the measured runs that it has; None: the plan's.
        date: When it was measured, for readers of the file.

    Returns:
        The cluster with the run, and what changes.

    Raises:
        InputError: If nothing was measured, the plan is of no model or has a profile, or the cluster has other devices.
    """
    described = plan.model_on_cluster
    if described is None:
        raise InputError("Only a MODEL's plan can be calibrated; this one is of abstract costs.")
    if plan.profile is not None:
        raise InputError("The plan has measured units already: calibrate one that was made without --profile.")
    if measured.step is None and measured.memory is None:
        raise InputError("Give a log or trace of the run, --step SECONDS or --memory SIZE.")
    own = described.cluster
    base, device = cluster or own, own.slowest.name
    if base.slowest.name != device:
        raise InputError(f"The plan ran on {device}, not {base.slowest.name}: give a cluster file of that device.")
    named = described_run(described.model, own, plan.options, run=_name(plan, own))
    figures_of_plan = Figures.of(plan)
    deviations = {
        what: Deviation(predicted=predicted, measured=value)
        for what, predicted in _uncorrected(plan, described, figures_of_plan).items()
        if (value := getattr(measured, what)) is not None
    }
    at_peak = (figures_of_plan.mfu or 0.0) * figures_of_plan.step_time
    if measured.step is not None and measured.step < at_peak:
        needed = percent(at_peak, measured.step)
        raise InputError(
            f"A step of {_seconds(measured.step)} would need {needed} of the devices' peak FLOPs: check that the plan"
            " is the one that ran, and the units."
        )
    earlier, others = named, []
    for other in base.calibration:
        if _without_figures(other) == named:
            earlier = other
        else:
            others.append(other)
    run = msgspec.structs.replace(earlier, date=date, version=__version__, **deviations)
    corrected = Cluster.from_dict({**base.file, "calibration": msgspec.to_builtins([*others, run])})
    now = ModelOnCluster(described.model, corrected)
    figures = {what: _figure(what, each, plan, now) for what, each in deviations.items()}
    return CalibratedCluster(cluster=corrected, run=run, replaced=earlier is not named, figures=figures)


def _name(plan: Plan, cluster: Cluster) -> str:
    """Describe what tells a run from others of its model."""
    recomputed = "; ".join(dict.fromkeys(plan.recompute))
    return (
        f"{cluster.file['devices']}, {plan.degrees} x {plan.options.sequence_length} tokens, {plan.schedule.name},"
        f" recomputing {recomputed}"
    )


def _uncorrected(plan: Plan, described: ModelOnCluster, predicted: Figures) -> dict[Figure, float]:
    """The plan's predicted figures without the measured runs of its cluster."""
    step, memory = corrections(*described, plan.options)
    return {"step": predicted.step_time / step.factor, "memory": predicted.peak_memory - memory.deviation}


def _figure(what: Figure, figure: Deviation, plan: Plan, corrected: ModelOnCluster) -> CalibratedFigure:
    """A measured figure, as it is predicted on the corrected cluster."""
    model, cluster = corrected
    found = corrections(model, cluster, plan.options)[FIGURES.index(what)]
    now = found.corrected(what, figure.predicted)
    plain = accuracy_of(what, model, replace(cluster, calibration=()), plan.options)
    return CalibratedFigure(
        predicted=figure.predicted, measured=figure.measured, corrected=now, before=plain.scaled_to(figure.predicted),
        after=plain.corrected(found).scaled_to(now),
    )  # fmt: skip


def _without_figures(run: MeasuredRun) -> MeasuredRun:
    return msgspec.structs.replace(run, step=None, memory=None, date="", version="")


def _seconds(value: float) -> str:
    return time_words(value, seconds=True)
