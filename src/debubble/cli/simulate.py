"""`debubble simulate`: times, memory and bubbles of one fixed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import name_option, schedule_names
from debubble.cli.output import Json, console, print_answer
from debubble.cli.progress import told_after_a_while
from debubble.ir import InputError, Plan, Schedule, StageCosts

if TYPE_CHECKING:
    from debubble.views.scene import Scene

MICRO_BATCHES = 8
"""Micro-batches per step where nobody says how many."""


@app.command(rich_help_panel="Plan")
@o.with_option_groups
@told_after_a_while("Simulating")
def simulate(
    source: Annotated[
        str | None, typer.Argument(metavar="PLAN|MODEL", help="A plan file; with --schedule, a model.")
    ] = None,
    *,
    schedule: Annotated[
        str | None,
        name_option(
            schedule_names,
            what="schedule",
            help="1f1b, interleaved, zb-h1, zb-v, dualpipe-v, ... (all: `schedules`).",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="An order of operations as torch writes it.")] = None,
    costs: o.Costs = None,
    devices: o.Devices = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step (default: 8).")] = None,
    chunks: o.Chunks = None,
    memory_limit: o.MemoryLimit = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="An option of the schedule, as NAME=VALUE.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="With MODEL: none, selective or full, on every layer, or on those of the stages that the schedule's"
            " options choose (default: full on such stages, none elsewhere)."
        ),
    ] = None,
    host_chunks: Annotated[
        int,
        typer.Option(
            "--host-chunks",
            metavar="N",
            help="With --schedule: the last N chunks of every device have their optimizer states on the host, which"
            " steps them beside the pipeline.",
        ),
    ] = 0,
    run: o.ModelRun,
    json: Json = False,
) -> None:
    """Simulate a plan, or a schedule by name with costs, with a model, or with unit costs.

    Degrees that are not given are 1 (ZeRO 0, the pipeline all other devices).
    """
    of_a_schedule = {"micro-batches": micro_batches, "chunks": chunks, "option": option, "devices": devices}
    if schedule is None and csv is None:
        if source is None:
            raise InputError("Give a plan file, or a schedule with --schedule NAME (see `debubble schedules`).")
        run.refuse_given()
        of_no_plan = {**of_a_schedule, "costs": costs, "recompute": recompute, "host-chunks": host_chunks or None}
        _refuse(of_no_plan, "a plan file says all of its step")
        scene = _scene_of_plan(source, memory_limit)
    elif source is not None:
        from debubble.models import named_model
        from debubble.views.scene import configuration_scene

        if schedule is None or csv is not None:
            raise InputError("--csv is simulated with --costs, not with a MODEL; leave one of them out.")
        if costs is not None:
            raise InputError("Give either MODEL or --costs, not both.")
        if devices is not None:
            raise InputError("--devices is for --costs; give a MODEL's devices with --cluster and --pipeline.")
        scene = configuration_scene(
            named_model(source), run.require_cluster(), run.run_options, schedule=schedule,
            micro_batches=MICRO_BATCHES if micro_batches is None else micro_batches,
            pipeline=run.pipeline, chunks=chunks, recompute=recompute, memory_limit=memory_limit,
            host_chunks=host_chunks, schedule_options=_given(option),
        )  # fmt: skip
    else:
        run.refuse_given()
        if csv is not None:
            _refuse({"schedule": schedule, **of_a_schedule}, "the CSV says the order of all operations")
        if recompute is not None:
            o.refuse_without_model("recompute")
        limit = o.abstract_limit(memory_limit)
        if csv is not None:
            chosen, stage_costs = _of_csv(csv, costs, limit)
        else:
            assert schedule is not None
            objective = "span" if run.post_validation else "makespan"
            chosen, stage_costs = _named(
                schedule, costs, devices, MICRO_BATCHES if micro_batches is None else micro_batches, chunks, limit,
                objective, _given(option),
            )  # fmt: skip
        scene = _abstract_scene(chosen, stage_costs, host_chunks=host_chunks, post_validation=run.post_validation)
    _show(scene, json=json)


def _refuse(options: Mapping[str, Any], reason: str) -> None:
    """Raise InputError for the first of these options that was given."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"Leave --{name} out: {reason}.")


