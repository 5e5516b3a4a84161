"""From a problem, or a model on a cluster, to a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.costs import Cluster, StepTail, model_units, profiled, read_profile, step_tail
from debubble.costs.parallel_layout import Layout
from debubble.costs.units import Partition
from debubble.ir import Number, Plan, PlannedUnit, RunOptions
from debubble.models import Model
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.registry import planners
from debubble.simulator import Timeline

if TYPE_CHECKING:
    from debubble.search.problem import Objective


def plan(
    model: Model,
    cluster: Cluster,
    *,
    micro_batches: int = 32,
    planner: str = "auto",
    pipeline: int | None = None,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    effort: float = 10.0,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Path | Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan that fits for a model on a cluster.

    `pipeline`: devices of the pipeline (default: all that tensor, data and context parallelism leave).
    `memory_limit`: per device, bytes or a text such as `20GiB` (default: the cluster's).  `profile`: a units file that
    `debubble profile` measured, or its content.  Further options are RunOptions', such as `sequence_length=4096`.

    `effort`: work that a planner may do, in seconds of the reference machine (see `solver.effort`); the same call gives
    the same plan on every machine.  `deadline`: seconds on the clock after which a planner stops all the same (default:
    ten times the effort and a minute); the plan's `cut_off` names those that had to.  `cache`: start from schedules
    that this machine has found before, and keep the new ones.

    Raises InputError for what does not go together, InfeasibleError with the reason if nothing fits.
    """
    run = RunOptions(**options)
    cluster = cluster if memory_limit is None else cluster.with_limit(memory_limit)
    measured = read_profile(profile) if isinstance(profile, str | Path) else profile
    problem = problem_of(
        model, cluster, run, micro_batches=micro_batches, pipeline=pipeline, chunks=chunks, effort=effort, seed=seed,
        deadline=deadline, cache=cache, profile=measured,
    )  # fmt: skip
    found = solve(problem, planner=planner, model=model.config, cluster=cluster.to_dict(), options=run)
    return replace(found, profile=measured)


def problem_of(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    micro_batches: int,
    pipeline: int | None = None,
    chunks: int | None = None,
    effort: float = 10.0,
    deadline: float | None = None,
    cache: bool = False,
    seed: int = 0,
    profile: Mapping[str, Any] | None = None,
) -> Problem:
    """What the planners are asked for a model on a cluster."""
    devices = pipeline_devices(cluster, options, pipeline)
    units = model_units(model, cluster, options, pipeline=devices)
    if profile is not None:
        units = profiled(units, profile, model=model, options=options)
    return Problem(
        devices=devices, micro_batches=micro_batches, workload=ModelUnits(units), chunks=chunks, effort=effort,
        seed=seed, deadline=deadline, cache=cache, objective=objective_of(options),
        tail=StepTail(model=model, cluster=cluster, options=options, pipeline=devices),
    )  # fmt: skip


def pipeline_devices(cluster: Cluster, options: RunOptions, pipeline: int | None = None) -> int:
    """The pipeline's length; raises InputError if the parallel degrees do not make up the cluster."""
    layout = Layout.of(cluster, options, pipeline)
    layout.check_all_used(options)
    return layout.pipeline


def solve(
    problem: Problem,
    *,
    planner: str = "auto",
    model: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
) -> Plan:
    """Let a planner solve a problem.  Raises InfeasibleError if it finds nothing that fits."""
    result = planners[planner](problem)
    return Plan(
        planner=planner,
        schedule=result.solution.schedule,
        costs=result.solution.costs,
        lower_bound=result.lower_bound,
        solve_seconds=result.solve_seconds,
        partition=_planned(problem, result.solution),
        candidates=result.solution.candidates or (result.summary,),
        model=model,
        cluster=cluster,
        options=options or RunOptions(),
    )


def tail_of(plan: Plan) -> float:
    """Seconds that a model's step takes after its pipeline, for gradients and optimizer; 0 for abstract costs."""
    if plan.model is None or plan.cluster is None:
        return 0.0
    return step_tail(
        Model.from_hf(plan.model), Cluster.from_dict(plan.cluster), plan.options, pipeline=plan.devices,
        schedule=plan.schedule,
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


def step_time(timeline: Timeline, options: RunOptions, *, tail: float) -> Number:
    """Of a whole step: with post-validation devices wait for each other no more, and the longest span counts."""
    return pipeline_time(timeline, options) + tail


def pipeline_time(timeline: Timeline, options: RunOptions) -> Number:
    """What of it is the pipeline's."""
    return timeline.makespan if objective_of(options) == "makespan" else timeline.span


def objective_of(options: RunOptions) -> Objective:
    """What planners minimise."""
    return "span" if options.post_validation else "makespan"


def _planned(problem: Problem, solution: Solution) -> tuple[tuple[PlannedUnit, ...], ...]:
    """The partition as a plan lists it; a fixed stage is one unit of type `stage`."""
    if isinstance(problem.workload, ModelUnits):
        assert solution.partition is not None
        return problem.workload.units.planned(solution.partition)
    schedule = solution.schedule
    recomputing = schedule.fused_recompute | {stage for stage, _ in schedule.explicit_recompute}
    return tuple((PlannedUnit("stage", s, "full" if s in recomputing else "none"),) for s in range(schedule.stages))
