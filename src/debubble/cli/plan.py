"""`debubble plan`: the fastest plan that fits, beside every other planner's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import model_names, planner_names
from debubble.cli.origin import this_call
from debubble.cli.output import Json, console, log, print_answer
from debubble.cli.progress import SearchProgress
from debubble.files import write_whole
from debubble.ir import CutOffError, InfeasibleError, InputError, Plan, RunOptions, WhatIf

if TYPE_CHECKING:
    from debubble.costs import Cluster
    from debubble.ir.degrees import ConfigurationSummary, DegreeSearch
    from debubble.models import Model
    from debubble.planners import Problem
    from debubble.planners.analysis.explanation import Explanation
    from debubble.planners.analysis.nearest import NearestPlan
    from debubble.planners.degrees import Job
    from debubble.planners.problem import Swap


@app.command(rich_help_panel="Plan")
@o.with_option_groups
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A built-in name, a config.json, or a folder with one.", autocompletion=model_names
        ),
    ] = None,
    *,
    run: o.ModelRun,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences per step: searches the degrees, ZeRO and micro-batches that are not given.",
            rich_help_panel=o.QUESTION,
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Micro-batches per pipeline and step (default: 32).", rich_help_panel=o.QUESTION),
    ] = None,
    planner: Annotated[
        str,
        typer.Option(
            help="auto asks all of them; joint, portfolio, adapipe, ... (see `planners`) answer alone.",
            autocompletion=planner_names,
            rich_help_panel=o.QUESTION,
        ),
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan file here.", rich_help_panel=o.OUTPUT)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report here: one page with everything.", rich_help_panel=o.OUTPUT),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Search only what this framework can run: megatron, torchtitan, deepspeed, ... (docs/exports.md).",
            rich_help_panel=o.QUESTION,
        ),
    ] = None,
    all_targets: Annotated[
        bool,
        typer.Option(
            "--targets",
            help="Plan for every framework too: what the nearest plan costs in each.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = False,
    costs: o.Costs = None,
    units: o.UnitsFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", help="Measured units (see `profile`) instead of computed ones.", rich_help_panel=o.GIVEN
        ),
    ] = None,
    devices: o.Devices = None,
    chunks: o.Chunks = None,
    memory_limit: o.MemoryLimit = None,
    swap: Annotated[
        str, typer.Option(metavar="host/peer/none", help="Where activations may go (peer: --planner obscura or bpipe).")
    ] = "host",
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Lengths of the data set's sequences, in tokens: micro-batches differ, and are balanced and ordered.",
            rich_help_panel=o.QUESTION,
        ),
    ] = None,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Choose by the mean step under noise, a slow device and slow links, and say how plans degrade.",
            rich_help_panel=o.QUESTION,
        ),
    ] = False,
    search: o.SearchLimits,
    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens to train on: says how many days that takes.", rich_help_panel=o.OUTPUT),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Show stages, devices and every planner's answer too.", rich_help_panel=o.OUTPUT
        ),
    ] = False,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="Plan again without each lever, and with what might help.", rich_help_panel=o.OUTPUT
        ),
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Plan with less and less memory too: the front of time and memory.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits: schedule, partition, recomputation and offload together.

    Degrees that are not given are 1 (ZeRO 0, the pipeline all other devices); with --global-batch they are searched.
    """
    from debubble.planners import planners
    from debubble.planners.plan_model import MICRO_BATCHES, solve
    from debubble.planners.progress import listening

    planner = planners.full_name(planner)
    searches = planners[planner].searches
    _check_call(
        run, model=model, costs=costs, units=units, profile=profile, devices=devices, global_batch=global_batch,
        tokens=tokens, why=why, target=target, all_targets=all_targets, swap=swap, pareto=pareto, lengths=lengths,
    )  # fmt: skip
    front: tuple[ConfigurationSummary, ...] = ()
    nearest: tuple[NearestPlan, ...] = ()
    doing = f"Searching; the effort is {search.effort:g} s of the reference machine ..." if searches else "Planning ..."
    with log().status(doing) as status:
        if model is not None:
            from debubble.models import named_model
            from debubble.planners.degrees import nothing_fits
            from debubble.planners.plan_model import plan as plan_model

            shape, where = named_model(model), run.require_cluster()
            limited = where if memory_limit is None else where.with_limit(memory_limit)
            job = partial(
                _job, shape, limited, run, global_batch=global_batch, micro_batches=micro_batches, target=target
            )
            plan_for = partial(
                plan_model, shape, where, global_batch=global_batch, micro_batches=micro_batches, planner=planner,
                chunks=chunks, memory_limit=memory_limit, profile=profile, swap=_swap(swap),
                robust=robust, lengths=lengths, progress=SearchProgress(status), **asdict(search), **run.degrees,
                **run.settings,
            )  # fmt: skip
            try:
                result = plan_for(target=target)
            except CutOffError:
                raise
            except InfeasibleError as error:
                status.update("Nothing fits; trying what would ...")
                raise nothing_fits(job(), str(error)) from error
            if pareto:
                from debubble.planners.degrees import pareto_front

                status.update("Planning with less memory ...")
                front = pareto_front(replace(job(), effort=search.effort), _configuration(result))
            if all_targets:
                from debubble.planners.analysis.nearest import nearest_plans

                nearest = nearest_plans(result, lambda name: plan_for(target=name))
        else:
            problem = _abstract(
                costs, units, devices=devices, limit=o.abstract_limit(memory_limit),
                micro_batches=MICRO_BATCHES if micro_batches is None else micro_batches, chunks=chunks,
                objective="span" if run.post_validation else "makespan", **asdict(search),
            ).swapping(_swap(swap))  # fmt: skip
            problem = replace(problem, robust=robust)
            with listening(SearchProgress(status, seconds=False)):
                result = solve(problem, planner=planner, options=RunOptions(post_validation=run.post_validation))
    if result.degree_search is not None and result.degree_search.interrupted:
        log().print("Interrupted: this is the best so far.")
    changes = _what_ifs(result, search) if why else ()
    result = replace(result, what_ifs=changes, origin=this_call())
    if output is not None:
        result.save(output)
        log().print(f"The plan is in {output}.")
    if html is not None:
        from debubble.views import Scene, views

        write_whole(html, views["html"]([Scene.predicted(result)]))
        log().print(f"The report is in {html}.")
    _print(result, json=json, details=details, tokens=tokens, nearest=nearest, front=front)