def _scene_of_plan(path: str, memory_limit: str | None) -> Scene:
    """A plan file's step, under another memory limit if one is given."""
    from debubble.views.scene import Scene

    plan = Plan.load(path)
    if memory_limit is not None:
        plan = replace(plan, costs=plan.costs.with_limit(_limit_of_plan(plan, memory_limit)))
    return replace(Scene.predicted(plan), title=plan.schedule.name)


def _limit_of_plan(plan: Plan, text: str) -> float | int | None:
    """A memory limit in the unit of the plan's costs: bytes, for a model's plan."""
    if plan.model is None:
        return o.abstract_limit(text)
    from debubble.costs import parse_size

    return parse_size(text)


def _show(scene: Scene, *, json: bool) -> None:
    timeline = scene.timeline
    schedule = timeline.program.schedule
    if json:
        from debubble.simulator import by_cause

        print_answer(
            schedule=schedule.name,
            step_time=scene.step_time,
            makespan=timeline.makespan,
            span=timeline.span,
            ideal_fraction=timeline.ideal_fraction,
            bubble_fraction=timeline.bubble_fraction,
            forward_bubbles=list(timeline.forward_bubbles),
            backward_bubbles=list(timeline.backward_bubbles),
            bubbles=[{cause.value: t for cause, t in by_cause(idle).items() if t} for idle in scene.bubbles],
            peak_memory=list(timeline.peak_memory),
            devices=schedule.devices,
            stages=schedule.stages,
            micro_batches=schedule.micro_batches,
            operations=len(timeline.operations),
            remarks=list(scene.remarks),
        )
        return
    from debubble.views.scene_table import render_scenes

    console().print(render_scenes([scene]))


def _given(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; whole numbers, numbers and words."""
    given: dict[str, Any] = {}
    for text in options or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--option {text}: write NAME=VALUE.")
        given[name.replace("-", "_")] = _value(value)
    return given


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text


def _abstract_scene(schedule: Schedule, costs: StageCosts, *, host_chunks: int, post_validation: bool) -> Scene:
    """A schedule's step whose last chunks the hosts step."""
    from debubble import simulate as simulated
    from debubble.planners.analysis.explanation import timeline_remarks
    from debubble.views.scene import Scene

    timeline = simulated(schedule.with_host_steps(schedule.placement.last_chunks(host_chunks)), costs)
    return Scene.of(timeline, title=schedule.name, post_validation=post_validation, remarks=timeline_remarks(timeline))


def _of_csv(path: Path, costs_file: Path | None, limit: float | None) -> tuple[Schedule, StageCosts]:
    """The order of a torch CSV, and its costs."""
    from debubble.exports.torch_csv import read

    schedule = read(path)
    return schedule, _costs(schedule.stages, costs_file, limit)


def _named(
    name: str,
    costs_file: Path | None,
    devices: int | None,
    micro_batches: int,
    chunks: int | None,
    limit: float | None,
    objective: str,
    given: dict[str, Any],
) -> tuple[Schedule, StageCosts]:
    """A schedule by name, and its costs."""
    from debubble.schedules import schedules

    entry = schedules[name]
    if devices is None:
        raise InputError("Give the number of pipeline devices with --devices P, or a MODEL with --cluster.")
    costs = _costs(devices * (chunks or entry.default_chunks), costs_file, limit)
    options = {**entry.accepted(memory_limit=limit, objective=objective), **given}
    schedule = entry(devices=devices, micro_batches=micro_batches, chunks=chunks, costs=costs, **options)
    return schedule, costs


def _costs(stages: int, file: Path | None, limit: float | None) -> StageCosts:
    """The file's costs, or all times and sizes 1, under the memory limit if there is one."""
    from debubble.costs import load_costs

    costs = StageCosts.of(stages=max(stages, 1), offload=1) if file is None else load_costs(file, stages=stages)
    return costs if limit is None else costs.with_limit(limit)
