"""Planning: makes a Plan for a problem, or for a model on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from debubble.argument_types import check_type, with_checked_types
from debubble.costs import Cluster, measured_source, read_profile
from debubble.costs.lengths import MicroBatchSize, checked_lengths, read_lengths, typical_step
from debubble.files import read_file
from debubble.ir import DEFAULT_EFFORT, InputError, RunOptions
from debubble.ir.degrees import Degrees
from debubble.models import Model, as_model
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.simplest import TOLERANCE
from debubble.planners.degrees.space import Job
from debubble.planners.micro_batch_order import with_lengths
from debubble.planners.model_problem import half_layers, problem_of
from debubble.planners.plan_cache import CachedAnswer
from debubble.planners.problem import ModelUnits, Problem, Swap
from debubble.planners.progress import Listener, tell
from debubble.planners.registry import Result, planners
from debubble.plans import ModelOnCluster, Plan
from debubble.registry import unknown_name
from debubble.targets import targets


@with_checked_types(but=("model", "cluster"))
def plan(
    model: Model | str | Path,
    cluster: Cluster | str | Path,
    *,
    global_batch: int | None = None,
    micro_batches: int | None = None,
    planner: str = "auto",
    pipeline: int | None = None,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    effort: float = DEFAULT_EFFORT,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Path | Mapping[str, Any] | None = None,
    target: str | None = None,
    swap: Swap = "host",
    robust: bool = False,
    compare: bool = False,
    fastest: bool = False,
    lengths: Path | str | Mapping[int, int] | None = None,
    progress: Listener | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan that fits for a model on a cluster.

    With `global_batch` the degrees of parallelism, the ZeRO level and the micro-batch size are searched, except those
    among the other arguments, which are fixed.  Without it they are the arguments, or 1 by default.

    Args:
        model: A model, a built-in name, a `config.json` or a folder with one.
        cluster: A cluster, a text such as `8xA100-80GB`, or a YAML file.
        global_batch: Sequences per step, over all replicas and micro-batches; None: the degrees are not searched.
        micro_batches: Per pipeline and step; None: 32, or what the search chooses.
        planner: A planner's name.
        pipeline: Devices of the pipeline; None: all devices, divided by the other degrees, or what the search chooses.
        chunks: Stages per device; None: the planner's choice.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        effort: Work that a planner may do, in seconds of the reference machine (see `search.effort`); the same call
            gives the same plan on every machine.
        deadline: Wall-clock seconds after which a planner stops; None: ten times the effort and a minute.  The plan's
            `cut_off` names the planners that the deadline stopped.
        cache: Start from this machine's cached plan for the same question and its schedules for similar ones, and
            cache the new ones: the answer depends on earlier calls.
        seed: Seed of the searches.
        profile: A units file that `debubble profile` measured, or its content; not with `global_batch`.
        target: Name of the framework that is to run the plan: only what it can run is searched (see `targets`).
        swap: Where activations may go: `host`, `peer` (the paired device; the planners obscura and bpipe) or `none`;
            to peers not with `global_batch` or a target.
        robust: Compare plans by their mean step under disturbances (noise, a slow device, slow links), not by the
            predicted one; not with `global_batch`.
        compare: Let `auto` run every planner, `planner`, the papers' and the baselines too; not with `global_batch`.
        fastest: Return the fastest plan, even if a simpler one is only a little slower (with `global_batch` 2%).
        lengths: The lengths of the sequences: a file (see `costs.lengths.read_lengths`), or a mapping from numbers of
            tokens to numbers of sequences; None: all have `sequence_length`.  Not with `global_batch`.
        progress: Called after every choice of degrees and every planner.
        options: Those of RunOptions, such as `sequence_length=8192` (4096 by default).

    Raises:
        InputError: for an unknown name, and for arguments that contradict each other.
        InfeasibleError: if nothing fits, with the reason.
    """
    model, cluster = as_model(model), Cluster.of(cluster)
    run = for_target(run_options(options), target)
    numbers = {
        "global_batch": global_batch, "micro_batches": micro_batches, "pipeline": pipeline, "chunks": chunks,
        "seed": seed,
    }  # fmt: skip
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    if run.expert_overlap and (target is None or targets[target].overlapping is None):
        raise InputError("--expert-overlap is Megatron-LM's and Primus's combined 1F1B; plan --for megatron or primus.")
    planner = "auto" if compare else planner
    cached = CachedAnswer()
    if cache:
        choices = {"planner": planner, "target": target, "swap": swap, "robust": robust, "compare": compare}
        files = {"lengths": _content(lengths), "profile": _content(profile), "fastest": fastest}
        job_of = {"model": model.config, "cluster": cluster.to_dict(), "run": vars(run)}
        cached = CachedAnswer.look_up({**numbers, **choices, **files, **job_of})
    search: dict[str, Any] = {
        "effort": effort, "deadline": deadline, "cache": cache, "seed": seed + cached.times, "target": target
    }  # fmt: skip
    if global_batch is not None:
        _check_searched(profile=profile, swap=swap, robust=robust, compare=compare, lengths=lengths)
        degrees = {"pipeline": pipeline, "chunks": chunks, "micro_batches": micro_batches, **options}
        fixed = {name: degree for name, degree in degrees.items() if name in DEGREES and degree is not None}
        job = Job(
            model=model, cluster=cluster, global_batch=global_batch, options=run, fixed=fixed,
            tolerance=0.0 if fastest else TOLERANCE, swap=swap, **search,
        )  # fmt: skip
        return cached.answer(partial(_plan_of_job, job, planner), progress)
    _check_target(target, run, swap=swap, lengths=lengths)
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    cluster = cluster if measured is None else _with_measured_reserve(cluster, measured)
    count = MICRO_BATCHES if micro_batches is None else micro_batches
    problem = problem_of(
        model, cluster, run, micro_batches=count, pipeline=pipeline, chunks=chunks, profile=measured, **search
    )
    problem = replace(problem.swapping(swap), robust=robust, compare=compare, plain=not fastest)
    if lengths is not None:
        problem = with_lengths(problem, _micro_batch_sizes(lengths, run, problem.micro_batches))
    described = ModelOnCluster(model, cluster)
    return cached.answer(partial(_plan_of_problem, problem, planner, described, run, measured), progress)


