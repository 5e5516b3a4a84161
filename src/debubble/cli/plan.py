"""`debubble plan`: the fastest plan that fits, and the answers of all planners."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from debubble import __version__
from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.output import SearchProgress, console, log, print_answer, print_line
from debubble.cli.plan_options import CostInputs, Output, PlanOptions, check_call
from debubble.cli.plan_request import CostsRequest, ModelRequest, Request
from debubble.files import user_cache, write_whole
from debubble.formatting import listed
from debubble.ir import CutOffError, InfeasibleError, Origin, UnsupportedError
from debubble.plans import Plan
from debubble.processes import raise_gc_threshold

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.ir.degrees import ConfigurationSummary
    from debubble.planners.analysis.nearest_plans import NearestPlan
    from debubble.views import Scene


@app.command(rich_help_panel="Plan")
@o.with_option_groups
def plan(
    model: o.OptionalModelName = None,
    *,
    run: o.ModelRun,
    options: PlanOptions,
    inputs: CostInputs,
    search: o.SearchLimits,
    output: Output,
) -> None:
    """Find the fastest plan that fits the memory.

    It chooses schedule, partition, recomputation and offload together.

    Degrees that are not given are 1 (ZeRO 0, the pipeline all other devices); with --global-batch they are searched.
    """
    from debubble.planners import planners

    raise_gc_threshold()
    check_call(model, run=run, options=options, inputs=inputs, output=output)
    limits = search.reserving(OVERHEAD_SECONDS)
    request = _request(model, run=run, options=options, inputs=inputs, search=limits, stream=output.json_stream)
    searches = planners[options.planner].searches
    doing = f"Searching; the effort is {search.effort:g} s of the reference machine ..." if searches else "Planning ..."
    front: Sequence[ConfigurationSummary] = ()
    nearest: Sequence[NearestPlan] = ()
    begin = time.monotonic()
    with log().status(doing) as status:
        result = replace(_find_plan(request, status, output), origin=this_call())
        # Saved before further planning, which may be interrupted.
        place = _save_plan(result, output)
        if output.pareto and isinstance(request, ModelRequest):
            front = _front(result, request, status)
        if output.targets and isinstance(request, ModelRequest):
            from debubble.planners.analysis.nearest_plans import nearest_plans

            plan_for = request.plan_for
            nearest = nearest_plans(result, lambda name: plan_for(name, status, subject=name))
        is_late = search.deadline is not None and time.monotonic() - begin > search.deadline - QUICK_PLAN_SECONDS
        quick = options.plain and not is_late
        extended = _with_what_ifs(
            result, status, options, search, why=output.why, quick=quick, targets=quick and not output.targets
        )
    if result.interrupted:
        log().print("Interrupted: this is the best so far.")
    if extended is not result:
        result = extended
        place = _save_plan(result, output)
    scene = _scene(result)
    _print_place(result, place)
    if output.html is not None:
        from debubble.views import views

        write_whole(output.html, views["html"]([scene]))
        log().print(f"The report is in {output.html}.")
    if output.json or output.json_stream:
        from debubble.cli.plan_answer import plan_dict

        print_ = partial(print_line, event="answer") if output.json_stream else print_answer
        print_(**plan_dict(result, scene, tokens=output.token_count, nearest=nearest, front=front))
    else:
        from debubble.views.plan_table import render

        answer = render(
            result, scene, tokens=output.token_count, details=output.details or options.compare, width=console().width,
            nearest=nearest, front=front,
        )  # fmt: skip
        console().print(answer)


def this_call() -> Origin:
    """The origin of a plan: command line, time and version."""
    return Origin(
        command=shlex.join(["debubble", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _request(
    model: str | None,
    *,
    run: o.ModelRun,
    options: PlanOptions,
    inputs: CostInputs,
    search: o.SearchLimits,
    stream: bool,
) -> Request:
    """Make the request of a call.  Raises InputError if the model or its cluster is unknown."""
    if model is None:
        return CostsRequest(run=run, options=options, inputs=inputs, search=search, stream=stream)
    from debubble.models import named_model

    named, cluster = named_model(model), run.require_cluster()
    o.with_memory_limit(cluster, options.memory_limit)  # checked before the search
    return ModelRequest(
        model=named, cluster=cluster, run=run, options=options, inputs=inputs, search=search, stream=stream
    )  # fmt: skip


def _find_plan(request: Request, status: Status, output: Output) -> Plan:
    """Search the plan; if nothing fits, the error and the report name changes with which it does."""
    begin = time.monotonic()
    try:
        return request.plan(status)
    except (CutOffError, UnsupportedError):
        raise
    except InfeasibleError as error:
        if not isinstance(request, ModelRequest):
            raise
        from debubble.planners.degrees.remedies import misfit

        # Reported at once, as trying changes takes longer.
        log().print("Nothing fits.  Trying what would ...")
        status.update("Trying what would fit ...")
        job = request.job
        if job.deadline is not None:
            job = replace(job, deadline=max(job.deadline - (time.monotonic() - begin), MIN_REMEDY_SECONDS))
        named = request.options.planner != "auto" and not request.options.compare
        answer = misfit(job, str(error), planner=request.options.planner if named else None)
        if output.html is not None:
            from debubble.views.html.infeasible import misfit_page

            write_whole(output.html, misfit_page(answer, origin=this_call()))
            log().print(f"The report is in {output.html}.")
        raise InfeasibleError(str(answer)) from error


def _front(plan: Plan, request: ModelRequest, status: Status) -> Sequence[ConfigurationSummary]:
    """Plan the Pareto front of time and memory, the plan first."""
    from debubble.planners.degrees.pareto import pareto_front

    status.update("Planning with less memory ...")
    why = _scene(plan).why
    assert why is not None
    return pareto_front(request.job, why.configuration)


MIN_REMEDY_SECONDS = 0.5
"""Minimum time to try changes if nothing fits, in seconds, even past the deadline."""
QUICK_PLAN_SECONDS = 1.0
"""Approximate time of quick plans of changes, in seconds; they are skipped if the deadline is nearer."""
OVERHEAD_SECONDS = 0.5
"""Part of the deadline reserved for imports before the search and for the answer after it, in seconds."""


def _with_what_ifs(
    plan: Plan, status: Status, options: PlanOptions, search: o.SearchLimits, *, why: bool, quick: bool, targets: bool
) -> Plan:
    """Add changes that would help and quick plans of other targets to the plan; a Ctrl-C leaves it as it is."""
    from debubble.planners.analysis.nearest_plans import quick_nearest
    from debubble.planners.analysis.what_if import quick_what_ifs, what_ifs

    try:
        if why:
            status.update("Planning what would help ...")
            seconds = float(_scene(plan).step_time)
            helps = what_ifs(
                plan, seconds, effort=search.effort, deadline=search.deadline, swap=options.destination,
                progress=SearchProgress(status),
            )  # fmt: skip
        else:
            status.update("Trying what would help ...")
            helps = quick_what_ifs(plan, swap=options.destination) if quick else ()
        elsewhere = quick_nearest(plan) if targets and plan.target is None else {}
        return replace(plan, what_ifs=helps, other_targets=elsewhere)
    except KeyboardInterrupt:
        log().print("Interrupted: what would help is left out.")
        return plan


def _save_plan(plan: Plan, output: Output) -> Path | None:
    """Save the plan and return its path; without -o in the user's cache, and None if that fails."""
    if output.output is not None:
        plan.save(output.output)
        return output.output
    if plan.model is None:
        return None
    with suppress(OSError):
        place = user_cache("plans") / "last.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        plan.save(place)
        return place
    return None


def _print_place(plan: Plan, place: Path | None) -> None:
    """Print the plan file's path, and the commands that take it."""
    if place is not None:
        commands = "" if plan.model is None else f": {_next_commands(plan)} take it"
        log().print(f"The plan is in {place}{commands}.", soft_wrap=True)


def _next_commands(plan: Plan) -> str:
    """List the commands that take a model's plan, with those that run it if it can be run."""
    from debubble.planners.analysis.nearest_plans import plan_runs_in

    names = plan_runs_in(plan)
    runs = ("debubble train", "rehearse") if "debubble" in names else ()
    exported = ("export",) if names or plan.target is not None else ("compare",)
    return listed([f"`{command}`" for command in (*runs, "show", *exported)])


def _scene(plan: Plan) -> Scene:
    from debubble.views import Scene

    return Scene.predicted(plan)
