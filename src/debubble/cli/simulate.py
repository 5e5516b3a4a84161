"""`debubble simulate`: times, memory and bubbles of a plan or a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import Size, Theme
from debubble.cli.output import Json, check_pictures, console, log, print_answer, with_delayed_message, write_pictures
from debubble.cli.simulate_options import AbstractCosts, ScheduleChoice
from debubble.files import check_writable, write_whole
from debubble.ir import (
    DeadlockError,
    DebubbleError,
    InfeasibleError,
    InputError,
    OutOfMemoryError,
    Schedule,
    StageCosts,
)
from debubble.plans import Plan

if TYPE_CHECKING:
    from debubble.views.scene import Scene


@app.command(rich_help_panel="Plan")
@o.with_option_groups
@with_delayed_message("Simulating")
def simulate(
    source: Annotated[
        str | None, typer.Argument(metavar="PLAN|MODEL", help="A plan file; with --schedule or --csv, a model.")
    ] = None,
    *,
    choice: ScheduleChoice,
    inputs: AbstractCosts,
    run: o.ModelRun,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With MODEL and one schedule or --csv: write the plan here.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page: the schedules under each other.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of them on one time scale.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a vector picture.")] = None,
    pdf: Annotated[Path | None, typer.Option(help="Write a vector picture for papers.")] = None,
    theme: Theme = "light",
    size: Size = "slide",
    json: Json = False,
) -> None:
    """Simulate a plan, or a schedule by name.

    A schedule is simulated with costs, with a model, or with unit costs.

    Degrees that are not given are 1 (ZeRO 0, the pipeline all other devices).
    """
    check_pictures(html=html, png=png, svg=svg, pdf=pdf)
    choices = choice.choices
    by_hand = choice.schedule is not None or choice.csv is not None
    if output is not None and (source is None or not by_hand or len(choices) > 1):
        raise InputError(
            "-o writes the plan of a MODEL by one schedule: give both, with --schedule NAME or --csv FILE."
        )
    check_writable(output)
    if choice.csv is not None:
        choice.check_with_order(inputs)
        if choice.schedule is not None:
            csv_order = _csv_order(choice.csv)
            choices = {label: entry.with_micro_batches_of(csv_order) for label, entry in choices.items()}
            inputs = replace(inputs, devices=csv_order.devices) if source is None else inputs
    divided = source is None and _divided([*choices.values()], inputs.costs)
    scenes, errors = _scenes(source, choices, inputs, run, divided=divided)
    misfits = {name: str(error) for name, error in errors.items()}
    if misfits:
        not_drawn = (f"{name} is not drawn: {reason}" for name, reason in misfits.items())
        scenes = [replace(scenes[0], remarks=(*scenes[0].remarks, *not_drawn)), *scenes[1:]]
    _draw(scenes, html=html, pictures={"png": png, "svg": svg, "pdf": pdf}, theme=theme, size=size)
    if output is not None:
        _save(scenes[0], output)
        scenes[0] = replace(scenes[0], file=str(output))
    if json:
        compared = [] if len(choices) == 1 else [_figures(scene) for scene in scenes]
        print_answer(**_figures(scenes[0]), **({"schedules": compared, "do_not_fit": misfits} if compared else {}))
    else:
        from debubble.views.scene_table import render_compared, render_scenes

        caption = EQUAL_WORK if divided else _joined_words(scenes, inputs.costs)
        several = len(choices) > 1
        console().print(
            render_compared(scenes, misfits, caption=caption)
            if several
            else render_scenes(scenes, details=True, width=console().width)
        )
    exit_codes = [error.exit_code for error in errors.values() if isinstance(error, DeadlockError | InputError)]
    if exit_codes:
        raise typer.Exit(max(exit_codes))


def _scene(
    source: str | None, choice: ScheduleChoice, inputs: AbstractCosts, run: o.ModelRun, *, divided: bool
) -> Scene:  # fmt: skip
    if choice.schedule is None and choice.csv is None:
        return _scene_of_plan(source, choice, inputs, run)
    if source is not None:
        return _scene_of_model(source, choice, inputs, run)
    return _scene_of_costs(choice, inputs, run, divided=divided)


STAGES_OF_ONE = (
    "Times and activations of 1 are a stage's, of which a device has {chunks}; several schedules, as in --schedule"
    " 1f1b,zb-v, are compared on the same work per device."
)
EQUAL_WORK = "Of equal work per device: v stages have 1/v of a stage's times and bytes each; messages take as long."


def _divided(choices: Sequence[ScheduleChoice], costs: Path | None) -> bool:
    """Tell whether per-stage costs are divided by the schedules' chunks, which gives devices equal work."""
    if costs is not None and _num_stages(costs) > 1:
        return False
    return len({_num_chunks(choice) for choice in choices if choice.schedule is not None or choice.csv is not None}) > 1


def _num_stages(costs: Path) -> int:
    """The number of stages of a costs file; 1 if its costs hold for any stage."""
    from debubble.costs import load_costs

    return load_costs(costs).stages


