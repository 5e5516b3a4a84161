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

EXAMPLE_RUNS = 3
"""Number of runs in the sentence on how much several runs correct."""


@dataclass(frozen=True, kw_only=True)
class CalibratedFigure:
    """A figure of the measured plan: seconds per step, or bytes on the fullest device.

    Attributes:
        predicted: Prediction without corrections.
        measured: Value measured by the run.
        corrected: Prediction for the plan on the calibrated cluster.
        before: Interval of the prediction without corrections, and the published runs that it comes from.
        after: Interval of the corrected prediction, for other runs of the same job; this run may lie outside.
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
        replaced: Whether the cluster already had that run.
        devices: The devices on which the plan ran.
        figures: The measured figures of the run.
    """

    cluster: Cluster
    run: MeasuredRun
    replaced: bool
    devices: str
    figures: dict[Figure, CalibratedFigure]

    def sentences(self) -> Iterator[str]:
        """Describe predicted and measured figures, the new predictions, and the runs that they apply to."""
        for quantity, figure in self.figures.items():
            words = size_words if quantity == "memory" else _seconds
            before, after = ([words(error.low), words(error.high)] for error in (figure.before, figure.after))
            yield (
                f"{quantity.capitalize()}: predicted {words(figure.predicted)}, measured {words(figure.measured)}"
                f" ({figure.ratio:.3f} times); now predicted {words(figure.corrected)}, and other runs of"
                f" the job {after[0]} to {after[1]} (before: {before[0]} to {before[1]})."
            )
            if not any(error.low <= figure.measured <= error.high for error in (figure.before, figure.after)):
                yield (
                    f"The measured {quantity} is outside both, unlike nine in ten published runs: check that the run"
                    " has this plan's model, batch and devices."
                )
        for quantity in self.figures:
            shares = error_shares()[quantity]
            several = EXAMPLE_RUNS * shares.of_model / (1 + (EXAMPLE_RUNS - 1) * shares.of_model)
            yield (
                f"The run moves the {quantity} of its own job by {100 * shares.of_job:.0f}% of the difference, and that"
                f" of other jobs of its model and dtype by {100 * shares.of_model:.0f}% ({EXAMPLE_RUNS} such runs by"
                f" {100 * several:.0f}%): so much is common to published runs that are alike."
            )
        if self.replaced:
            yield "The cluster file had this run already: its figures are replaced."
        if self.cluster.file["devices"] != self.devices:
            yield f"The plan ran on {self.devices}; the file is of {self.cluster.file['devices']}."
        run = self.run
        yield f"It corrects {run.family} of hidden size {run.hidden}, and less so other {run.kind}, on {run.where}."


def calibrate(
    plan: Plan, measured: MeasuredFigures, *, cluster: Cluster | None = None, date: str = ""
) -> CalibratedCluster:
    """Correct a cluster's predictions by the measured figures of a plan's run.

    Earlier figures of the same run (equal degrees, sequence length, schedule and recomputation) are replaced.

    Args:
        plan: The plan that ran, at computed costs.
        measured: The measured figures.
        cluster: The cluster with its earlier measured runs; None: the plan's.
        date: Date of the measurement, recorded in the file.

    Returns:
        The cluster with the run, and the changed predictions.

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
    plan_cluster = described.cluster
    base, device = cluster or plan_cluster, plan_cluster.slowest.name
    if base.slowest.name != device:
        raise InputError(f"The plan ran on {device}, not {base.slowest.name}: give a cluster file of that device.")
    named = described_run(described.model, plan_cluster, plan.options, run=_name(plan, plan_cluster))
    figures_of_plan = Figures.from_plan(plan)
    deviations = {
        quantity: Deviation(predicted=predicted, measured=value)
        for quantity, predicted in _uncorrected(plan, described, figures_of_plan).items()
        if (value := getattr(measured, quantity)) is not None
    }
    at_peak = (figures_of_plan.mfu or 0.0) * figures_of_plan.step_time
    if measured.step is not None and measured.step < at_peak:
        needed = percent(at_peak, measured.step)
        raise InputError(
            f"A step of {_seconds(measured.step)} would need {needed} of the devices' peak FLOPs: check that the plan"
            " is the one that ran, and the units."
        )
    if measured.memory is not None and measured.memory > plan_cluster.slowest.memory:
        capacity = size_words(plan_cluster.slowest.memory)
        raise InputError(f"{device} has {capacity}, less than the measured {size_words(measured.memory)}.")
    earlier, other_runs = named, []
    for other in base.calibration:
        if _without_figures(other) == named:
            earlier = other
        else:
            other_runs.append(other)
    run = msgspec.structs.replace(earlier, date=date, version=__version__, **deviations)
    runs = msgspec.to_builtins([*other_runs, run])
    corrected = Cluster.from_dict({**base.file, "calibration": runs})
    # The file may be of other devices; the figures are those of the devices that were measured.
    calibrated = ModelOnCluster(described.model, Cluster.from_dict({**plan_cluster.file, "calibration": runs}))
    figures = {quantity: _figure(quantity, error, plan, calibrated) for quantity, error in deviations.items()}
    return CalibratedCluster(
        cluster=corrected, run=run, replaced=earlier is not named, devices=str(plan_cluster.file["devices"]),
        figures=figures,
    )  # fmt: skip


def lost_runs(earlier: Cluster, later: Cluster) -> int:
    """Number of measured runs of a cluster that a later version of it lacks, whatever they measured."""
    present = {_without_figures(run) for run in later.calibration}
    return sum(_without_figures(run) not in present for run in earlier.calibration)


def _name(plan: Plan, cluster: Cluster) -> str:
    """The devices, degrees, schedule and recomputation that distinguish a run from others of its model."""
    recomputed = "; ".join(dict.fromkeys(plan.recompute))
    return (
        f"{cluster.file['devices']}, {plan.degrees} x {plan.options.sequence_length} tokens, {plan.schedule.name},"
        f" recomputing {recomputed}"
    )


def _uncorrected(plan: Plan, described: ModelOnCluster, predicted: Figures) -> dict[Figure, float]:
    """The plan's predicted figures without the corrections by its cluster's measured runs."""
    step, memory = corrections(*described, plan.options)
    return {"step": predicted.step_time / step.factor, "memory": predicted.peak_memory - memory.deviation}


def _figure(quantity: Figure, figure: Deviation, plan: Plan, corrected_cluster: ModelOnCluster) -> CalibratedFigure:
    """A measured figure and its prediction on the corrected cluster."""
    model, cluster = corrected_cluster
    correction = corrections(model, cluster, plan.options)[FIGURES.index(quantity)]
    corrected_value = correction.corrected(quantity, figure.predicted)
    plain = accuracy_of(quantity, model, replace(cluster, calibration=()), plan.options)
    return CalibratedFigure(
        predicted=figure.predicted, measured=figure.measured, corrected=corrected_value,
        before=plain.scaled_to(figure.predicted), after=plain.corrected(correction).scaled_to(corrected_value),
    )  # fmt: skip


def _without_figures(run: MeasuredRun) -> MeasuredRun:
    return msgspec.structs.replace(run, step=None, memory=None, date="", version="")


def _seconds(value: float) -> str:
    return time_words(value, seconds=True)
