"""A job described by another framework's configuration, and its plan."""

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

SUMMARY_FACTS = ("dtype", "gradients", "sequence_parallel", "zero")
"""The facts that a job's summary always has; other keys of `ImportedJob.defaulted` are added to it."""

RECOMPUTATIONS: Mapping[str, tuple[str, str] | None] = {"none": None, "full": ("full", "full")}
"""Values of `--recompute` -> strategies of the attention and MLP halves of every layer; None: no recomputation."""


@dataclass(frozen=True, kw_only=True)
class MoreMemory:
    """Memory that a job may need in addition to the prediction.

    Attributes:
        size: Upper bound in bytes per device.
        setting: The setting that controls it.
        sentence: A sentence on its amount and how to avoid it.
    """

    size: float
    setting: str
    sentence: str

    def warning(self, *, peak: float, limit: float) -> str | None:
        """A sentence if a device with this predicted peak may exceed its limit; None if not."""
        if not peak <= limit < peak + self.size:
            return None
        return (
            f"The fullest device may need {size_words(peak + self.size)} of {size_words(limit)} with what"
            f" {self.setting} lets it keep: give that a lower value."
        )


@dataclass(frozen=True, kw_only=True)
class ImportedJob:
    """A job described by its configuration.

    Attributes:
        target: The target that stands for the framework.
        model: The model.
        options: Options of the run; if they name no framework, the costs are those of the target's.
        pipeline: Pipeline devices.
        micro_batches: Micro-batches per step and replica.
        layers: Decoder layers of every stage, in model order.
        order: The schedule that the framework runs: a name in `debubble.schedules`, or the schedule itself.
        strategies: Recomputation strategies per layer.
        passes: Number of times that the pipeline fills and drains per step; micro-batches are divided among them.
        mtp_stage: The stage with the multi-token-prediction layers; None: the last.
        offload: The modules of every layer whose activations are offloaded; None: none.
        gradients: The dtype in which the file says that gradients are summed, if no option expresses it.
        defaulted: Facts of the summary that the configuration does not set -> the source of the default.
        warnings: Sentences on values given by the user that differ from what the configuration runs.
        rest: Entries of the configuration that are not in the prediction, or are harmless.
        more_memory: Memory that may be needed in addition; None: none is known.
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
    defaulted: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    rest: Unread = field(default_factory=Unread)
    more_memory: MoreMemory | None = None

    def all_warnings(self, *, peak: float, limit: float | None) -> tuple[str, ...]:
        """All warnings on a job, given the peak and the limit of its fullest device in bytes."""
        exceeded = None
        if self.more_memory is not None and limit is not None:
            exceeded = self.more_memory.warning(peak=peak, limit=limit)
        return (*self.warnings, *self.rest.warnings, *([] if exceeded is None else [exceeded]))

    @property
    def unread(self) -> tuple[str, ...]:
        """Sentences on entries that are not in the prediction, or are harmless."""
        return tuple(self.rest.sentences())

    @property
    def summary(self) -> str:
        """The assumptions that configurations often do not state: dtypes, sequence parallelism, ZeRO."""
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
            **{fact: fact for fact in self.defaulted if fact not in SUMMARY_FACTS},
        }
        if o.tensor == 1:
            del words["sequence_parallel"]
        return ", ".join(map(self._fact, words, words.values(), (otherwise.get(fact, "") for fact in words)))

    def _fact(self, fact: str, word: str, otherwise: str) -> str:
        """A fact of the summary, with the source of its default and how the prediction differs."""
        default = f"default of {self.defaulted[fact]}" if fact in self.defaulted else ""
        notes = "; ".join(filter(None, [default, otherwise]))
        return f"{word} ({notes})" if notes else word

    @property
    def left_out(self) -> str | None:
        """The numbers of entries that are not in the prediction, and of remarks; None: there are none."""
        unknown, remarks = len(self.rest.unknown), len(self.rest.remarks)
        words = [f"{_entry_count(unknown)} not in the prediction"] if unknown else []
        words += [f"{remarks} {'remark' if remarks == 1 else 'remarks'} below"] if remarks else []
        return "; ".join(words) or None

    def with_overrides(self, overrides: Mapping[str, Any]) -> ImportedJob:
        """The job with options given by the user in place of the configuration's."""
        overridden = {*overrides, *(("gradients",) if "framework" in overrides else ())}
        defaulted = {fact: source for fact, source in self.defaulted.items() if fact not in overridden}
        return replace(self, options=replace(self.options, **overrides), defaulted=defaulted)

    def with_recomputation(self, strategy: str | None) -> ImportedJob:
        """The job with the user's recomputation strategy in every layer; None: the configuration's.

        Raises:
            InputError: if there is no such strategy.
        """
        if strategy is None:
            return self
        if strategy not in RECOMPUTATIONS:
            raise InputError(f"--recompute is '{strategy}'; it must be one of: {', '.join(RECOMPUTATIONS)}.")
        strategies = RECOMPUTATIONS[strategy]
        return replace(self, strategies=dict.fromkeys(range(self.model.layers), strategies) if strategies else {})

    def with_whole_layer_remark(self) -> ImportedJob:
        """The job with a remark if it recomputes parts of layers whose costs are known only per layer."""
        parts = {strategy for strategies in self.strategies.values() for strategy in strategies} - {"none", "full"}
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
            InputError: if stages, layers and devices are inconsistent.
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
        schedule = self._schedule()
        if schedule.stages != len(self.layers):
            raise InputError(
                f"{schedule.name} has {schedule.stages} stages on {self.pipeline} pipeline devices, but the"
                f" layers are divided into {len(self.layers)}: say {schedule.placement.chunks} virtual stages per"
                " device."
            )
        schedule = replace(schedule, fused_recompute=partition.recomputing)
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
        chunks, micro_batches = len(self.layers) // self.pipeline, self.micro_batches // self.passes
        if self.order == ZERO_BUBBLE:
            single_pass = interleaved_zero_bubble(devices=self.pipeline, micro_batches=micro_batches, chunks=chunks)
        else:
            virtual = chunks if chunks > 1 else None
            single_pass = schedules[self.order](devices=self.pipeline, micro_batches=micro_batches, chunks=virtual)
        return _repeat(single_pass, self.passes)