def for_target(options: RunOptions, target: str | None) -> RunOptions:
    """The options of a run for a target, with the costs of its framework if they name none."""
    return options if target is None else targets[target].priced(options)


def _plan_of_problem(
    problem: Problem, planner: str, described: ModelOnCluster, run: RunOptions, profile: Mapping[str, Any] | None
) -> Plan:
    """The plan of a problem with fixed degrees."""
    return replace(_model_plan(planners[planner](problem), problem, described, run, profile), profile=profile)


def _with_measured_reserve(cluster: Cluster, profile: Mapping[str, Any]) -> Cluster:
    """The cluster with the reserve that a profile measured, if it did."""
    source = measured_source(profile)
    if source is None or source.unplanned_bytes is None:
        return cluster
    return cluster.with_measured_reserve(source.unplanned_bytes)


def _plan_of_job(job: Job, planner: str) -> Plan:
    """The plan of a job with searched degrees."""
    best = search_degrees(job, planner=planner, progress=tell)
    described = ModelOnCluster(job.model, job.cluster)
    made = _model_plan(best.result, best.problem, described, job.run_options(best.degrees))
    return replace(made, degree_search=best.search)


MICRO_BATCHES = 32
"""Default number of micro-batches per pipeline and step."""


def _check_target(target: str | None, run: RunOptions, *, swap: Swap, lengths: object) -> None:
    """Raise InputError for arguments that a target does not support, and for lengths with slices."""
    if target is not None and swap == "peer":
        raise InputError("No target moves activations to peers; leave out the swap or the target.")
    if target is not None and lengths is not None:
        raise InputError("No target can be told the lengths of micro-batches: leave out the lengths or the target.")
    if run.slices > 1 and lengths is not None:
        raise InputError("Slices are equal parts of equal sequences: leave out the lengths or the slices.")


