"""The entries of a plan besides its schedule and costs: its units, the options of its run, candidates, origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, UnsetType

DEFAULT_EFFORT = 3.0
"""The default work of a planner, in seconds of the reference machine (see `search.effort`)."""


@dataclass(frozen=True)
class PlannedUnit:
    """A model unit of a stage."""

    type: str
    """`embedding`, `attention`, `mlp`, `layer` (both halves), `head`, a units file's type, or `stage` for the stages of
    a costs file."""
    layer: int | None
    """Index of the decoder layer, None for embedding and head; in a units file the index among units of its type."""
    strategy: str = "none"
    """`none`, `full`, or recomputed operators, joined by `+`: norm, activation, multiply, core, projections, mlp."""
    deeper: str | UnsetType = UNSET
    """Strategy of micro-batches that recompute at the deeper level; UNSET, and absent in files: `strategy`."""

    @property
    def strategies(self) -> tuple[str, str]:
        """The strategies of the two recomputation levels."""
        return self.strategy, self.strategy if self.deeper is UNSET else self.deeper


def recomputation_of(partition: Sequence[Sequence[PlannedUnit]]) -> tuple[str, ...]:
    """The recomputation of every stage: a strategy, or a count per strategy such as `3 none, 2 full`."""
    stages = (Counter(unit.strategy for unit in stage) for stage in partition)
    return tuple(
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())
        for counts in stages
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a model's training run.

    Attributes:
        micro_batch_size: Sequences per micro-batch and replica.
        sequence_length: Tokens per sequence.
        tensor: Tensor-parallel degree.
        data: Data-parallel degree: replicas of the pipeline.
        context: Context-parallel degree.
        expert: Expert-parallel degree, out of the data- and context-parallel ranks (and of the tensor-parallel ones, if
            `expert_tensor` is below `tensor`).
        expert_tensor: Tensor-parallel degree of an expert; None: as `tensor`.
        zero: What replicas shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        optimizer: `adamw`, `adam`, `adamw-8bit`, `lion`, `muon`, `momentum` or `sgd`.
        dtype: Compute dtype: `bf16`, `fp16`, `fp32`, or for linear layers in a bf16 run: `fp8` (a scale per tensor),
            `mxfp8` (per 32 numbers) or `nvfp4` (4 bits, per 16).
        lora: Rank of the low-rank adapters that are trained in place of the model's parameters; 0: no LoRA.
        quantize: Format of the frozen weights of linear layers with LoRA: `nf4` (4 bits, as in QLoRA), or `nf4-dq`,
            whose scales have 8 bits (double quantization); None: the dtype's.
        post_validation: Devices update before the norm of all gradients is known, and keep copies for a rollback.
        host_optimizer: Fraction of every rank's optimizer states on the host, which steps them after the pipeline.
        expert_overlap: Dispatch and combine overlap with another micro-batch's computing.
        slices: Slices per sequence, which pass through the pipeline one after the other (Seq1F1B).
        gradient_dtype: Dtype in which gradients are stored and reduced in mixed precision: `fp32`, `bf16` or `fp16`.
        moment_dtype: Dtype of the optimizer's moments: `fp32`, `bf16` or `fp16`.
        master_dtype: Dtype of the weights that the optimizer steps: `fp32`, or `bf16`, with which weights, gradients
            and moments all have 16 bits (full bf16 training).
        sequence_parallel: Norms and the residual stream are sharded over tensor-parallel ranks.
        flash_attention: The attention core is fused, and keeps no scores.
        image_patches: Patches per image, for a model with a vision tower; None: the model's default.
        images: Images per sequence, for a model with a vision tower.
        freeze: `vision`: the vision tower is frozen, as it always is with LoRA; None: all is trained.
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
        """Tensor-parallel ranks of an expert, over which its inner width is sharded."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


Status = Literal["found", "cut off", "rejected", "failed"]
"""The outcome of a planner: an answer; an answer at the deadline, which more time may improve; no answer."""


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """The time of a plan's full step under random disturbances, in the costs' unit of time.

    Attributes:
        draws: Number of simulated disturbed steps.
        expected: Mean under all disturbances together.
        worst: 95th percentile under all disturbances together.
        jitter: Mean if only the operations' times vary.
        straggler: Mean if only one device is slow.
        links: Mean if only messages, reductions and copies are slow.
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
    """Time of the full step, with gradient reduction and optimizer step after the pipeline."""
    makespan: float | None = None
    span: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    peak_memory: tuple[float, ...] = ()
    schedule: str | None = None
    partition: tuple[tuple[PlannedUnit, ...], ...] = field(default=(), compare=False)
    """Per stage, its units with their strategies; in plan files only the chosen candidate has it."""
    recompute: tuple[str, ...] = ()
    """Per stage, a summary of its units' strategies."""
    solve_seconds: float = 0.0
    rejected: str | None = None
    remark: str | None = None
    """The planner's sentence on its search."""
    interrupted: bool = False
    """True if Ctrl-C ended its search, so that this is the best plan until then."""
    plain_excess: float | None = None
    """Fraction by which its step is longer than one with recomputation, offload or steps on hosts; None: it is not
    longer, or has them."""
    robust_excess: float | None = None
    """Fraction by which its undisturbed step is longer than the fastest plan's; None: it is not longer."""
    runs_in: tuple[str, ...] = ()
    """Names of the targets that run it unchanged, if it is a model's."""
    robustness: Robustness | None = None
    """The step under disturbances, if plans were ranked by them."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """All remarks on it, in words."""
        remarks = (
            "interrupted: the best so far" if self.interrupted else None,
            self.remark,
            None if self.plain_excess is None else plain_words(self.plain_excess),
            None if self.robust_excess is None else robust_words(self.robust_excess),
        )
        return tuple(filter(None, remarks))


def plain_words(excess: float) -> str:
    """A phrase for `CandidateSummary.plain_excess`."""
    return f"{100 * excess:.1f}% slower than with recomputation, offload or steps on hosts"


def robust_words(excess: float) -> str:
    """A phrase for `CandidateSummary.robust_excess`."""
    return f"{100 * excess:.1f}% slower undisturbed than the fastest plan that was found"


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A hypothetical change of a plan's problem, and the step time with it.

    Attributes:
        change: The change, in words.
        lever: Whether it removes a lever, rather than adding resources.
        step_time: Seconds of a step; None: nothing fits.
        seconds_per_sequence: The step's seconds over its sequences.
        quick: Whether the time is that of a quick plan, to be compared only with the unchanged problem's quick plan.
        more_devices: Whether it needs more devices.
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
        date: The time of the call in UTC, in ISO 8601.
        version: The debubble version.
    """

    command: str
    date: str
    version: str
