"""A Plan: what a planner answers and everything else consumes.

It holds the schedule with its stage costs, and, when it was made for a model, which units form each stage, what each
unit recomputes, and how the run is set up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from debubble.argument_types import with_checked_types
from debubble.costs import Cluster
from debubble.costs.flops import Utilization
from debubble.files import decode_versioned, read_file, write_json
from debubble.ir import DeadlockError, InfeasibleError, InputError, Kind, Number, StageCosts
from debubble.ir.degrees import Degrees, DegreeSearch
from debubble.ir.plan_entries import (
    CandidateSummary,
    Origin,
    PlannedUnit,
    Robustness,
    RunOptions,
    WhatIf,
    recomputation_of,
)
from debubble.models import ModelConfig, models
from debubble.plans.plan_file import VERSION, PlanFile, ScheduleFile, check_option_names
from debubble.plans.simulated import Simulated

if TYPE_CHECKING:
    from debubble import Report


BY_HAND, IMPORTED = "hand", "imported"
"""The `planner` of a plan that none searched: made by a schedule's name, or another framework's configuration."""


class ModelOnCluster(NamedTuple):
    """A model, and the devices that it is to run on."""

    model: ModelConfig
    cluster: Cluster


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Simulated):
    """A schedule for given devices, the partition of the model, and the predicted costs.

    Example:
        >>> plan = db.plan(db.models["llama2-13b"], db.Cluster.parse("8xA100-80GB"), planner="dapple")
        >>> plan.devices, plan.micro_batches, len(plan.partition)
        (8, 32, 8)
    """

    planner: str
    lower_bound: Number
    """No plan's step for the same input takes less."""
    bound_argument: str | None = None
    """The argument for that bound, in words; None: nothing is known of it."""
    solve_seconds: float = 0.0
    partition: tuple[tuple[PlannedUnit, ...], ...]
    """Per stage, its units; a stage that was given by its costs alone is one unit of type `stage`."""
    candidates: tuple[CandidateSummary, ...] = ()
    model_on_cluster: ModelOnCluster | None = None
    """The model and the cluster that it was made for; None: it was made from abstract costs."""
    profile: Mapping[str, Any] | None = None
    """The units file with measured costs that the plan was made with, if any."""
    options: RunOptions = field(default_factory=RunOptions)
    degree_search: DegreeSearch | None = None
    """The best choices of degrees, if they were searched."""
    what_ifs: tuple[WhatIf, ...] = ()
    """The changes that were planned to say what would help, if that was asked."""
    other_targets: Mapping[str, float] = field(default_factory=dict)
    """How many times the plan's step quick plans of its degrees take, in targets that do not run it, if that was
    asked."""
    origin: Origin | None = None
    """The call that made it; None if that was no command."""
    measured: bool = False
    """True if its costs are those of units that were measured without a model, in seconds."""
    target: str | None = None
    """The framework for which it was made, by the name of its target; None: for none in particular."""

    @property
    def model(self) -> ModelConfig | None:
        """The model; None for a plan of abstract costs."""
        return None if self.model_on_cluster is None else self.model_on_cluster.model

    @property
    def searched(self) -> bool:
        """True if a planner chose it; a configuration may be another framework's, or given by hand."""
        return self.planner not in (BY_HAND, IMPORTED)

    @property
    def in_seconds(self) -> bool:
        """True if its times are seconds; abstract ones have no unit."""
        return self.model is not None or self.measured

    @property
    def cluster(self) -> Cluster | None:
        """The devices; None for a plan of abstract costs."""
        return None if self.model_on_cluster is None else self.model_on_cluster.cluster

    @property
    def robustness(self) -> Robustness | None:
        """The step under disturbances, if the plan was chosen by it."""
        return self.candidates[0].robustness if self.candidates else None

    @property
    def devices(self) -> int:
        """The number of pipeline devices."""
        return self.schedule.devices

    @property
    def lengths(self) -> tuple[int, ...]:
        """Units per stage."""
        return tuple(map(len, self.partition))

    @property
    def degrees(self) -> Degrees:
        """The division of model and batch over the devices."""
        o = self.options
        return Degrees(
            pipeline=self.devices, tensor=o.tensor, data=o.data, context=o.context, expert=o.expert,
            expert_tensor=o.expert_tensor, zero=o.zero,
            micro_batch_size=o.micro_batch_size, micro_batches=self.micro_batches,
            chunks=self.schedule.placement.chunks, slices=self.schedule.slices,
        )  # fmt: skip

    @property
    def step_time(self) -> float:
        """Seconds of a whole step; the time in the costs' own unit where these are abstract."""
        import debubble

        return debubble.seconds_per_step(self)

    @property
    def gap(self) -> float:
        """The share of its step that a better plan could save at most, by `lower_bound`."""
        return self.gap_at(self.step_time)

    def gap_at(self, step_time: Number) -> float:
        """The gap of a step that is known already, in the unit of `lower_bound`."""
        return max(0.0, float((step_time - self.lower_bound) / step_time))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most bytes that each pipeline device holds at a time."""
        return tuple(map(float, self.simulate().peak_memory))

    @property
    def tokens(self) -> int | None:
        """Tokens per step, without padding where micro-batches differ in length; None for a plan of abstract costs."""
        if self.model is None:
            return None
        full, scales = self.degrees.global_batch * self.options.sequence_length, self.costs.micro_batch_scale
        return full if scales is None else round(full * float(sum(scales)) / len(scales))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices together; None for a plan of abstract costs."""
        return None if self.tokens is None else self.tokens / self.step_time

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, a fraction; None for abstract costs, or devices whose peak is not known."""
        if self.model_on_cluster is None or self.tokens_per_second is None:
            return None
        run = Utilization.of_run(*self.model_on_cluster, self.options, devices=self.ranks)
        return run.mfu(self.tokens_per_second)

    @property
    def has_lengths(self) -> bool:
        """True if micro-batches of whole sequences differ in length."""
        return self.costs.micro_batch_scale is not None and self.schedule.slices == 1

    def slice_tokens(self, length: int) -> tuple[int, ...]:
        """Tokens of each slice of a sequence of so many; whole sequences are one slice.

        Raises:
            InputError: If there are fewer tokens than slices.
        """
        count = self.schedule.slices
        if count == 1:
            return (length,)
        if length < count:
            raise InputError(f"Sequences of {length} tokens cannot be cut into the plan's {count} slices.")
        tokens = self.costs.micro_batch_scale if self.costs.slices == count else None
        ends = [*accumulate((tokens or (1,) * count)[:count])]
        # Every slice has a token.
        cuts = [min(max(int(length * end / ends[-1] + 1e-6), k), length - count + k) for k, end in enumerate(ends, 1)]
        return tuple(end - begin for begin, end in pairwise((0, *cuts)))

    @property
    def ranks(self) -> int:
        """The number of processes that run the plan: pipeline x tensor x context x data."""
        return self.devices * self.options.tensor * self.options.context * self.options.data

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step, whose sequences are whole."""
        return self.schedule.micro_batches // self.schedule.slices

    @property
    def recompute(self) -> tuple[str, ...]:
        """The recomputation of each stage: a strategy, or several as `3 none, 2 full`."""
        return recomputation_of(self.partition)

    @property
    def cut_off(self) -> tuple[str, ...]:
        """The planners that the deadline stopped: with more time they might have found other plans."""
        return tuple(candidate.planner for candidate in self.candidates if candidate.status == "cut off")

    @property
    def interrupted(self) -> bool:
        """True if a Ctrl-C ended the search, so that this is the best until then."""
        searched = self.degree_search is not None and self.degree_search.interrupted
        return searched or any(candidate.interrupted for candidate in self.candidates)

    def reorders(self, other: Plan) -> bool:
        """Tell whether one plan can follow the other in a run.

        They may differ in the order of operations, in what they recompute and offload, and in which units form each
        stage: the model, the stages' devices and what steps them are the same.
        """

        def stays(plan: Plan) -> tuple[object, ...]:
            s = plan.schedule
            extra = {op for op in s.operations if op.kind in (Kind.G, Kind.D, Kind.S, Kind.P)}
            units = [(unit.type, unit.layer) for stage in plan.partition for unit in stage]
            return (
                plan.model and plan.model.config,
                plan.options,
                units,
                s.placement,
                s.micro_batches,
                s.slices,
                s.peers,
                extra,
            )

        return stays(self) == stays(other)

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

    @with_checked_types()
    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        write_json(Path(path), self.to_file())

    @staticmethod
    @with_checked_types()
    def load(path: str | Path) -> Plan:
        """Read a plan file.  Raises InputError with a sentence if it is none, cut short, or of an unknown version."""
        content, advice = read_file(Path(path), "plan file"), "make the plan again with `debubble plan`"
        file = decode_versioned(content, PlanFile, kind="plan", name=str(path), version=VERSION, advice=advice)
        try:
            check_option_names(content)
            return Plan.of_file(file)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def to_file(self) -> PlanFile:
        """The content of its file."""
        entries = {name: getattr(self, name) for name in _AS_IN_FILE}
        entries["profile"] = self.profile and dict(self.profile)
        entries["candidates"] = tuple(replace(candidate, partition=()) for candidate in self.candidates)
        if self.model_on_cluster is not None:
            model, cluster = self.model_on_cluster
            name = next((name for name, known in models.items() if known is model), None)
            entries |= {"model": dict(model.config), "model_name": name, "cluster": cluster.to_dict()}
        return PlanFile(
            **entries,
            debubble_plan=VERSION,
            schedule=ScheduleFile.from_schedule(self.schedule),
            costs=self.costs.to_dict(),
            lower_bound=float(self.lower_bound),
        )

    @staticmethod
    def of_file(file: PlanFile) -> Plan:
        """The plan of a file's content.  Raises InputError or ScheduleError if it contradicts itself."""
        schedule = file.schedule.schedule()
        if len(file.partition) != schedule.stages:
            raise InputError(f"The plan has {len(file.partition)} partitions for {schedule.stages} stages.")
        costs = StageCosts.from_dict(file.costs, stages=schedule.stages)
        costs.check_for(devices=schedule.devices, micro_batches=schedule.micro_batches)
        entries = {name: getattr(file, name) for name in _AS_IN_FILE}
        plan = Plan(
            **entries,
            schedule=schedule,
            costs=costs,
            lower_bound=file.lower_bound,
            model_on_cluster=_model_on_cluster(file),
        )
        _check_ranks(plan)
        return _with_own_bound(plan)


