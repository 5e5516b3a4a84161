"""Corrections of predictions by the user's own measured runs.

The deviation of a run (log of measured over predicted seconds, or measured minus predicted bytes) has a component in
common with similar runs and one of its own.  `ErrorShares` has the common fractions for a run of the same model, of the
same kind of model and dtype, and of the same job (whose replicas, batch, schedule and recomputation may differ; for
memory, not the micro-batch size), on the same type of device and with the same framework.  They are estimated by least
squares on half of the published runs (`python -m measured --docs`).  A correction is the best linear estimate of the
deviation from the measured runs: with one run, the common fraction times that run's deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from debubble.costs.frameworks import framework_name
from debubble.formatting import size_words, time_words
from debubble.ir import InputError, RunOptions
from debubble.models.architecture import Architecture

if TYPE_CHECKING:
    from debubble.costs.devices.cluster import Cluster

Figure = Literal["step", "memory"]
FIGURES: tuple[Figure, ...] = ("step", "memory")
MAX_RATIO = 10.0
"""Largest accepted ratio of measured and predicted figures; a larger one means that another run was measured."""

MIN_UNCERTAINTY = 0.6
"""Lower limit of `Correction.uncertainty`; with less, intervals of runs of one job covered fewer than nine in ten of
the published figures."""


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure of a run as predicted without corrections, and as measured."""

    predicted: float
    measured: float


class MeasuredRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A measured run in a cluster file: its job, seconds per step, and peak bytes of the fullest device."""

    run: str
    device: str
    family: str
    hidden: int
    dtype: str
    experts: bool = False
    framework: str = ""
    job: str = ""
    """Degrees and options without the replicas, from `job_words`; empty: written by an earlier version."""
    micro_batch_size: int = 1
    step: Deviation | None = None
    memory: Deviation | None = None
    date: str = ""
    version: str = ""
    """The debubble version that predicted the figures."""

    @property
    def where(self) -> str:
        """A phrase with the device type and the `--framework` option."""
        return f"{self.device} with {f'--framework {self.framework}' if self.framework else 'no --framework'}"

    @property
    def kind(self) -> str:
        """A phrase with the kind of model and its dtype."""
        return f"{'mixtures of experts' if self.experts else 'dense models'} in {self.dtype}"

    def deviation(self, figure: Figure) -> float | None:
        """The log of measured over predicted seconds, or measured minus predicted bytes; None: not measured."""
        if figure == "step":
            return None if self.step is None else math.log(self.step.measured / self.step.predicted)
        return None if self.memory is None else self.memory.measured - self.memory.predicted


class ErrorShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fractions of a run's deviation in common with runs that share one property with it; they add up."""

    model: float
    """The fraction in common with runs of the same model."""
    dtype: float
    """The fraction in common with runs of the same kind of model (dense or mixture of experts) in the same dtype."""
    job: float
    """The fraction in common with runs of the same model and dtype with the same options and degrees but replicas."""

    @property
    def of_model(self) -> float:
        """The fraction in common with runs of the same model and dtype."""
        return self.model + self.dtype

    @property
    def of_job(self) -> float:
        """The fraction in common with runs of the same job."""
        return self.of_model + self.job

    def between(self, a: MeasuredRun, b: MeasuredRun, figure: Figure) -> float:
        """The fraction of a figure's deviation that two runs have in common."""
        if (a.device, a.framework) != (b.device, b.framework):
            return 0.0
        same_model = (a.family, a.hidden, a.experts) == (b.family, b.hidden, b.experts)
        same_dtype = (a.experts, a.dtype) == (b.experts, b.dtype)
        same_job = same_model and same_dtype and a.job == b.job != ""
        if figure == "memory":
            same_job = same_job and a.micro_batch_size == b.micro_batch_size
        return self.model * same_model + self.dtype * same_dtype + self.job * same_job


@dataclass(frozen=True)
class Correction:
    """A correction of a prediction by measured runs.

    Attributes:
        deviation: The log of a factor of the predicted seconds, or bytes to add to the predicted ones.
        runs: Measured runs that it was estimated from; 0: none is similar to the predicted one.
        weight: Sum of the runs' weights: the fraction of a bias common to all runs that is corrected.
        uncertainty: Standard deviation of the residual, as a fraction of that without the correction.
    """

    deviation: float = 0.0
    runs: int = 0
    weight: float = 0.0
    uncertainty: float = 1.0

    @property
    def factor(self) -> float:
        """The factor of the predicted seconds."""
        return math.exp(self.deviation)

    def corrected(self, figure: Figure, predicted: float) -> float:
        """Correct a predicted figure: multiply seconds by the factor, or add the bytes."""
        return predicted * self.factor if figure == "step" else predicted + self.deviation


def described_run(model: Architecture, cluster: Cluster, options: RunOptions, *, run: str = "") -> MeasuredRun:
    """Describe a run of a model as a cluster file does, without figures.

    Args:
        model: The model.
        cluster: The devices.
        options: How the model is run.
        run: A name for the run.
    """
    return MeasuredRun(
        run=run, device=cluster.slowest.name, family=model.family, hidden=model.hidden, dtype=options.dtype,
        experts=model.experts is not None, framework=framework_name(options.framework),
        job=job_words(cluster.count, options), micro_batch_size=options.micro_batch_size,
    )  # fmt: skip


SWITCHES = ("expert_overlap", "gradient_dtype", "moment_dtype", "master_dtype", "sequence_parallel", "zero")
"""Options that are switches, such as an overlap of the framework: a job with another value is the same job."""
_EXCLUDED = ("data", "dtype", "framework", "micro_batch_size", "post_validation", "host_optimizer", *SWITCHES)
"""Options that `job_words` leaves out: runs of one job may differ in them, or MeasuredRun has them elsewhere."""