def _check_call(
    run: o.ModelRun,
    *,
    model: str | None,
    costs: Path | None,
    units: Path | None,
    profile: Path | None,
    devices: int | None,
    global_batch: int | None,
    tokens: float | None,
    why: bool,
    target: str | None,
    all_targets: bool,
    swap: str,
    pareto: bool,
    lengths: Path | None,
) -> None:
    """Refuse options that do not go together, so that none is ignored; raises InputError."""
    if sum(given is not None for given in (model, costs, units)) != 1:
        raise InputError("Give a MODEL with --cluster, or --costs FILE, or --units FILE with --devices P.")
    if tokens is not None and not 0 < tokens < math.inf:
        raise InputError(f"--tokens must be a positive number, not {tokens:g}.")
    if model is None:
        for name, value in {
            "global_batch": global_batch, "profile": profile, "tokens": tokens, "for": target,
            "targets": all_targets or None, "pareto": pareto or None, "lengths": lengths,
        }.items():  # fmt: skip
            if value is not None:
                o.refuse_without_model(name)
        run.refuse_given()
    elif devices is not None:
        raise InputError("--devices is for --costs and --units; give a MODEL's devices with --cluster and --pipeline.")
    if pareto and (profile is not None or swap != "host" or lengths is not None):
        raise InputError(
            "--pareto plans a MODEL on a --cluster, without --profile, --swap and --lengths; leave it out here."
        )
    if why and (model is None or profile is not None or swap != "host" or lengths is not None):
        raise InputError(
            "--why plans changes of a MODEL on a --cluster, without --profile, --swap and --lengths; leave it out here."
        )


def _swap(name: str) -> Swap:
    """Where activations may go; raises InputError for anything else."""
    match name:
        case "host" | "peer" | "none":
            return name
        case _:
            raise InputError(f"--swap must be host, peer or none, not '{name}'.")


def _job(
    model: Model,
    cluster: Cluster,
    run: o.ModelRun,
    *,
    global_batch: int | None,
    micro_batches: int | None,
    target: str | None,
) -> Job:
    """The job whose degrees were given, or searched."""
    from debubble.planners.degrees import Job
    from debubble.planners.plan_model import MICRO_BATCHES

    if global_batch is not None:
        return Job(
            model=model, cluster=cluster, global_batch=global_batch, options=run.run_options, fixed=run.degrees,
            target=target,
        )  # fmt: skip
    options, number = run.run_options, MICRO_BATCHES if micro_batches is None else micro_batches
    degrees = {name: getattr(options, name) for name in o.DEGREES if name != "pipeline"}
    return Job(
        model=model, cluster=cluster, global_batch=options.data * options.micro_batch_size * number, options=options,
        fixed={**degrees, "micro_batches": number}, target=target,
    )  # fmt: skip


