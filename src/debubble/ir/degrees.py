"""Degrees of parallelism, and what a search of them answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The division of a global batch and a model over devices."""

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    """Ranks between which a layer's experts are divided, out of all ranks of a pipeline device."""
    expert_tensor: int | None = None
    """Ranks that divide each expert; None: as many as `tensor`."""
    zero: int = 0
    """ZeRO level over the data- and context-parallel ranks."""
    micro_batch_size: int = 1
    """Sequences."""
    micro_batches: int = 1
    """Per pipeline and step."""
    chunks: int | None = None
    """Stages per pipeline device; None: what the planner chooses."""
    slices: int = 1
    """Slices of every sequence, which pass the pipeline one after the other."""

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
        divided = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        yield from divided or ["one device"]
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
    """Bytes on one device when it holds most, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Bytes that forwards leave for backwards, and that backwards bring back by recomputing."""
    workspace: float
    """Buffers of the operation that runs, and `buffers`."""
    buffers: float | UnsetType = UNSET
    """Workspace for receive buffers and logits of all micro-batches that a framework keeps for a step; UNSET, and
    absent in files: none."""

    @property
    def step_buffers(self) -> float:
        """Bytes of `buffers`, 0 where there are none."""
        return 0.0 if self.buffers is UNSET else self.buffers

    @property
    def total(self) -> float:
        """Bytes of all parts together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


UNEVEN_STAGES, RECOMPUTATION, OFFLOAD, CPU_OPTIMIZER = "uneven stages", "recomputation", "offload", "CPU optimizer"
"""Levers of a plan that its degrees do not name."""


QUICK_PLAN = "quick plan"
"""Planner of a plan that was drawn without a search."""


@dataclass(frozen=True, kw_only=True)
class ConfigurationSummary:
    """One choice of degrees with the best plan that was found for it."""

    degrees: Degrees
    step_time: float
    """Seconds of a whole step."""
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
    """A choice without model parallelism, which a user expects to see: FSDP, or data parallelism with ZeRO-1."""

    name: str
    configuration: ConfigurationSummary | None = None
    """Its fastest quick plan; None: no size of micro-batches fits."""
    reason: str | None = None
    """Why none fits."""

    @property
    def options(self) -> str:
        """The options of `plan` with which alone it fits, as the name has them; empty: it needs none."""
        return self.name.partition(", ")[2]


@dataclass(frozen=True, kw_only=True)
class FasterPlan:
    """The fastest plan that was found, where a simpler one that is nearly as fast is recommended."""

    configuration: ConfigurationSummary
    levers: tuple[str, ...]
    """Levers that it uses beyond data parallelism with ZeRO, in words."""


@dataclass(frozen=True, kw_only=True)
class DegreeValue:
    """The best choice with another value of one degree, as far as a search of degrees knows it."""

    degree: str
    """The degree's name, as of Degrees."""
    value: int
    step_time: float | None = None
    """Seconds of its best plan, by a quick plan at least; None: none was made, or none fits."""
    lower_bound: float | None = None
    """Seconds that its quick plans take at least, where the best was pruned, which a longer search may beat; None next
    to None: no quick plan fits."""
    too_large: bool = False
    """True if no plan at all can fit."""


@dataclass(frozen=True, kw_only=True)
class DegreeSearch:
    """The record of a search of degrees: how many it looked at, and the best that it found."""

    configurations: tuple[ConfigurationSummary, ...]
    """The plan's first, then the fastest."""
    legal: int
    """Choices of degrees that divide model, batch and devices."""
    too_large: int
    """Choices of which states and one activation exceed the memory, and those that no plan that was made fits."""
    slower: int
    """Choices whose lower bound is above the steps that were found for the best."""
    planned: int
    """Choices that were planned."""
    unplanned: int = 0
    """Choices that were left when the effort was spent."""
    interrupted: bool = False
    """True if Ctrl-C ended it."""
    cut_off: bool = False
    """True if the deadline ended it before its last step."""
    fastest: FasterPlan | None = None
    """A plan that is faster than the recommended one, and less simple; None: the plan is the fastest."""
    tolerance: float = 0.0
    """Share of the fastest plan's step by which a simpler one may be slower; 0: the fastest is the plan."""
    usual: tuple[UsualChoice, ...] = ()
    """The usual choices, as far as they are legal."""
    other_values: tuple[DegreeValue, ...] = ()
    """Other values of the degrees, and what they cost at best."""
