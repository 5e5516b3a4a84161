"""A job as another framework's configuration describes it, and the plan that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from debubble.costs import Cluster, framework_of_options
from debubble.costs.devices.parallel_layout import Layout
from debubble.formatting import size_words
from debubble.imports.torch_orders import ZERO_BUBBLE, interleaved_zero_bubble
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.model_problem import half_layers, problem_of
from debubble.planners.partitioning.by_layers import Strategies, partition_by_layers
from debubble.plans import IMPORTED, ModelOnCluster, Plan
from debubble.schedules import schedules
from debubble.targets import targets
from debubble.targets.offload import ModuleOffload

FACTS = ("dtype", "gradients", "sequence_parallel", "zero")
"""The facts of a job's summary that are always told, by the names that `unsaid` has for them."""

RECOMPUTATIONS: Mapping[str, tuple[str, str] | None] = {"none": None, "full": ("full", "full")}
"""Recomputation of every layer, as a user says it -> the strategies of its halves; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class MoreMemory:
    """Memory that a job may take besides what is predicted.

    Attributes:
        size: Bytes per device, at most.
        setting: The setting that decides it.
        sentence: How much that is, and against what.
    """

    size: float
    setting: str
    sentence: str

    def warning(self, *, peak: float, limit: float) -> str | None:
        """A sentence if a device of this predicted peak may exceed its limit; None if it does not."""
        if not peak <= limit < peak + self.size:
            return None
        return (
            f"The fullest device may need {size_words(peak + self.size)} of {size_words(limit)} with what"
            f" {self.setting} lets it keep: give that a lower value."
        )


@dataclass(frozen=True, kw_only=True)
class ImportedJob:
    """A job as its configuration describes it.

    Attributes:
        target: The framework, by the name of its target.
        model: The model.
        options: How it is run; where they name no framework, the target's is priced.
        pipeline: Pipeline devices.
        micro_batches: Micro-batches per step and replica.
        layers: Decoder layers of every stage, in model order.
        order: The name of the library's schedule that the framework runs, or the order itself.
        strategies: What is recomputed.
        passes: How often the pipeline fills and drains in a step: micro-batches are divided over so many passes.
        mtp_stage: The stage with the multi-token-prediction layers; None: the last.
        offload: The modules of every layer that are offloaded; None: nothing is.
        gradients: The dtype in which the file says that gradients are summed, where that is not an option's.
        unsaid: Facts of the summary that the configuration does not say -> whose default stands for them.
        warnings: Sentences on what the user gives that is not what the configuration runs.
        rest: What of the configuration is not in the prediction, or costs nothing.
        more_memory: Memory that may be added to the prediction; None: none that is known.
    """

    target: str
    model: Model
    options: RunOptions
    pipeline: int
    micro_batches: int
    layers: Sequence[int]
    order: str | Schedule
    strategies: Strategies
    passes: int = 1
    mtp_stage: int | None = None
    offload: ModuleOffload | None = None
    gradients: str | None = None
    unsaid: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    rest: Unread = field(default_factory=Unread)
    more_memory: MoreMemory | None = None

    def all_warnings(self, *, peak: float, limit: float | None) -> tuple[str, ...]:
        """All sentences of warning on a job of which the fullest device takes so much of its limit, in bytes."""
        exceeded = None
        if self.more_memory is not None and limit is not None:
            exceeded = self.more_memory.warning(peak=peak, limit=limit)
        return (*self.warnings, *self.rest.warnings, *([] if exceeded is None else [exceeded]))

    @property
    def unread(self) -> tuple[str, ...]:
        """Sentences on what is not in the prediction, or costs nothing."""
        return tuple(self.rest.sentences())

    @property
    def summary(self) -> str:
        """The assumptions that configurations often leave out: dtypes, sequence parallelism, ZeRO."""
        o = self.options
        framework = framework_of_options(o.framework)
        predicted = "bf16" if framework.gradient_bytes == 2 else o.gradient_dtype
        gradients = self.gradients or predicted
        otherwise = {"gradients": "" if gradients == predicted else f"predicted as {predicted}"}
        words = {
            "dtype": f"computes in {o.dtype}",
            "gradients": f"gradients {'in' if o.master_dtype == 'fp32' else 'summed in'} {gradients}",
            "sequence_parallel": f"sequence parallelism {'on' if o.sequence_parallel else 'off'}",
            "zero": f"ZeRO-{o.zero}",
            **({"masters": "weights, gradients and moments stored in bf16"} if o.master_dtype == "bf16" else {}),
            **({"adapters": f"adapters of rank {o.lora}"} if o.lora else {}),
            **({"quantize": f"frozen weights in {o.quantize}"} if o.quantize else {}),
            **{fact: fact for fact in self.unsaid if fact not in FACTS},
        }
        if o.tensor == 1:
            del words["sequence_parallel"]
        return ", ".join(map(self._fact, words, words.values(), (otherwise.get(fact, "") for fact in words)))

    def _fact(self, fact: str, word: str, otherwise: str) -> str:
        """A fact of the summary, with whose default it is and how it is predicted."""
        default = f"default of {self.unsaid[fact]}" if fact in self.unsaid else ""
        notes = "; ".join(filter(None, [default, otherwise]))
        return f"{word} ({notes})" if notes else word

    @property
    def left_out(self) -> str | None:
        """Words on how many entries of the file are not in the prediction, or are otherwise; None: none."""
        unknown, otherwise = len(self.rest.unknown), len(self.rest.remarks)
        words = [f"{_entries(unknown)} not in the prediction"] if unknown else []
        words += [f"{_entries(otherwise)} predicted otherwise"] if otherwise else []
        return "; ".join(words) or None

    def with_given(self, given: Mapping[str, Any]) -> ImportedJob:
        """The job with options of its run that the user gives in place of what the configuration says."""
        decided = {*given, *(("gradients",) if "framework" in given else ())}
        kept = {fact: of for fact, of in self.unsaid.items() if fact not in decided}
        return replace(self, options=replace(self.options, **given), unsaid=kept)

    def recomputing(self, strategy: str | None) -> ImportedJob:
        """The job whose layers all recompute by a strategy that the user gives in place of the configuration's.

        Raises:
            InputError: if there is no such strategy.
        """
        if strategy is None:
            return self
        if strategy not in RECOMPUTATIONS:
            raise InputError(f"--recompute is '{strategy}'; it must be one of: {', '.join(RECOMPUTATIONS)}.")
        way = RECOMPUTATIONS[strategy]
        return replace(self, strategies=dict.fromkeys(range(self.model.layers), way) if way else {})

    def with_whole_layers(self) -> ImportedJob:
        """The job with a remark if it recomputes parts of layers that are priced whole."""
        parts = {way for ways in self.strategies.values() for way in ways} - {"none", "full"}
        if not (self.model.whole_layers and parts):
            return self
        remark = (
            f"Layers of {self.model.family} are priced whole, and recompute wholly or not at all: the parts that are"
            " recomputed are predicted to be kept."
        )
        return replace(self, rest=replace(self.rest, remarks=(*self.rest.remarks, remark)))

    def plan(self, cluster: Cluster) -> Plan:
        """The plan that the job runs, whether it fits or not.

        Raises:
            InputError: if the parts do not go together.
        """
        if len(self.layers) % self.pipeline:
            raise InputError(
                f"The stages are {len(self.layers)}, which is no multiple of the {self.pipeline} pipeline devices."
            )
        if sum(self.layers) != self.model.layers:
            raise InputError(
                f"The stages have {sum(self.layers)} layers together, and the model has {self.model.layers}; give the"
                " right one with --model."
            )
        options = targets[self.target].priced(self.options)
        Layout.from_options(cluster, options, self.pipeline).check_all_used(options)
        units = half_layers(
            self.model,
            cluster,
            options,
            pipeline=self.pipeline,
            target=self.target,
            micro_batches=self.micro_batches // self.passes,
        )
        partition = partition_by_layers(units, self.layers, self.strategies, mtp_stage=self.mtp_stage)
        once = self._schedule()
        if once.stages != len(self.layers):
            raise InputError(
                f"{once.name} has {once.stages} stages on {self.pipeline} pipeline devices, but the layers are divided"
                f" into {len(self.layers)}: say {once.placement.chunks} virtual stages per device."
            )
        schedule = replace(once, fused_recompute=partition.recomputing)
        if self.offload is not None:
            schedule, units = self.offload.schedule(schedule, units, partition), units.offloading_modules()
        problem = problem_of(self.model, cluster, options, micro_batches=self.micro_batches, pipeline=self.pipeline)
        return Plan(
            planner=IMPORTED,
            schedule=schedule,
            costs=units.stage_costs(partition, schedule.placement),
            lower_bound=problem.step_bound(lower_bound(problem)),
            partition=units.planned(partition),
            model_on_cluster=ModelOnCluster(self.model, cluster),
            options=options,
            target=self.target,
        )

    def _schedule(self) -> Schedule:
        if isinstance(self.order, Schedule):
            return self.order
        chunks, number = len(self.layers) // self.pipeline, self.micro_batches // self.passes
        if self.order == ZERO_BUBBLE:
            once = interleaved_zero_bubble(devices=self.pipeline, micro_batches=number, chunks=chunks)
            return _repeated(once, self.passes)
        once = schedules[self.order](
            devices=self.pipeline,
            micro_batches=number,
            chunks=chunks if chunks > 1 else None,
        )
        return _repeated(once, self.passes)


def _entries(number: int) -> str:
    return "1 entry of the file is" if number == 1 else f"{number} entries of the file are"


@dataclass(frozen=True)
class Batch:
    """Sequences per micro-batch, micro-batches per pass of the pipeline, passes per step."""

    size: int
    number: int
    passes: int


def _repeated(once: Schedule, passes: int) -> Schedule:
    """The schedule run several times: every device begins the next pass when it is through with the one before."""
    if passes == 1:
        return once
    number = once.micro_batches
    orders = tuple(
        tuple(op._replace(micro_batch=op.micro_batch + number * each) for each in range(passes) for op in order)
        for order in once.orders
    )
    return replace(once, micro_batches=number * passes, orders=orders)


def replicas(cluster: Cluster, path: Path, *, pipeline: int, tensor: int = 1, context: int = 1) -> int:
    """Replicas of a job on the cluster; raises InputError if its parallel degrees do not divide the devices."""
    data, left = divmod(cluster.count, pipeline * tensor * context)
    if left or not data:
        raise InputError(
            f"{path} divides each replica over {pipeline} x {tensor} x {context} pipeline-, tensor- and"
            f" context-parallel devices, which do not divide the cluster's {cluster.count}."
        )
    return data


def check_ranks(cluster: Cluster, path: Path, degrees: Mapping[str, int]) -> None:
    """Raise InputError if the degrees of a job, by the names of their entries, do not take all of its devices."""
    ranks = prod(degrees.values())
    if ranks != cluster.count:
        above = {name: degree for name, degree in degrees.items() if degree > 1} or degrees
        said = " x ".join(f"{name} {degree}" for name, degree in above.items())
        raise InputError(
            f"{path}: {said} makes {ranks} ranks, and --cluster has {cluster.count} devices: change a degree, or give"
            " the cluster that the job has."
        )


def batches_in(whole: int, batch: int, path: Path, *, name: str) -> int:
    """The number of batches in so many sequences; raises InputError if they do not come out even."""
    if whole % batch:
        raise InputError(
            f"{path}: {name} is {whole}, which is no multiple of {batch}, the sequences that go together:"
            f" {nearest_multiples(whole, batch)}."
        )
    return whole // batch


def nearest_multiples(number: int, of: int) -> str:
    """Words that advise the multiples next to a number that is none."""
    below = number // of * of
    return f"use a multiple of {of}, such as {' or '.join(str(each) for each in (below, below + of) if each)}"


def even_layers(layers: int, stages: int, *, otherwise: str = "") -> tuple[int, ...]:
    """Equally many layers per stage; raises InputError, with what to do otherwise, if they do not divide."""
    if layers % stages:
        raise InputError(f"{layers} layers cannot be divided evenly over {stages} stages: give --pipeline{otherwise}.")
    return (layers // stages,) * stages