def _entry_count(number: int) -> str:
    return "1 entry of the file is" if number == 1 else f"{number} entries of the file are"


@dataclass(frozen=True)
class Batch:
    """Sequences per micro-batch (size), micro-batches per pipeline pass (number), and passes per step."""

    size: int
    number: int
    passes: int


def _repeat(single_pass: Schedule, passes: int) -> Schedule:
    """The schedule run several times in sequence; a device starts the next pass when it has finished the previous."""
    if passes == 1:
        return single_pass
    micro_batches = single_pass.micro_batches
    starts = range(0, micro_batches * passes, micro_batches)
    orders = tuple(
        tuple(op._replace(micro_batch=op.micro_batch + first) for first in starts for op in order)
        for order in single_pass.orders
    )
    return replace(single_pass, micro_batches=micro_batches * passes, orders=orders)


def replicas(cluster: Cluster, path: Path, *, pipeline: int, tensor: int = 1, context: int = 1) -> int:
    """Data-parallel degree of a job on the cluster; raises InputError if its degrees do not divide the devices."""
    data, remainder = divmod(cluster.count, pipeline * tensor * context)
    if remainder or not data:
        raise InputError(
            f"{path} divides each replica over {pipeline} x {tensor} x {context} pipeline-, tensor- and"
            f" context-parallel devices, which do not divide the cluster's {cluster.count}."
        )
    return data


def check_ranks(cluster: Cluster, path: Path, degrees: Mapping[str, int]) -> None:
    """Raise InputError if the product of a job's degrees (entry name -> degree) is not the number of devices."""
    ranks = prod(degrees.values())
    if ranks != cluster.count:
        larger = {name: degree for name, degree in degrees.items() if degree > 1} or degrees
        product = " x ".join(f"{name} {degree}" for name, degree in larger.items())
        raise InputError(
            f"{path}: {product} makes {ranks} ranks, and --cluster has {cluster.count} devices: change a degree, or"
            " give the cluster that the job has."
        )


def batches_in(total: int, batch: int, path: Path, *, name: str) -> int:
    """The number of batches in `total` sequences; raises InputError if there is a remainder."""
    if total % batch:
        raise InputError(
            f"{path}: {name} is {total}, which is no multiple of {batch}, the sequences that go together:"
            f" {nearest_multiples(total, batch)}."
        )
    return total // batch


def nearest_multiples(number: int, divisor: int) -> str:
    """Advice to use the multiples of a divisor next to a number."""
    below = number // divisor * divisor
    nearest = " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)
    return f"use a multiple of {divisor}, such as {nearest}"


def even_layers(layers: int, stages: int, *, otherwise: str = "") -> tuple[int, ...]:
    """The same number of layers for every stage; raises InputError if they do not divide, with an alternative."""
    if layers % stages:
        raise InputError(f"{layers} layers cannot be divided evenly over {stages} stages: give --pipeline{otherwise}.")
    return (layers // stages,) * stages
