"""Corrections of predictions by measured runs of one's own.

What a run measures beyond its prediction is partly shared by runs like it, and partly its own.  `shares` says how much
is shared with a run of the same model, of the same kind of model and dtype, and of the same job (whose replicas, batch,
schedule and recomputation may differ; for memory, not the size of micro-batches), on the same type of device and with
the same framework; they are estimated by least squares on half of the published runs (`python -m measured --docs`).  Of
the logarithm of measured over predicted seconds, and of the bytes that a device has beyond the predicted ones, a
correction is the best linear estimate from the measured runs: with one run, the share times what that run measured.
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
MOST_DEVIATION = 10.0
"""The most by which a prediction can be off: what is further off is another run than the plan's."""

LEAST_UNCERTAINTY = 0.6
"""The least standard deviation of what is left, over that without runs: with less, the intervals of runs of one job
held fewer than nine in ten of the published figures."""


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure of a run as it was predicted without corrections, and as it was measured."""

    predicted: float
    measured: float


class MeasuredRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A measured run in a cluster file: what it ran, seconds of a step, and bytes of the fullest device."""

    run: str
    device: str
    family: str
    hidden: int
    dtype: str
    experts: bool = False
    framework: str = ""
    job: str = ""
    """Degrees and options but for the replicas, as `job_words` has them; empty: an earlier version did not tell."""
    micro_batch_size: int = 1
    step: Deviation | None = None
    memory: Deviation | None = None
    date: str = ""
    version: str = ""
    """The version of debubble that predicted the figures."""

    @property
    def where(self) -> str:
        """The type of device and the framework, as the option that names it."""
        return f"{self.device} with {f'--framework {self.framework}' if self.framework else 'no --framework'}"

    @property
    def kind(self) -> str:
        """The kind of model, in words, and its dtype."""
        return f"{'mixtures of experts' if self.experts else 'dense models'} in {self.dtype}"

    def deviation(self, what: Figure) -> float | None:
        """The logarithm of measured over predicted seconds, or measured bytes beyond the predicted ones."""
        if what == "step":
            return None if self.step is None else math.log(self.step.measured / self.step.predicted)
        return None if self.memory is None else self.memory.measured - self.memory.predicted


class ErrorShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares of a run's deviation that runs have which are like it in one way; they add up."""

    model: float
    """The share of runs of the same model."""
    dtype: float
    """The share of runs of the same kind of model, dense or a mixture of experts, in the same dtype."""
    job: float
    """The share of runs of the same model and dtype with the same options and degrees, replicas apart."""

    @property
    def of_model(self) -> float:
        """The share of runs of the same model and dtype."""
        return self.model + self.dtype

    @property
    def of_job(self) -> float:
        """The share of runs of the same job."""
        return self.of_model + self.job

    def between(self, a: MeasuredRun, b: MeasuredRun, what: Figure) -> float:
        """The share of a figure's deviation that two runs have in common."""
        if (a.device, a.framework) != (b.device, b.framework):
            return 0.0
        same_model = (a.family, a.hidden, a.experts) == (b.family, b.hidden, b.experts)
        same_dtype = (a.experts, a.dtype) == (b.experts, b.dtype)
        same_job = same_model and same_dtype and a.job == b.job != ""
        if what == "memory":
            same_job = same_job and a.micro_batch_size == b.micro_batch_size
        return self.model * same_model + self.dtype * same_dtype + self.job * same_job


@dataclass(frozen=True)
class Correction:
    """A correction of a prediction by measured runs.

    Attributes:
        deviation: The logarithm of a factor of the predicted seconds, or bytes beyond the predicted ones.
        runs: Measured runs that it was estimated from; 0: none is like the predicted one.
        weight: The sum of the runs' weights: the share of what all runs have in common that is corrected.
        uncertainty: The standard deviation of what is left, over that without the runs.
    """

    deviation: float = 0.0
    runs: int = 0
    weight: float = 0.0
    uncertainty: float = 1.0

    @property
    def factor(self) -> float:
        """The factor of the predicted seconds."""
        return math.exp(self.deviation)

    def corrected(self, what: Figure, predicted: float) -> float:
        """A figure, as this correction of it has it: the seconds times the factor, or the bytes with those beyond."""
        return predicted * self.factor if what == "step" else predicted + self.deviation


