"""Makes a Plan for a problem, or for a model on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from debubble.costs import Cluster, model_units, read_profile, step_tail
from debubble.costs.lengths import read_lengths, typical_step
from debubble.costs.speed import element_bytes
from debubble.costs.step import moment_bytes
from debubble.costs.units import Partition
from debubble.ir import InputError, Number, Plan, PlannedUnit, RunOptions
from debubble.ir.degrees import Degrees
from debubble.models import Model
from debubble.planners.degrees import Job, search_degrees
from debubble.planners.micro_batch_order import with_lengths
from debubble.planners.model_problem import framework_of_plan, half_layers, objective_of, problem_of
from debubble.planners.problem import ModelUnits, Problem, Solution, Swap
from debubble.planners.progress import Listener, listening, tell
from debubble.planners.registry import Result, planners
from debubble.simulator import Timeline
from debubble.targets import targets


def plan(
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    micro_batches: int | None = None,
    planner: str = "auto",
    pipeline: int | None = None,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    effort: float = 10.0,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Path | Mapping[str, Any] | None = None,
    target: str | None = None,
    swap: Swap = "host",
    robust: bool = False,
    lengths: Path | Mapping[int, int] | None = None,
    progress: Listener | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan that fits for a model on a cluster.

    With `global_batch` the degrees of parallelism, the ZeRO level and the size of micro-batches are searched; those
    that are given among the other arguments are kept.  Without it they are what is given, or 1.

    Args:
        model: The model.
        cluster: Its devices.
        global_batch: Sequences per step, over all replicas and micro-batches; None: the degrees are not searched.
        micro_batches: Per pipeline and step; None: 32, or what the search chooses.
        planner: A planner's name.
        pipeline: Devices of the pipeline; None: all that the other degrees leave, or what the search chooses.
        chunks: Stages per device; None: the planner's choice.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        effort: Work that a planner may do, in seconds of the reference machine (see `search.effort`); the same call
            gives the same plan on every machine.
        deadline: Seconds on the clock after which a planner stops all the same; None: ten times the effort and a
            minute.  The plan's `cut_off` names those that had to.
        cache: Start from schedules that this machine has found before, and keep the new ones.
        seed: Seed of the searches.
        profile: A units file that `debubble profile` measured, or its content; not with `global_batch`.
        target: Name of the framework that is to run the plan: only what it can run is searched (see `targets`).
        swap: Where activations may go: `host`, `peer` (the paired device; the planners obscura and bpipe) or `none`;
            not with `global_batch`.
        robust: Compare plans by their mean step under disturbances (noise, a slow device, slow links), not by the
            predicted one; not with `global_batch`.
        lengths: The lengths of the sequences: a file (see `costs.lengths.read_lengths`), or how many sequences have
            so many tokens; None: all have `sequence_length`.  Not with `global_batch`.
        progress: Called after every choice of degrees that was looked at, and every planner that answered.
        options: Those of RunOptions, such as `sequence_length=4096`.

    Raises:
        InputError: for what does not go together.
        InfeasibleError: if nothing fits, with the reason.
    """
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    if RunOptions(**options).expert_overlap and (target is None or targets[target].overlapping is None):
        raise InputError("--expert-overlap is Megatron-LM's and Primus's combined 1F1B; plan --for megatron or primus.")
    if global_batch is not None:
        _refuse_of_given_degrees(profile=profile, swap=swap, robust=robust, lengths=lengths)
        fixed = {"pipeline": pipeline, "chunks": chunks, "micro_batches": micro_batches, **options}
        job = Job(
            model=model, cluster=cluster, global_batch=global_batch, options=RunOptions(**options),
            fixed={name: degree for name, degree in fixed.items() if name in DEGREES and degree is not None},
            effort=effort, deadline=deadline, cache=cache, seed=seed, target=target,
        )  # fmt: skip
        with listening(progress):
            return _searched(job, planner)
    if target is not None and swap != "host":
        raise InputError("Where activations go follows from the target; leave out the swap or the target.")
    if target is not None and lengths is not None:
        raise InputError("No target can be told the lengths of micro-batches: leave out the lengths or the target.")
    run = RunOptions(**options)
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    problem = problem_of(
        model, cluster, run, micro_batches=MICRO_BATCHES if micro_batches is None else micro_batches,
        pipeline=pipeline, chunks=chunks, effort=effort, seed=seed, deadline=deadline, cache=cache, profile=measured,
        target=target,
    )  # fmt: skip
    problem = replace(problem.swapping(swap), robust=robust)
    if lengths is not None:
        problem = with_lengths(problem, _dealt(lengths, run, problem.micro_batches))
    with listening(progress):
        result = planners[planner](problem)
    return replace(_of_model(result, problem, model, cluster, run, measured), profile=measured)


