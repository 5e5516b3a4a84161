"""Degrees of parallelism, and the results of a search over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The parallelism degrees of a run, with its batch."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    """Expert-parallel ranks, out of all ranks of a pipeline device."""
    expert_tensor: int | None = None
    """Tensor-parallel ranks of an expert; None: as `tensor`."""
    zero: int = 0
    """ZeRO level over the data- and context-parallel ranks."""
    micro_batch_size: int = 1
    """Sequences per micro-batch."""
    micro_batches: int = 1
    """Micro-batches per pipeline and step."""
    chunks: int | None = None
    """Stages per pipeline device; None: the planner chooses."""
    slices: int = 1
    """Slices per sequence, which pass through the pipeline one after the other."""

    @property
    def devices(self) -> int:
        """The number of devices, the product of the pipeline, tensor, data and context degrees."""
        return self.pipeline * self.tensor * self.data * self.context

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.data * self.micro_batch_size * self.micro_batches

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        names = ("pipeline", "tensor", "data", "context", "expert")
        degrees = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        yield from degrees or ["one device"]
        if self.expert_tensor is not None:
            yield f"expert-tensor {self.expert_tensor}"
        if self.zero:
            yield f"ZeRO-{self.zero}"
        yield f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)} of {self.micro_batch_size}"
        if self.slices > 1:
            yield f"{self.slices} slices"
        if self.chunks is not None and self.chunks > 1:
            yield f"{self.chunks} chunks" if self.pipeline > 1 else f"layers in {self.chunks} stages on each device"


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes on one device at its peak, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Bytes that forwards save for backwards, and that backwards recompute."""
    workspace: float
    """Transient bytes of the running operation, and `buffers`."""
    buffers: float | UnsetType = UNSET
    """Bytes of receive buffers and logits that a framework keeps for all micro-batches of a step; UNSET, and absent in
    files: none."""

    @property
    def step_buffers(self) -> float:
        """Bytes of `buffers`, 0 if UNSET."""
        return 0.0 if self.buffers is UNSET else self.buffers

    @property
    def total(self) -> float:
        """The sum of all bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


UNEVEN_STAGES, RECOMPUTATION, OFFLOAD, CPU_OPTIMIZER = "uneven stages", "recomputation", "offload", "CPU optimizer"
"""Levers of a plan besides its degrees."""


QUICK_PLAN = "quick plan"
"""The planner's name for plans that were made without a search."""


@dataclass(frozen=True, kw_only=True)
class ConfigurationSummary:
    """One choice of degrees with the best plan for it."""

    degrees: Degrees
    step_time: float
    """Seconds of a full step."""
    tokens_per_second_per_device: float
    mfu: float | None
    """Model FLOPs utilization, a fraction; None: the devices' peak is not known."""
    peak_memory: float
    """Bytes on the fullest device."""
    memory: MemoryParts
    """On that device."""
    planner: str
    schedule: str
    levers: tuple[str, ...] = ()
    """Levers that the plan uses beyond data parallelism with ZeRO, in words."""


@dataclass(frozen=True, kw_only=True)
class UsualChoice:
    """A baseline without model parallelism: FSDP, or data parallelism with ZeRO-1."""

    name: str
    configuration: ConfigurationSummary | None = None
    """Its fastest quick plan; None: no micro-batch size fits."""
    reason: str | None = None
    """Why none fits."""

    @property
    def options(self) -> str:
        """The options of `plan` that it needs to fit, from its name; empty: none."""
        return self.name.partition(", ")[2]


@dataclass(frozen=True, kw_only=True)
class FasterPlan:
    """The fastest plan, where a simpler one within the tolerance is recommended."""

    configuration: ConfigurationSummary
    levers: tuple[str, ...]
    """Levers that it uses beyond data parallelism with ZeRO, in words."""


@dataclass(frozen=True, kw_only=True)
class DegreeValue:
    """The best known choice with another value of one degree."""

    degree: str
    """The degree's name, a field of Degrees."""
    value: int
    step_time: float | None = None
    """Seconds of its best plan, or of a quick plan; None: none was made, or none fits."""
    lower_bound: float | None = None
    """Lower bound on the seconds of its quick plans if the best one was pruned; a longer search may beat it.  If
    `step_time` is None as well, no quick plan fits."""
    too_large: bool = False
    """True if no plan can fit."""


@dataclass(frozen=True, kw_only=True)
class DegreeSearch:
    """The result of a search over degrees: numbers of choices, and the best ones."""

    configurations: tuple[ConfigurationSummary, ...]
    """The configuration of the plan, then the fastest others."""
    legal: int
    """Choices of degrees that divide model, batch and devices."""
    too_large: int
    """Choices whose states and one activation exceed the memory, and those without a plan that fits."""
    slower: int
    """Choices whose lower bound exceeds the steps of the best."""
    planned: int
    """Choices with a plan."""
    unplanned: int = 0
    """Choices that remained when the effort was spent."""
    interrupted: bool = False
    """True if Ctrl-C ended it."""
    cut_off: bool = False
    """True if the deadline ended it."""
    fastest: FasterPlan | None = None
    """A faster plan that is less simple than the recommended one; None: the plan is the fastest."""
    tolerance: float = 0.0
    """Fraction by which the step of a simpler plan may exceed the fastest one's; 0: the fastest plan is recommended."""
    usual: tuple[UsualChoice, ...] = ()
    """The legal ones of the usual choices."""
    other_values: tuple[DegreeValue, ...] = ()
    """Other values of the degrees, with their best choices."""