def _num_devices(costs: Path, chunks: int) -> int | None:
    """The number of devices for a costs file's stages with these chunks; None if its costs hold for any stage."""
    stages = _num_stages(costs)
    return stages // chunks if stages > 1 and stages % chunks == 0 else None


def _joined_words(scenes: Sequence[Scene], costs: Path | None) -> str:
    """Sentences on costs file stages that are joined to a schedule's fewer stages; empty if none are."""
    stages = 1 if costs is None else _num_stages(costs)
    counts = {scene.title: stages // scene.timeline.program.schedule.stages for scene in scenes}
    return "  ".join(f"A stage of {name} is {n} stages of the costs file." for name, n in counts.items() if n > 1)


def _scenes(
    source: str | None, choices: Mapping[str, ScheduleChoice], inputs: AbstractCosts, run: o.ModelRun, *, divided: bool
) -> tuple[list[Scene], dict[str, DebubbleError]]:
    """Simulate the schedules and return scenes, and errors of those that fail; raises an error if all fail."""
    scenes: list[Scene] = []
    misfits: dict[str, DebubbleError] = {}
    for label, choice in choices.items():
        try:
            scene = _scene(source, choice, inputs, run, divided=divided)
        except (DeadlockError, InfeasibleError, InputError) as error:
            misfits[label] = error
        else:
            scenes.append(replace(scene, title=label) if ":" in label and len(choices) > 1 else scene)
    if not scenes:
        raise _none_simulated(misfits)
    return scenes, misfits


def _none_simulated(misfits: Mapping[str, DebubbleError]) -> DebubbleError:
    """The common error of schedules that cannot be simulated, or one with all their reasons."""
    sentences = {str(error): error for error in misfits.values()}
    if len(sentences) == 1:
        return next(iter(sentences.values()))
    words = "  ".join(f"{name}: {error}" for name, error in misfits.items())
    is_wrong_input = any(isinstance(error, InputError) for error in misfits.values())
    return InputError(words) if is_wrong_input else InfeasibleError(words)


def _draw(
    scenes: Sequence[Scene], *, html: Path | None, pictures: Mapping[str, Path | None], theme: str, size: str
) -> None:
    """Write the requested page and pictures."""
    from debubble.views import views
    from debubble.views.picture import picture

    if html is not None:
        write_whole(html, views["html"](scenes))
        log().print(f"Wrote {html}.")
    write_pictures(partial(picture, scenes, theme=theme, size=size), **pictures)


def _save(scene: Scene, output: Path) -> None:
    """Save the plan of a scene."""
    assert scene.plan is not None
    scene.plan.save(output)
    log().print(f"Wrote {output}.")


def _scene_of_plan(path: str | None, choice: ScheduleChoice, inputs: AbstractCosts, run: o.ModelRun) -> Scene:
    """Simulate a plan file, with another memory limit if one is set."""
    from debubble.views.scene import Scene

    if path is None:
        raise InputError("Give a plan file, or a schedule with --schedule NAME (see `debubble schedules`).")
    if run.cluster is not None:
        raise InputError(
            "Give the MODEL's schedule with --schedule NAME (see `debubble schedules`); a plan file takes no --cluster."
        )
    run.refuse_options()
    unsupported = {
        "costs": inputs.costs,
        "recompute": choice.recompute,
        "layers": choice.layers,
        "host-chunks": choice.host_chunks or None,
    }
    choice.refuse(inputs, "a plan file says all of its step", **unsupported)
    plan = Plan.load(path)
    if choice.memory_limit is not None:
        plan = replace(plan, costs=plan.costs.with_limit(_limit_of_plan(plan, choice.memory_limit)))
    return replace(Scene.predicted(plan), title=plan.schedule.name)


MORE_RECOMPUTATION = ("selective", "full")
"""Recomputation that is tried for schedules that do not fit without."""


def _scene_of_model(name: str, choice: ScheduleChoice, inputs: AbstractCosts, run: o.ModelRun) -> Scene:
    """Simulate a model with a schedule."""
    from debubble.models import named_model
    from debubble.planners.fixed_plan import fixed_plan
    from debubble.views.scene import Scene

    if inputs.costs is not None:
        raise InputError("Give either MODEL or --costs, not both.")
    if inputs.devices is not None:
        raise InputError("--devices is for --costs; give a MODEL's devices with --cluster and --pipeline.")
    csv_order = None if choice.csv is None else _csv_order(choice.csv)
    model, schedule = named_model(name), csv_order or str(choice.schedule)
    micro_batches = choice.step_micro_batches if csv_order is None else csv_order.micro_batches

    def scene(recompute: str | None) -> Scene:
        plan = fixed_plan(
            model, run.require_cluster(), schedule=schedule,
            micro_batches=micro_batches, pipeline=run.pipeline, chunks=choice.chunks,
            recompute=recompute, memory_limit=choice.memory_limit, layers=choice.stage_layers,
            host_chunks=choice.host_chunks, schedule_options=choice.settings, **asdict(run.run_options),
        )  # fmt: skip
        return replace(Scene.predicted(plan), title=plan.schedule.name)

    def step(recompute: str) -> float:
        try:
            return float(scene(recompute).step_time)
        except DebubbleError:
            return math.inf

    try:
        return scene(choice.recompute)
    except InfeasibleError as error:
        ways = MORE_RECOMPUTATION if choice.recompute in (None, "none") else ()
        fastest = min(((step(way), way) for way in ways), default=(math.inf, ""))
        if fastest[0] == math.inf:
            raise
        sentence = error.problem if isinstance(error, OutOfMemoryError) else str(error).partition(";")[0]
        raise InfeasibleError(f"{sentence}; --recompute {fastest[1]} fits.", missing=error.missing) from error


def _csv_order(file: Path) -> Schedule:
    """Read a CSV's order of operations."""
    from debubble.frameworks.torch.export import read

    return read(file)


def _scene_of_costs(choice: ScheduleChoice, inputs: AbstractCosts, run: o.ModelRun, *, divided: bool) -> Scene:
    """Simulate a schedule or a CSV's order with abstract costs, and the last chunks' optimizer on hosts."""
    from debubble import simulate as simulated
    from debubble.planners.analysis.remarks import timeline_remarks
    from debubble.views.scene import Scene

    run.refuse_options()
    for name in ("recompute", "layers"):
        if getattr(choice, name) is not None:
            o.refuse_without_model(name)
    if choice.csv is None:
        schedule, costs = _built(
            choice, inputs, objective="span" if run.post_validation else "makespan", divided=divided
        )  # fmt: skip
    else:
        schedule = _csv_order(choice.csv)
        parts = schedule.stages // schedule.devices if divided else 1
        costs = _costs(schedule.stages, inputs.costs, o.abstract_limit(choice.memory_limit), parts=parts)
    hosted = schedule.with_host_steps(schedule.placement.last_chunks(choice.host_chunks))
    try:
        timeline = simulated(hosted, costs)
    except OutOfMemoryError as error:
        error.args = (f"{error.problem}; raise the memory limit, or take another schedule.",)
        raise
    scene = Scene(
        timeline, title=schedule.name, post_validation=run.post_validation, remarks=timeline_remarks(timeline)
    )  # fmt: skip
    remark = _joined_words([scene], inputs.costs)
    chunks = schedule.placement.chunks
    if inputs.costs is None and not divided and chunks > 1:
        remark = STAGES_OF_ONE.format(chunks=chunks)
    return replace(scene, remarks=(*scene.remarks, remark)) if remark else scene


def _num_chunks(choice: ScheduleChoice) -> int:
    """Stages per device of a named schedule or a CSV's order."""
    from debubble.schedules import schedules

    if choice.csv is not None:
        csv_order = _csv_order(choice.csv)
        return csv_order.stages // csv_order.devices
    return choice.chunks or schedules[str(choice.schedule)].default_chunks


def _built(
    choice: ScheduleChoice, inputs: AbstractCosts, *, objective: str, divided: bool
) -> tuple[Schedule, StageCosts]:  # fmt: skip
    """Build a named schedule and its costs, which may be divided by its stages per device."""
    from debubble.schedules import schedules

    assert choice.schedule is not None
    entry, limit = schedules[choice.schedule], o.abstract_limit(choice.memory_limit)
    chunks = _num_chunks(choice)
    requested = inputs.devices
    if requested is None and inputs.costs is not None:
        requested = _num_devices(inputs.costs, chunks)
    devices = o.required_devices(requested, otherwise=", or a MODEL with --cluster")
    costs = _costs(devices * chunks, inputs.costs, limit, parts=chunks if divided else 1)
    options = {**entry.accepted_options(memory_limit=limit, objective=objective), **choice.settings}
    schedule = entry(
        devices=devices, micro_batches=choice.step_micro_batches, chunks=choice.chunks, costs=costs, **options
    )
    return schedule, costs


def _limit_of_plan(plan: Plan, text: str) -> float | int | None:
    """Parse a memory limit in the unit of the plan's costs, which is bytes for a model's plan."""
    if plan.model is None:
        return o.abstract_limit(text)
    from debubble.costs import parse_size

    return parse_size(text)


def _figures(scene: Scene) -> dict[str, Any]:
    """The keys of `answers.SimulateAnswer`, without the version."""
    from debubble.simulator import by_cause

    timeline = scene.timeline
    schedule = timeline.program.schedule
    return dict(
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
        peak_times=list(scene.peak_times),
        fullest=scene.fullest,
        devices=schedule.devices,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches // schedule.slices,
        operations=len(timeline.operations),
        remarks=list(scene.remarks),
    )


def _costs(stages: int, file: Path | None, limit: float | None, *, parts: int) -> StageCosts:
    """The file's costs, or unit costs, with the memory limit if there is one.

    Surplus stages of a file are joined; costs that hold for any stage are divided by `parts`.
    """
    from debubble.costs import load_costs

    if file is None:
        costs = StageCosts.of(stages=max(stages, 1), offload=1).divided(parts)
    elif _num_stages(file) == 1:
        costs = load_costs(file, stages=stages).divided(parts)
    else:
        full = load_costs(file)
        try:
            costs = full.joined(stages)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error
    return costs if limit is None else costs.with_limit(limit)