MICRO_BATCHES = 32
"""Micro-batches per pipeline and step where nobody says how many."""


def _refuse_of_given_degrees(*, profile: object, swap: Swap, robust: bool, lengths: object) -> None:
    """Raise InputError for what is planned for given degrees alone."""
    if profile is not None:
        raise InputError("A profile is of one choice of degrees: give it without a global batch.")
    if swap != "host":
        raise InputError("Where activations go can be chosen for given degrees alone: leave out the global batch.")
    if robust:
        raise InputError("Robust plans are of given degrees: leave out the global batch, and give micro-batches.")
    if lengths is not None:
        raise InputError("Lengths are dealt to micro-batches of given degrees: leave out the global batch.")


def _dealt(lengths: Path | Mapping[int, int], run: RunOptions, micro_batches: int) -> list[float]:
    """The sizes of a typical step's micro-batches."""
    histogram = read_lengths(lengths) if isinstance(lengths, Path) else lengths
    return typical_step(
        histogram, micro_batches=micro_batches, micro_batch_size=run.micro_batch_size,
        sequence_length=run.sequence_length, replicas=run.data,
    )  # fmt: skip


DEGREES = frozenset(field.name for field in fields(Degrees))
"""Names of the degrees that a search may be told."""


def _searched(job: Job, planner: str) -> Plan:
    best = search_degrees(job, planner=planner, progress=tell)
    made = _of_model(best.result, best.problem, job.model, job.cluster, job.run_options(best.degrees))
    return replace(made, degree_search=best.search)


