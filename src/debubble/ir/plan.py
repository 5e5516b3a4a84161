"""A Plan: what a planner answers and everything else consumes.

It holds the schedule with its stage costs, and, when it was made for a model, which units form each stage, what each
unit recomputes, and how the run is set up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from debubble.ir.degrees import Degrees, DegreeSearch
from debubble.ir.ops import Kind
from debubble.ir.schedule import Schedule
from debubble.ir.stage_costs import Number, StageCosts

if TYPE_CHECKING:
    from debubble import Report, Timeline


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
        dtype: Of computing: `bf16`, `fp16`, `fp32`, or `fp8` for products beside bf16 activations.
        lora: Rank of the low-rank adapters that are trained instead of the model's own parameters; 0: those are.
        post_validation: Devices update before the norm of all gradients is known, with copies that take that back.
        host_optimizer: Share of every rank's optimizer states that are the host's, which steps them after the pipeline.
        expert_overlap: Tokens travel to experts and back beside another micro-batch's computing.
    """

    micro_batch_size: int = 1
    sequence_length: int = 2048
    tensor: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    zero: int = 0
    optimizer: str = "adamw"
    dtype: str = "bf16"
    lora: int = 0
    post_validation: bool = False
    host_optimizer: float = 0.0
    expert_overlap: bool = False

    @property
    def expert_shards(self) -> int:
        """Ranks of each expert, which divide its inner width."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


Status = Literal["found", "cut off", "rejected"]
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
    solve_seconds: float = 0.0
    rejected: str | None = None
    remark: str | None = None
    """The planner's own account of its search."""
    runs_in: tuple[str, ...] = ()
    """Names of the targets that run its answer as it is, if it is a model's."""
    robustness: Robustness | None = None
    """The step under disturbances, if plans were judged by them."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change of a plan and what a step takes with it.

    Attributes:
        change: The change, in words.
        lever: Whether it takes a lever away, rather than giving the plan something.
        step_time: Seconds of a step; None: nothing fits.
        seconds_per_sequence: The step's seconds over its sequences.
        quick: Whether it is a quick plan's, which compares with the quick plan of the unchanged problem alone.
    """

    change: str
    lever: bool
    step_time: float | None
    seconds_per_sequence: float | None
    quick: bool = False


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


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A schedule for given devices, the partition of the model, and the predicted costs.

    Example:
        >>> plan = db.plan(db.models["llama2-13b"], db.Cluster.parse("8xA100-80GB"), planner="dapple")
        >>> plan.devices, plan.micro_batches, len(plan.partition)
        (8, 32, 8)
    """

    planner: str
    schedule: Schedule
    costs: StageCosts
    lower_bound: Number
    """No plan's step for the same input takes less."""
    bound_argument: str | None = None
    """The argument for that bound, in words; None: nothing is known of it."""
    solve_seconds: float = 0.0
    partition: tuple[tuple[PlannedUnit, ...], ...]
    """Per stage, its units; a stage that was given by its costs alone is one unit of type `stage`."""
    candidates: tuple[CandidateSummary, ...] = ()
    model: Mapping[str, Any] | None = None
    """The model's Hugging Face config, as in `config.json`."""
    cluster: Mapping[str, Any] | None = None
    """The cluster, as in a cluster file."""
    profile: Mapping[str, Any] | None = None
    """The units file with measured costs that the plan was made with, if any."""
    options: RunOptions = field(default_factory=RunOptions)
    degree_search: DegreeSearch | None = None
    """The best choices of degrees, if they were searched."""
    what_ifs: tuple[WhatIf, ...] = ()
    """The changes that were planned to say what would help, if that was asked."""
    origin: Origin | None = None
    """The call that made it; None if that was no command."""
    target: str | None = None
    """The framework for which it was made, by the name of its target; None: for none in particular."""

    @property
    def robustness(self) -> Robustness | None:
        """The step under disturbances, if the plan was chosen by it: of all candidates it has the least."""
        judged = [c.robustness for c in self.candidates if c.robustness is not None]
        return min(judged, key=lambda judgement: judgement.expected, default=None)

    @property
    def devices(self) -> int:
        """The number of pipeline devices."""
        return self.schedule.devices

    @property
    def degrees(self) -> Degrees:
        """The division of model and batch over the devices."""
        o = self.options
        return Degrees(
            pipeline=self.devices, tensor=o.tensor, data=o.data, context=o.context, expert=o.expert,
            expert_tensor=o.expert_tensor, zero=o.zero,
            micro_batch_size=o.micro_batch_size, micro_batches=self.micro_batches,
            chunks=self.schedule.placement.chunks,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """The number of processes that run the plan: pipeline x tensor x context x data."""
        return self.devices * self.options.tensor * self.options.context * self.options.data

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step."""
        return self.schedule.micro_batches

    @property
    def recompute(self) -> tuple[str, ...]:
        """Per stage, how it recomputes: a strategy, or several as `3 none, 2 full`."""
        return tuple(_summary([unit.strategy for unit in units]) for units in self.partition)

    @property
    def cut_off(self) -> tuple[str, ...]:
        """The planners that the deadline stopped: with more time they might have found other plans."""
        return tuple(candidate.planner for candidate in self.candidates if candidate.status == "cut off")

    def reorders(self, other: Plan) -> bool:
        """Tell whether the plans differ in the order of operations alone, so that one can follow the other in a run."""

        def stays(plan: Plan) -> tuple[object, ...]:
            s = plan.schedule
            extra = {op for op in s.operations if op.kind in (Kind.G, Kind.D, Kind.S, Kind.P)}
            return plan.model, plan.options, plan.partition, s.placement, s.micro_batches, s.peers, extra

        return stays(self) == stays(other)

    def simulate(self) -> Timeline:
        """The predicted timeline."""
        # The simulator stands below the IR; this method is a convenience at the top of the house.
        import debubble

        return debubble.simulate(self.schedule, self.costs)

    def show(self) -> Report:
        """The report as one page, which a notebook shows and `save` writes."""
        import debubble

        return debubble.show(self)

    def __repr__(self) -> str:
        chunks = self.schedule.placement.chunks
        stages = f"{self.devices} devices" + (f" x {chunks} chunks" if chunks > 1 else "")
        return f"Plan({self.schedule.name} by {self.planner}: {stages}, {self.micro_batches} micro-batches)"

    def _repr_html_(self) -> str:
        import debubble

        return debubble.inline_html(self)

    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        from debubble.ir.plan_file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.  Raises InputError with a sentence if it is none, cut short, or of an unknown version."""
        from debubble.ir.plan_file import load

        return load(Path(path))


def _summary(strategies: list[str]) -> str:
    counts: dict[str, int] = {}
    for strategy in strategies:
        counts[strategy] = counts.get(strategy, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {strategy}" for strategy, count in counts.items())
