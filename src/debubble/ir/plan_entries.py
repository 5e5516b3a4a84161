"""The entries of a plan next to its schedule and its costs: its units, the options of its run, how it was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, UnsetType

DEFAULT_EFFORT = 3.0
"""Work of a planner where nothing else is asked, in seconds of the reference machine (see `search.effort`)."""


@dataclass(frozen=True)
class PlannedUnit:
    """One model unit in its stage."""

    type: str
    """`embedding`, `attention`, `mlp`, `layer` (both in one), `head`, a units file's own type, or `stage` for stages
    given by their costs."""
    layer: int | None
    """Index of the decoder layer, None for embedding and head; a units file counts per type."""
    strategy: str = "none"
    """`none`, `full`, or the operators that it recomputes, joined by `+`: norm, activation, multiply, core,
    projections, mlp."""
    deeper: str | UnsetType = UNSET
    """Strategy for micro-batches that the schedule recomputes deeper; UNSET, and absent in files: `strategy`."""

    @property
    def strategies(self) -> tuple[str, str]:
        """Strategy of most micro-batches, and of those that recompute deeper."""
        return self.strategy, self.strategy if self.deeper is UNSET else self.deeper


def recomputation_of(partition: Sequence[Sequence[PlannedUnit]]) -> tuple[str, ...]:
    """The recomputation of each stage: a strategy, or several as `3 none, 2 full`."""
    stages = (Counter(unit.strategy for unit in stage) for stage in partition)
    return tuple(
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())
        for counts in stages
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options with which a model is run.

    Attributes:
        micro_batch_size: Sequences per micro-batch and replica.
        sequence_length: Tokens per sequence.
        tensor: Ranks that divide each layer.
        data: Replicas of the pipeline.
        context: Ranks that divide each sequence.
        expert: Ranks between which a layer's experts are divided, out of the data- and context-parallel ones (and of
            the tensor-parallel ones, as far as these do not divide each expert).
        expert_tensor: Ranks that divide each expert; None: as many as `tensor`.
        zero: What replicas divide: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        optimizer: `adamw`, `adam`, `adamw-8bit`, `lion`, `muon`, `momentum` or `sgd`.
        dtype: Of computing: `bf16`, `fp16`, `fp32`, or the products' own next to bf16 activations: `fp8` (a scale per
            tensor), `mxfp8` (per 32 numbers) or `nvfp4` (4 bits, per 16).
        lora: Rank of the low-rank adapters that are trained instead of the model's own parameters; 0: those are.
        quantize: Format of the frozen weights of linear layers next to adapters: `nf4` (4 bits, as in QLoRA), or
            `nf4-dq`, whose scales have 8 bits (double quantisation); None: the dtype's.
        post_validation: Devices update before the norm of all gradients is known, with copies that take that back.
        host_optimizer: Share of every rank's optimizer states that are the host's, which steps them after the pipeline.
        expert_overlap: Tokens travel to experts and back next to another micro-batch's computing.
        slices: Slices of every sequence, which pass the pipeline one after the other (Seq1F1B).
        gradient_dtype: In which gradients are kept and summed in mixed precision: `fp32`, `bf16` or `fp16`.
        moment_dtype: Of the optimizer's moments: `fp32`, `bf16` or `fp16`.
        master_dtype: Of the weights that the optimizer steps: `fp32`, or `bf16`, with which weights, gradients and
            moments all have 16 bits (full bf16 training).
        sequence_parallel: Tensor-parallel ranks divide norms and the residual stream, too.
        flash_attention: A fused attention core, which keeps no scores.
        image_patches: Patches of each image, for a model with a vision tower; None: the model's own.
        images: Images of each sequence, for a model with a vision tower.
        freeze: `vision`: the vision tower is frozen, as it always is next to adapters; None: all is trained.
        framework: The framework whose kernels and overlaps are priced, as `NAME@VERSION[,TRAIT=VALUE ...]`; empty: that
            of the target, or Megatron-LM's defaults.
    """

    micro_batch_size: int = 1
    sequence_length: int = 4096
    tensor: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    zero: int = 0
    optimizer: str = "adamw"
    dtype: str = "bf16"
    lora: int = 0
    quantize: str | None = None
    post_validation: bool = False
    host_optimizer: float = 0.0
    expert_overlap: bool = False
    slices: int = 1
    gradient_dtype: str = "fp32"
    moment_dtype: str = "fp32"
    master_dtype: str = "fp32"
    sequence_parallel: bool = True
    flash_attention: bool = True
    image_patches: int | None = None
    images: int = 1
    freeze: str | None = None
    framework: str = ""

    @property
    def expert_shards(self) -> int:
        """Ranks of each expert, which divide its inner width."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


Status = Literal["found", "cut off", "rejected", "failed"]
"""End of a planner: with an answer; when the deadline bit, so that more time might find another one; without any."""


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """The time of a plan's whole step when times are not as predicted, in the costs' unit of time.

    Attributes:
        draws: Disturbed steps that were simulated.
        expected: The mean under all disturbances together.
        worst: What 95% of these steps do not exceed.
        jitter: The mean if only the operations' times scatter.
        straggler: The mean if only one device is slow.
        links: The mean if only messages, reductions and copies are slow.
    """

    draws: int
    expected: float
    worst: float
    jitter: float
    straggler: float
    links: float


@dataclass(frozen=True, kw_only=True)
class CandidateSummary:
    """One planner's answer, or why it has none."""

    planner: str
    status: Status = "found"
    step_time: float | None = None
    """Time of the whole step, with what gradients and optimizer take after the pipeline."""
    makespan: float | None = None
    span: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    peak_memory: tuple[float, ...] = ()
    schedule: str | None = None
    partition: tuple[tuple[PlannedUnit, ...], ...] = field(default=(), compare=False)
    """Per stage, its units with their strategies; plan files keep it of the plan alone."""
    recompute: tuple[str, ...] = ()
    """Per stage, a summary of its units' strategies."""
    solve_seconds: float = 0.0
    rejected: str | None = None
    remark: str | None = None
    """The planner's own account of its search."""
    interrupted: bool = False
    """True if a Ctrl-C ended its search, so that this is the best until then."""
    plain_excess: float | None = None
    """Share by which its step is longer than with recomputation, offload or steps on hosts; None: it is not, or it
    has them."""
    robust_excess: float | None = None
    """Share by which its undisturbed step is longer than that of the fastest plan that was found; None: it is not."""
    runs_in: tuple[str, ...] = ()
    """Names of the targets that run its answer as it is, if it is a model's."""
    robustness: Robustness | None = None
    """The step under disturbances, if plans were judged by them."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """All that is to be said of it, in words."""
        said = (
            "interrupted: the best so far" if self.interrupted else None,
            self.remark,
            None if self.plain_excess is None else plain_words(self.plain_excess),
            None if self.robust_excess is None else robust_words(self.robust_excess),
        )
        return tuple(filter(None, said))


def plain_words(excess: float) -> str:
    """Words on how much longer a step is without levers."""
    return f"{100 * excess:.1f}% slower than with recomputation, offload or steps on hosts"


def robust_words(excess: float) -> str:
    """Words on how much longer the undisturbed step is of a plan that stands disturbances better."""
    return f"{100 * excess:.1f}% slower undisturbed than the fastest plan that was found"


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change of a plan and what a step takes with it.

    Attributes:
        change: The change, in words.
        lever: Whether it takes a lever away, rather than giving the plan something.
        step_time: Seconds of a step; None: nothing fits.
        seconds_per_sequence: The step's seconds over its sequences.
        quick: Whether it is a quick plan's, which compares with the quick plan of the unchanged problem alone.
        more_devices: Whether it takes more devices.
    """

    change: str
    lever: bool
    step_time: float | None
    seconds_per_sequence: float | None
    quick: bool = False
    more_devices: bool = False


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The call that made a plan.

    Attributes:
        command: The command line.
        date: When it was called, as ISO 8601 writes it, in UTC.
        version: The version of debubble.
    """

    command: str
    date: str
    version: str