def _abstract(
    costs: Path | None,
    units: Path | None,
    *,
    devices: int | None,
    limit: float | None,
    chunks: int | None,
    **entries: Any,
) -> Problem:
    """The problem of a costs file or a units file."""
    from debubble.costs import load_costs, load_units
    from debubble.planners import FixedStages, ModelUnits, Problem

    if devices is None:
        raise InputError("Give the number of pipeline devices with --devices P.")
    workload: FixedStages | ModelUnits
    if units is not None:
        workload = ModelUnits(load_units(units, memory_limit=limit))
    else:
        assert costs is not None
        stage_costs = load_costs(costs, stages=max(devices, 1) * (chunks or 1))
        workload = FixedStages(stage_costs if limit is None else stage_costs.with_limit(limit))
    return Problem(workload=workload, devices=devices, chunks=chunks, **entries)


def _configuration(plan: Plan) -> ConfigurationSummary:
    """A model's plan as one choice of degrees."""
    from debubble.planners.analysis.explanation import Explanation
    from debubble.views import Scene

    scene = Scene.predicted(plan)
    return Explanation(plan, scene.timeline, float(scene.step_time)).configuration


def _what_ifs(plan: Plan, search: o.SearchLimits) -> tuple[WhatIf, ...]:
    from debubble.planners.analysis.what_if import what_ifs
    from debubble.views import Scene

    with log().status("Planning what would help ..."):
        step_time = float(Scene.predicted(plan).step_time)
        return what_ifs(plan, step_time, effort=search.effort, deadline=search.deadline)


def _print(
    plan: Plan,
    *,
    json: bool,
    details: bool,
    tokens: float | None,
    nearest: Sequence[NearestPlan],
    front: Sequence[ConfigurationSummary],
) -> None:
    from debubble.planners.analysis.explanation import explanation
    from debubble.planners.analysis.nearest import plan_runs_in
    from debubble.views.scene import Scene

    scene = Scene.predicted(plan)
    if not json:
        from debubble.views.plan_table import render

        console().print(render(plan, scene, tokens=tokens, details=details, nearest=nearest, front=front))
        return
    timeline, step_time = scene.timeline, scene.step_time
    searched = {} if plan.degree_search is None else _search_dict(plan.degree_search)
    why = explanation(plan, timeline, float(step_time))
    explained = {} if why is None else _explanation_dict(plan, why, tokens)
    print_answer(
        **{
            "planner": plan.planner,
            "schedule": plan.schedule.name,
            "devices": plan.devices,
            "chunks": plan.schedule.placement.chunks,
            "micro_batches": plan.micro_batches,
            "step_time": step_time,
            "makespan": timeline.makespan,
            "span": timeline.span,
            "lower_bound": plan.lower_bound,
            "bound_argument": plan.bound_argument,
            "gap": max(0.0, float((step_time - plan.lower_bound) / step_time)),
            "peak_memory": list(timeline.peak_memory),
            "partition": [[asdict(unit) for unit in stage] for stage in plan.partition],
            "recompute": list(plan.recompute),
            "solve_seconds": plan.solve_seconds,
            "cut_off": list(plan.cut_off),
            "target": plan.target,
            "runs_in": list(plan_runs_in(plan)),
            **({} if plan.robustness is None else {"robustness": asdict(plan.robustness)}),
            "candidates": [asdict(candidate) for candidate in plan.candidates],
            "remarks": list(scene.remarks),
            **explained,
            **(_what_if_dict(plan.what_ifs) if plan.what_ifs else {}),
            **searched,
            **({"pareto": [asdict(each) for each in front]} if front else {}),
            **({"targets": [asdict(each) for each in nearest]} if nearest else {}),
        }
    )


def _what_if_dict(changes: Sequence[WhatIf]) -> dict[str, Any]:
    """The planned changes for the JSON object: those that take a lever away, and those that are advice."""
    keys = "change", "step_time", "seconds_per_sequence"
    rows = [(each.lever, {key: getattr(each, key) for key in keys}) for each in changes]
    return {
        "levers": [row for lever, row in rows if lever],
        "advice": [row for lever, row in rows if not lever],
    }


def _explanation_dict(plan: Plan, why: Explanation, tokens: float | None) -> dict[str, Any]:
    """The entries of the JSON object that only a model's plan has."""
    days = {} if tokens is None else {"days": why.days(tokens)}
    return {
        "degrees": plan.degrees.to_dict(),
        "tokens_per_second": why.tokens_per_second,
        "tokens_per_second_per_device": why.tokens_per_second_per_device,
        "mfu": why.mfu,
        **days,
        "memory": [asdict(parts) for parts in why.memory],
        "reserve": why.reserve,
        "why": [asdict(cause) for cause in why.causes],
        "binds": why.binding,
    }


def _search_dict(search: DegreeSearch) -> dict[str, Any]:
    """The entries of the JSON object on a search of degrees: the best choices, the plan's first, and their counts."""
    counts = {key: value for key, value in asdict(search).items() if key != "configurations"}
    return {"configurations": [asdict(each) for each in search.configurations], "search": counts}
