"""`debubble sweep`: plans of a job for several values of one option, as a table and a page with a slider."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import Size, Theme
from debubble.cli.output import Json, SearchProgress, check_pictures, console, log, print_answer, write_pictures
from debubble.cli.plan_options import CostInputs, Output, PlanOptions, check_call
from debubble.cli.plan_request import ModelRequest
from debubble.formatting import listed
from debubble.ir import InputError
from debubble.processes import raise_gc_threshold

if TYPE_CHECKING:
    from debubble.planners.sweep import Sweep, SweepPoint

_WORDS = ("model", "cluster", "memory_limit", "optimizer", "dtype")
_NUMBERS = (
    "micro_batches", "global_batch", "sequence_length", "micro_batch_size", "pipeline", "tensor", "data", "context",
    "expert", "zero", "slices", "chunks", "lora", "images",
)  # fmt: skip


@app.command(rich_help_panel="Plan")
@o.with_option_groups
def sweep(
    model: o.OptionalModelName = None,
    *,
    over: Annotated[
        str,
        typer.Option(
            help="The option to vary, with its values, in place of a job file's: memory-limit=24GiB,32GiB,40GiB.",
            metavar="OPTION=VALUE,VALUE",
        ),
    ],
    run: o.ModelRun,
    options: PlanOptions,
    search: o.SearchLimits,
    html: Annotated[Path | None, typer.Option(help="Write the page with a slider over the plans.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the step by value.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write it as a vector picture.")] = None,
    pdf: Annotated[Path | None, typer.Option(help="Write it as a vector picture for papers.")] = None,
    theme: Theme = "light",
    size: Size = "slide",
    json: Json = False,
) -> None:
    """Plan a job for several values of one option.

    It may be a memory limit, a cluster, micro-batches, a degree, ...
    """
    from debubble.models import named_model
    from debubble.planners.sweep import sweep as swept
    from debubble.views.notebook import show
    from debubble.views.sweep_picture import sweep_picture

    raise_gc_threshold()
    check_pictures(html=html, png=png, svg=svg, pdf=pdf)
    name, values = _values(over)
    option = name.replace("_", "-")
    first_options = replace(options, global_batch=values[0]) if name == "global_batch" else options
    check_call(
        values[0] if name == "model" and model is None else model,
        run=run,
        options=first_options,
        inputs=CostInputs(),
        output=Output(),
    )
    _check_not_set(name, model, run, options)
    cluster = o.parse_cluster(values[0]) if name == "cluster" else run.require_cluster()
    request = ModelRequest(
        model=named_model(model or values[0]), cluster=cluster, run=run, options=options, inputs=CostInputs(),
        search=search, stream=False,
    )  # fmt: skip
    if name == "memory_limit":
        for value in values:
            o.with_memory_limit(cluster, value)
    with log().status(f"Planning {len(values)} times ...") as status:

        def begin(value: Any) -> SearchProgress:
            progress = SearchProgress(status, subject=f"{option} {value}")
            progress.begin()
            return progress

        arguments = {"model": request.model, "cluster": cluster, **request.arguments, name: values}
        result = swept(**arguments, progress_of=begin)
    if result.interrupted:
        last = result.points[-1].plan
        so_far = "; its search ended early" if last is not None and last.interrupted else ""
        log().print(f"Interrupted: {len(result.points)} of {len(values)} values were planned{so_far}.")
    if html is not None:
        show(result).save(html)
        log().print(f"The page is in {html}.")
    write_pictures(partial(sweep_picture, result, theme=theme, size=size), png=png, svg=svg, pdf=pdf)
    if json:
        print_answer(over=name, points=[_point(point) for point in result.points], interrupted=result.interrupted)
    else:
        _print_table(result)
    if not any(point.plan for point in result.points):
        raise typer.Exit(1)


def _print_table(result: Sweep) -> None:
    """Print the table of plans, a line per plan, and values whose plan is simpler than the fastest."""
    from rich.text import Text

    from debubble.planners.degrees.simplest import TOLERANCE
    from debubble.views.html.sweep import sweep_rows, sweep_words
    from debubble.views.terminal import rich_table

    console().print(rich_table(sweep_rows(result)))
    console().print(*(Text(f"{point.value}: {sweep_words(point)}") for point in result.points), sep="\n")
    searches = ((point.value, point.plan.degree_search) for point in result.points if point.plan is not None)
    simpler = [str(value) for value, search in searches if search is not None and search.fastest is not None]
    if simpler:
        console().print(
            f"Of {listed(simpler)} the plan is the simplest within {TOLERANCE:.0%} of the fastest;"
            " --fastest compares those."
        )


def _check_not_set(name: str, model: str | None, *groups: o.OptionGroup) -> None:
    """Raise InputError if the swept option, or the model, is also set on the command line."""
    defaults = {f.name: (getattr(group, f.name), f.default) for group in groups for f in fields(group)}
    value, default = (model, None) if name == "model" else defaults[name]
    if value != default:
        option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        raise InputError(f"--over has the values of {option}: leave out {option}.")


def _values(over: str) -> tuple[str, list[Any]]:
    """Parse --over into option and values.  Raises InputError if the option cannot vary or a value is wrong."""
    name, _, words = over.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if name not in (*_WORDS, *_NUMBERS):
        names = ", ".join(known.replace("_", "-") for known in (*_WORDS, *_NUMBERS))
        raise InputError(f"--over varies one of {names}: --over memory-limit=24GiB,32GiB.")
    values = [word.strip() for word in words.split(",") if word.strip()]
    if len(values) < 2:
        raise InputError(f"--over takes two values or more: --over {name.replace('_', '-')}=VALUE,VALUE.")
    if name in _WORDS:
        return name, values
    wrong = next((word for word in values if not word.isdecimal()), None)
    if wrong is not None:
        raise InputError(f"--over {name.replace('_', '-')} takes whole numbers, 0 or more, not '{wrong}'.")
    return name, list(map(int, values))


def _point(point: SweepPoint) -> dict[str, Any]:
    """The keys of `answers.SweepPointAnswer`."""
    from debubble.planners.analysis.likely_fit import plan_accuracy
    from debubble.planners.analysis.nearest_plans import plan_runs_in
    from debubble.views.scene import Scene

    plan = point.plan
    answer: dict[str, Any] = {"value": str(point.value), "fits": plan is not None, "reason": point.reason}
    answer["found_with"] = None if point.found_with is None else str(point.found_with)
    if plan is None:
        names = ("step_time", "step_low", "step_high", "tokens_per_second", "degrees", "planner", "schedule")
        lists: dict[str, list[Any]] = {"peak_memory": [], "host_memory": [], "levers": [], "runs_in": []}
        return {**answer, **dict.fromkeys(names), **lists}
    scene, accuracy = Scene.predicted(plan), plan_accuracy("step", plan)
    assert scene.why is not None
    seconds = float(scene.step_time)
    return {
        **answer,
        "step_time": seconds,
        "step_low": None if accuracy is None else accuracy.low * seconds,
        "step_high": None if accuracy is None else accuracy.high * seconds,
        "tokens_per_second": scene.why.tokens_per_second,
        "degrees": str(plan.degrees),
        "planner": plan.planner,
        "schedule": plan.schedule.name,
        "peak_memory": list(map(float, scene.peak_memory)),
        "host_memory": list(scene.why.host_memory),
        "levers": list(scene.why.configuration.levers),
        "runs_in": list(plan_runs_in(plan)),
    }