def job_words(devices: int, options: RunOptions) -> str:
    """The key of a job: its pipeline degree and its options with other values than the defaults, without switches.

    A job with another switch keeps its correction, so that the predicted gain of the switch stays.
    """
    pipeline = devices // (options.tensor * options.context * options.data)
    framework = [options.framework.partition(",")[0]] if framework_name(options.framework) else []
    zero = ["zero 3"] if options.zero == 3 else []
    changed = [
        f"{f.name} {value}"
        for f in fields(options)
        if f.name not in _EXCLUDED and (value := getattr(options, f.name)) != f.default
    ]
    return ", ".join([f"pipeline {pipeline}", *changed, *zero, *framework])


def correction(figure: Figure, runs: Sequence[MeasuredRun], job: MeasuredRun) -> Correction:
    """Estimate the correction of a job's step or memory from measured runs.

    Args:
        figure: The figure.
        runs: The measured runs.
        job: The job, as `described_run` describes it.

    Returns:
        The correction; it changes nothing if no run is similar to the job.

    Example:
        >>> from debubble.costs.calibration import Deviation
        >>> described = dict(run="a", device="H100-80GB", family="llama", hidden=4096, dtype="bf16")
        >>> run = MeasuredRun(**described, step=Deviation(predicted=4.0, measured=4.4))
        >>> 1 < correction("step", [run], run).factor < 1.1
        True
    """
    shares = error_shares()[figure]
    similar = [
        (run, value)
        for run in runs
        if shares.between(run, job, figure) and (value := run.deviation(figure)) is not None
    ]
    if not similar:
        return Correction()
    between = np.array([[1.0 if a is b else shares.between(a, b, figure) for b, _ in similar] for a, _ in similar])
    common = np.array([shares.between(run, job, figure) for run, _ in similar])
    weights = np.linalg.solve(between, common)
    residual_variance = 1.0 - float(weights @ common)
    return Correction(
        deviation=float(weights @ [value for _, value in similar]), runs=len(similar), weight=float(weights.sum()),
        uncertainty=max(MIN_UNCERTAINTY, math.sqrt(max(0.0, residual_variance))),
    )  # fmt: skip


def corrections(model: Architecture, cluster: Cluster, options: RunOptions) -> tuple[Correction, Correction]:
    """Estimate the corrections of a job's step and memory from a cluster's measured runs.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    if not cluster.calibration:
        return Correction(), Correction()
    job = described_run(model, cluster, options)
    return correction("step", cluster.calibration, job), correction("memory", cluster.calibration, job)


def missing_calibration(model: Architecture, cluster: Cluster, options: RunOptions) -> str | None:
    """A phrase with the runs that would calibrate a job; None: a measured run does, or the cluster has none.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    if not cluster.calibration or any(entry.runs for entry in corrections(model, cluster, options)):
        return None
    job = described_run(model, cluster, options)
    return f"{model.family} of hidden size {model.hidden}, or {job.kind}, on {job.where}"


def other_frameworks(model: Architecture, cluster: Cluster, options: RunOptions) -> tuple[str, ...]:
    """The frameworks of measured runs that would be similar to a job if it ran in them.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    job, runs = described_run(model, cluster, options), cluster.calibration

    def is_similar(framework: str) -> bool:
        moved = msgspec.structs.replace(job, framework=framework)
        return any(correction(figure, runs, moved).runs for figure in FIGURES)

    return tuple(filter(is_similar, sorted({run.framework for run in runs} - {"", job.framework})))


def calibration_words(model: Architecture, cluster: Cluster, options: RunOptions) -> str | None:
    """A sentence on the correction of a prediction by a cluster's measured runs; None: the cluster has none.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    if not cluster.calibration:
        return None
    needed = missing_calibration(model, cluster, options)
    if needed is not None:
        return f"No measured run of the cluster is like this job: it takes one of {needed}."
    step, memory = corrections(model, cluster, options)
    count = max(step.runs, memory.runs)
    changes = [f"the step {step.factor:.2f} times"] if step.runs else []
    if memory.runs:
        changes.append(f"memory by {'-' if memory.deviation < 0 else '+'}{size_words(abs(memory.deviation))}")
    return (
        f"The prediction is corrected by {count} measured run{'s' * (count > 1)} of the cluster:"
        f" {' and '.join(changes)}."
    )


def check_run(run: MeasuredRun) -> None:
    """Raise InputError for figures that no run can have."""
    for name, figure in (("step", run.step), ("memory", run.memory)):
        if figure is None:
            continue
        if not all(math.isfinite(value) and value > 0 for value in (figure.predicted, figure.measured)):
            raise InputError(f"The calibration by '{run.run}' has a {name} that is not positive.")
        if not 1 / MAX_RATIO <= figure.measured / figure.predicted <= MAX_RATIO:
            measured, predicted = (
                size_words(value) if name == "memory" else time_words(value, seconds=True)
                for value in (figure.measured, figure.predicted)
            )
            raise InputError(
                f"'{run.run}' measured a {name} of {measured} where {predicted} is predicted, more"
                f" than {MAX_RATIO:.0f} times off: check that the plan is the one that ran, and the units."
            )


@cache
def error_shares() -> Mapping[Figure, ErrorShares]:
    """The fractions of deviations that runs have in common, by figure."""
    content = files("debubble.costs").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(content, type=dict[Figure, ErrorShares])