def described_run(model: Architecture, cluster: Cluster, options: RunOptions, *, run: str = "") -> MeasuredRun:
    """A run of a model as a cluster file describes it, without figures.

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
"""Options with which a job remains the same, whatever they are: switches, such as what a framework overlaps."""
_APART = ("data", "dtype", "framework", "micro_batch_size", "post_validation", "host_optimizer", *SWITCHES)
"""Options in which runs of one job may differ, or that are told otherwise."""


def job_words(devices: int, options: RunOptions) -> str:
    """The pipeline on so many devices, and the options that are no defaults, as runs of one job have them in common.

    Without switches: a job with one on keeps its correction, and what it gains is not that of another.
    """
    pipeline = devices // (options.tensor * options.context * options.data)
    framework = [options.framework.partition(",")[0]] if framework_name(options.framework) else []
    divided = ["zero 3"] if options.zero == 3 else []
    others = [
        f"{f.name} {value}"
        for f in fields(options)
        if f.name not in _APART and (value := getattr(options, f.name)) != f.default
    ]
    return ", ".join([f"pipeline {pipeline}", *others, *divided, *framework])


def correction(what: Figure, runs: Sequence[MeasuredRun], job: MeasuredRun) -> Correction:
    """Estimate the correction of a job's step or memory from measured runs.

    Args:
        what: The figure.
        runs: The measured runs.
        job: The job, as `described_run` describes it.

    Returns:
        The correction, which is none if no run is like the job.

    Example:
        >>> from debubble.costs.calibration import Deviation
        >>> described = dict(run="a", device="H100-80GB", family="llama", hidden=4096, dtype="bf16")
        >>> run = MeasuredRun(**described, step=Deviation(predicted=4.0, measured=4.4))
        >>> 1 < correction("step", [run], run).factor < 1.1
        True
    """
    shares = error_shares()[what]
    like = [
        (run, value) for run in runs if shares.between(run, job, what) and (value := run.deviation(what)) is not None
    ]
    if not like:
        return Correction()
    between = np.array([[1.0 if a is b else shares.between(a, b, what) for b, _ in like] for a, _ in like])
    common = np.array([shares.between(run, job, what) for run, _ in like])
    weights = np.linalg.solve(between, common)
    left = 1.0 - float(weights @ common)
    return Correction(
        deviation=float(weights @ [value for _, value in like]), runs=len(like), weight=float(weights.sum()),
        uncertainty=max(LEAST_UNCERTAINTY, math.sqrt(max(0.0, left))),
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


def unlike(model: Architecture, cluster: Cluster, options: RunOptions) -> str | None:
    """Words on the runs that a cluster's measured runs are not like; None: one is like the job, or there are none.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    if not cluster.calibration or any(found.runs for found in corrections(model, cluster, options)):
        return None
    job = described_run(model, cluster, options)
    return f"{model.family} of hidden size {model.hidden}, or {job.kind}, on {job.where}"


def other_frameworks(model: Architecture, cluster: Cluster, options: RunOptions) -> tuple[str, ...]:
    """The frameworks of measured runs that would be like a job if it ran in them.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    job, runs = described_run(model, cluster, options), cluster.calibration

    def is_like(framework: str) -> bool:
        there = msgspec.structs.replace(job, framework=framework)
        return any(correction(what, runs, there).runs for what in FIGURES)

    return tuple(filter(is_like, sorted({run.framework for run in runs} - {"", job.framework})))


def calibration_words(model: Architecture, cluster: Cluster, options: RunOptions) -> str | None:
    """A sentence on how many of a cluster's measured runs correct a prediction; None: the cluster has none.

    Args:
        model: The model.
        cluster: The devices, with the measured runs.
        options: How the model is run.
    """
    if not cluster.calibration:
        return None
    needed = unlike(model, cluster, options)
    if needed is not None:
        return f"No measured run of the cluster is like this job: it takes one of {needed}."
    found = corrections(model, cluster, options)
    step, memory = found
    count = max(each.runs for each in found)
    times = [f"the step {step.factor:.2f} times"] if step.runs else []
    sign = "-" if memory.deviation < 0 else "+"
    beyond = [f"memory by {sign}{size_words(abs(memory.deviation))}"] if memory.runs else []
    return (
        f"The prediction is corrected by {count} measured run{'s' * (count > 1)} of the cluster:"
        f" {' and '.join(times + beyond)}."
    )


def check_run(run: MeasuredRun) -> None:
    """Refuse figures that no run can have; raises InputError."""
    for what, each in (("step", run.step), ("memory", run.memory)):
        if each is None:
            continue
        if not all(math.isfinite(value) and value > 0 for value in (each.predicted, each.measured)):
            raise InputError(f"The calibration by '{run.run}' has a {what} that is not positive.")
        if not 1 / MOST_DEVIATION <= each.measured / each.predicted <= MOST_DEVIATION:
            measured, predicted = (
                size_words(value) if what == "memory" else time_words(value, seconds=True)
                for value in (each.measured, each.predicted)
            )
            raise InputError(
                f"'{run.run}' measured a {what} of {measured} where {predicted} is predicted, more"
                f" than {MOST_DEVIATION:.0f} times off: check that the plan is the one that ran, and the units."
            )


@cache
def error_shares() -> Mapping[Figure, ErrorShares]:
    """The shares of deviations that are common, by figure."""
    content = files("debubble.costs").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(content, type=dict[Figure, ErrorShares])
