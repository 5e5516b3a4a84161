"""`debubble plan`: the fastest plan that fits, beside the answers of the planners that were asked."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from debubble import __version__
from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.output import console, log, print_answer, print_line
from debubble.cli.plan_options import GivenCosts, Output, Question, check_call
from debubble.cli.plan_request import GivenRequest, ModelRequest, Request
from debubble.files import write_whole
from debubble.ir import CutOffError, InfeasibleError, Origin, Plan, UnsupportedError

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
    asked: Question,
    given: GivenCosts,
    search: o.SearchLimits,
    output: Output,
) -> None:
    """Find the fastest plan that fits: schedule, partition, recomputation and offload together.

    Degrees that are not given are 1 (ZeRO 0, the pipeline all other devices); with --global-batch they are searched.
    """
    from debubble.planners import planners

    check_call(model, run=run, asked=asked, given=given, output=output)
    request = _request(model, run=run, asked=asked, given=given, search=search, stream=output.json_stream)
    searches = planners[asked.planner].searches
    doing = f"Searching; the effort is {search.effort:g} s of the reference machine ..." if searches else "Planning ..."
    front: Sequence[ConfigurationSummary] = ()
    nearest: Sequence[NearestPlan] = ()
    with log().status(doing) as status:
        result = _find_plan(request, status, output)
        if output.pareto and isinstance(request, ModelRequest):
            from debubble.planners.degrees import pareto_front

            status.update("Planning with less memory ...")
            why = _scene(result).why
            assert why is not None
            front = pareto_front(request.job, why.configuration)
        if output.targets and isinstance(request, ModelRequest):
            from debubble.planners.analysis.nearest_plans import nearest_plans

            plan_for = request.plan_for
            nearest = nearest_plans(result, lambda name: plan_for(name, status))
        from debubble.planners.analysis.what_if import quick_what_ifs, what_ifs

        if output.why:
            status.update("Planning what would help ...")
            seconds = float(_scene(result).step_time)
            helps = what_ifs(result, seconds, effort=search.effort, deadline=search.deadline)
        else:
            status.update("Trying what would help ...")
            helps = quick_what_ifs(result) if asked.plain else ()
    if result.degree_search is not None and result.degree_search.interrupted:
        log().print("Interrupted: this is the best so far.")
    result = replace(result, what_ifs=helps, origin=this_call())
    scene = _scene(result)
    _write(result, scene, output)
    if output.json or output.json_stream:
        from debubble.cli.plan_answer import plan_dict

        entries = plan_dict(result, scene, tokens=output.tokens, nearest=nearest, front=front)
        if output.json_stream:
            print_line(event="answer", **entries)
        else:
            print_answer(**entries)
    else:
        from debubble.views.plan_table import render

        answer = render(
            result, scene, tokens=output.tokens, details=output.details or asked.compare, width=console().width,
            nearest=nearest, front=front,
            elsewhere={} if nearest or not isinstance(request, ModelRequest) else _elsewhere(result, asked),
        )  # fmt: skip
        console().print(answer)


def this_call() -> Origin:
    """The command line, the time and the version, as plans record them."""
    return Origin(
        command=shlex.join(["debubble", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )


def _request(
    model: str | None,
    *,
    run: o.ModelRun,
    asked: Question,
    given: GivenCosts,
    search: o.SearchLimits,
    stream: bool,
) -> Request:
    """The call as a Request.  Raises InputError if the model or its cluster is unknown."""
    if model is None:
        return GivenRequest(run=run, asked=asked, given=given, search=search, stream=stream)
    from debubble.models import named_model

    named, cluster = named_model(model), run.require_cluster()
    return ModelRequest(
        model=named, cluster=cluster, run=run, asked=asked, given=given, search=search, stream=stream
    )  # fmt: skip


def _find_plan(request: Request, status: Status, output: Output) -> Plan:
    """The plan; where nothing fits, the error says what would, and so does the report if one was asked for."""
    try:
        return request.plan(status)
    except (CutOffError, UnsupportedError):
        raise
    except InfeasibleError as error:
        if not isinstance(request, ModelRequest):
            raise
        from debubble.planners.degrees import misfit

        status.update("Nothing fits; trying what would ...")
        answer = misfit(request.job, str(error))
        if output.html is not None:
            from debubble.views.html.infeasible import misfit_page

            write_whole(output.html, misfit_page(answer, origin=this_call()))
            log().print(f"The report is in {output.html}.")
        raise InfeasibleError(str(answer)) from error


def _write(plan: Plan, scene: Scene, output: Output) -> None:
    """The files that were asked for."""
    if output.output is not None:
        plan.save(output.output)
        takers = "`debubble train`, `rehearse`, `show` and `export` take it"
        log().print(f"The plan is in {output.output}{'' if plan.model is None else f': {takers}'}.", soft_wrap=True)
    elif plan.model is not None:
        log().print("Give -o plan.json to keep the plan, for `debubble train`, `rehearse`, `show` and `export`.")
    if output.html is not None:
        from debubble.views import views

        write_whole(output.html, views["html"]([scene]))
        log().print(f"The report is in {output.html}.")


def _scene(plan: Plan) -> Scene:
    from debubble.views import Scene

    return Scene.predicted(plan)


def _elsewhere(plan: Plan, asked: Question) -> Mapping[str, float]:
    """Cost of the nearest quick plans in frameworks that do not run a plan that was made for none."""
    from debubble.planners.analysis.nearest_plans import quick_nearest

    return quick_nearest(plan) if plan.target is None and asked.plain else {}