def _check_searched(*, profile: object, swap: Swap, robust: bool, compare: bool, lengths: object) -> None:
    """Raise InputError for arguments that need fixed degrees."""
    if profile is not None:
        raise InputError(
            "A profile is of one choice of degrees: give it with micro_batches and micro_batch_size in place of a"
            " global batch."
        )
    if swap == "peer":
        raise InputError("Activations go to peers for given degrees alone: leave out the global batch.")
    if robust:
        raise InputError("Robust plans are of given degrees: leave out the global batch, and give micro-batches.")
    if compare:
        raise InputError("All planners are compared for given degrees: leave out the global batch, or the comparison.")
    if lengths is not None:
        raise InputError("Lengths are assigned to micro-batches of given degrees: leave out the global batch.")


def run_options(options: Mapping[str, Any]) -> RunOptions:
    """The options of a run.  Raises InputError for an unknown name or a value of the wrong type."""
    types = get_type_hints(RunOptions)
    for name, value in options.items():
        if name not in types:
            raise unknown_name(name, types, kind="option of a run")
        check_type(name, value, types[name])
    return RunOptions(**options)


def _micro_batch_sizes(
    lengths: Path | str | Mapping[int, int], run: RunOptions, micro_batches: int
) -> list[MicroBatchSize]:
    """The sizes of the micro-batches of a typical step."""
    histogram = read_lengths(Path(lengths)) if isinstance(lengths, str | Path) else checked_lengths(lengths)
    return typical_step(
        histogram, micro_batches=micro_batches, micro_batch_size=run.micro_batch_size,
        sequence_length=run.sequence_length, replicas=run.data,
    )  # fmt: skip


def _content(source: Path | str | Mapping[Any, Any] | None) -> Any:
    """The content of a file, or the value itself."""
    return read_file(Path(source), "file").decode(errors="replace") if isinstance(source, str | Path) else source


DEGREES = frozenset(field.name for field in fields(Degrees))
"""Names of the degrees that can be fixed in a search."""


def _model_plan(
    result: Result,
    problem: Problem,
    described: ModelOnCluster,
    options: RunOptions,
    profile: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a model; a target's units, which are layers, are split into half-layers."""
    plan = replace(_plan_of(result, options), model_on_cluster=described)
    solution, levers = result.solution, problem.levers
    if levers is None:
        return replace(plan, target=problem.target)
    assert solution.partition is not None
    units = half_layers(
        *described, options, pipeline=problem.devices, profile=profile, target=problem.target,
        micro_batches=problem.micro_batches // options.slices,
    )  # fmt: skip
    partition = levers.halves(units, problem.units, solution.partition)
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
        degrees: Whether to search the degrees of parallelism; if not, the plan's are kept.
        search: Further arguments of `plan`: planner, effort, deadline, cache, seed and progress; with the plan's
            degrees also chunks and profile.

    Raises:
        InputError: if the plan was made from abstract costs.
        InfeasibleError: if nothing fits.
    """
    described = plan_.model_on_cluster
    if described is None:
        raise InputError("A plan of abstract costs names no model to plan again.")
    options = vars(plan_.options)
    batch: dict[str, Any]
    if degrees:
        batch = {"global_batch": plan_.degrees.global_batch, "fastest": True}
        options = {name: value for name, value in options.items() if name not in DEGREES}
    else:
        batch = {"micro_batches": plan_.micro_batches, "pipeline": plan_.devices}
    return plan(described.model, described.cluster, target=plan_.target, **batch, **options, **search)


def solve(problem: Problem, *, planner: str = "auto", options: RunOptions | None = None) -> Plan:
    """Solve a problem of abstract costs or of units with a planner, for a run with these options.

    The dtype of measured units replaces that of the options.  Raises InfeasibleError if nothing fits.
    """
    options = options or RunOptions()
    if isinstance(problem.workload, ModelUnits) and problem.workload.units.dtype is not None:
        options = replace(options, dtype=problem.workload.units.dtype)
    planner = "auto" if problem.compare else planner
    return replace(_plan_of(planners[planner](problem), options), measured=problem.measured)


def _plan_of(result: Result, options: RunOptions) -> Plan:
    return Plan(
        planner=result.planner,
        schedule=result.solution.schedule,
        costs=result.solution.costs,
        lower_bound=result.lower_bound,
        bound_argument=result.bound_argument,
        solve_seconds=result.solve_seconds,
        partition=result.partition,
        candidates=result.solution.candidates or (result.summary,),
        options=options,
        timeline=result.timeline,
    )