def _of_model(
    result: Result,
    problem: Problem,
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    profile: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a model, in the half-layers that its whole layers stand for."""
    plan = replace(_plan_of(result, problem, options), model=model.config, cluster=cluster.to_dict())
    solution, levers = result.solution, problem.levers
    if levers is None:
        return replace(plan, target=problem.target)
    assert isinstance(problem.workload, ModelUnits)
    assert solution.partition is not None
    units = half_layers(
        model, cluster, options, pipeline=problem.devices, profile=profile, target=problem.target
    )  # fmt: skip
    partition = levers.halves(units, problem.workload.units, solution.partition)
    linked = units.offloading_modules() if solution.schedule.offloaded else units
    return replace(
        plan,
        costs=linked.stage_costs(partition, solution.schedule.placement),
        partition=units.planned(partition),
        target=problem.target,
    )


def plan_again(plan_: Plan, *, degrees: bool = False, **search: Any) -> Plan:
    """The fastest plan for a plan's model, devices, batch and target.

    Args:
        plan_: A plan of a model.
        degrees: Whether the degrees of parallelism are open; if not, the plan's are kept.
        search: Further arguments of `plan`: planner, effort, deadline, cache, seed and progress.

    Raises:
        InfeasibleError: if nothing fits.
    """
    assert plan_.model is not None
    model, cluster, options = Model.from_hf(plan_.model), Cluster.from_dict(plan_.cluster), vars(plan_.options)
    batch: dict[str, Any]
    if degrees:
        batch = {"global_batch": plan_.degrees.global_batch}
        kept = {name: value for name, value in options.items() if name not in DEGREES}
    else:
        batch, kept = {"micro_batches": plan_.micro_batches, "pipeline": plan_.devices}, options
    return plan(model, cluster, target=plan_.target, **batch, **kept, **search)


def solve(
    problem: Problem,
    *,
    planner: str = "auto",
    model: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
) -> Plan:
    """Let a planner solve a problem.

    Args:
        problem: The problem.
        planner: Name of the planner.
        model: Config of the model, for the plan file; None for abstract costs.
        cluster: The devices as in a cluster file, for the plan file.
        options: Options of the run, for the plan file.

    Raises:
        InfeasibleError: The planner finds nothing that fits.
    """
    plan = _plan_of(planners[planner](problem), problem, options or RunOptions())
    return replace(plan, model=model, cluster=cluster)


def _plan_of(result: Result, problem: Problem, options: RunOptions) -> Plan:
    return Plan(
        planner=result.planner,
        schedule=result.solution.schedule,
        costs=result.solution.costs,
        lower_bound=result.lower_bound,
        bound_argument=result.bound_argument,
        solve_seconds=result.solve_seconds,
        partition=_planned(problem, result.solution),
        candidates=result.solution.candidates or (result.summary,),
        options=options,
    )


def tail_of(plan: Plan) -> float:
    """Seconds that a model's step takes after its pipeline, for gradients and optimizer; 0 for abstract costs."""
    if plan.model is None or plan.cluster is None:
        return 0.0
    return step_tail(
        Model.from_hf(plan.model), Cluster.from_dict(plan.cluster), plan.options, pipeline=plan.devices,
        framework=framework_of_plan(plan), schedule=plan.schedule,
    )  # fmt: skip


def undo_bytes(plan: Plan) -> list[Number]:
    """Bytes per device of the copies that take updates back, which only a post-validated plan of a model counts."""
    assert plan.model is not None
    assert plan.cluster is not None
    model, cluster = Model.from_hf(plan.model), Cluster.from_dict(plan.cluster)
    static = []
    for counted in (False, True):
        options = replace(plan.options, post_validation=counted)
        units = model_units(model, cluster, options, pipeline=plan.devices)
        partition = Partition.cut(units, map(len, plan.partition))
        static.append(units.stage_costs(partition, plan.schedule.placement, on_host=plan.schedule.host_steps).static)
    return [more - less for less, more in zip(*static, strict=True)]


def average_bytes(plan: Plan) -> list[Number]:
    """Bytes per device of a moving average of the weights, in fp32 where the master copies are; no plan counts them."""
    master = element_bytes("fp32")
    share = Fraction(master, master + moment_bytes(plan.options.optimizer))
    return [copies * share for copies in undo_bytes(plan)]


def step_time(timeline: Timeline, options: RunOptions, *, tail: float) -> Number:
    """The time of a whole step: the pipeline's, and the `tail` behind it."""
    return pipeline_time(timeline, options) + tail


def pipeline_time(timeline: Timeline, options: RunOptions) -> Number:
    """The pipeline's time: with post-validation the longest span, as devices wait for each other no more."""
    return timeline.makespan if objective_of(options) == "makespan" else timeline.span


def _planned(problem: Problem, solution: Solution) -> tuple[tuple[PlannedUnit, ...], ...]:
    """The partition as a plan lists it; a fixed stage is one unit of type `stage`."""
    if isinstance(problem.workload, ModelUnits):
        assert solution.partition is not None
        return problem.workload.units.planned(solution.partition)
    schedule = solution.schedule
    recomputing = schedule.fused_recompute | {stage for stage, _ in schedule.explicit_recompute}
    return tuple((PlannedUnit("stage", s, "full" if s in recomputing else "none"),) for s in range(schedule.stages))