def _check_ranks(plan: Plan) -> None:
    """Raise InputError if a plan's degrees take more devices than its cluster has, or a planner's answer fewer."""
    if plan.cluster is None:
        return
    unused = plan.cluster.count - plan.ranks
    if unused < 0 or (unused and plan.candidates):
        raise InputError(
            f"The plan's degrees take {plan.ranks} devices, and its cluster has {plan.cluster.count}: make the"
            " plan again with `debubble plan`."
        )


def _with_own_bound(plan: Plan) -> Plan:
    """The plan, without its bound if its costs were edited so that its step is shorter.

    Raises InputError if the bound was never one: it is above the step that the planner told.  A plan that does not fit,
    or has no price, has no step.
    """
    if not plan.lower_bound:
        return plan
    try:
        step = plan.step_time
    except (DeadlockError, InfeasibleError, InputError):
        return plan
    max_bound = plan.lower_bound / (1 + BOUND_TOLERANCE)
    if step >= max_bound:
        return plan
    told = plan.candidates[0].step_time if plan.candidates else None
    if told is None or told < max_bound:
        raise InputError(
            f"The plan's lower_bound is {plan.lower_bound:g}, and its own step takes {step:g}: no bound is above the"
            " step of a plan that fits; make the plan again with `debubble plan`."
        )
    return replace(plan, lower_bound=0.0, bound_argument=None)


BOUND_TOLERANCE = 1e-6
"""Share by which rounding may put a bound above a step."""


def _model_on_cluster(file: PlanFile) -> ModelOnCluster | None:
    match file.model, file.cluster:
        case None, None:
            return None
        case dict(model), dict(cluster):
            read = ModelConfig.from_hf(model)
            # Several built-in models may have one configuration, as Llama 3.1 and 3.3.
            name = file.model_name
            known = models[name] if name is not None and name in models else read
            return ModelOnCluster(known if known.config == read.config else read, Cluster.from_dict(cluster))
        case _:
            raise InputError(
                "The plan has a model without a cluster, or a cluster without a model: make the plan again with"
                " `debubble plan`."
            )


_OWN_FORM = {"schedule", "costs", "lower_bound", "timeline", "model_on_cluster"}
_AS_IN_FILE = [f.name for f in fields(Plan) if f.name not in _OWN_FORM]
"""The entries that a plan and its file have alike."""
