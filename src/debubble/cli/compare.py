"""`debubble compare`: a plan compared with its measured run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from debubble.cli.app import app
from debubble.cli.options import PlanFile
from debubble.cli.output import Json, console, print_answer, with_delayed_message

if TYPE_CHECKING:
    from debubble.plans import Plan


@app.command(rich_help_panel="Look")
@with_delayed_message("Comparing")
def compare(
    plan: PlanFile,
    trace: Annotated[Path, typer.Argument(help="The trace of a run of that plan.", metavar="TRACE")],
    json: Json = False,
) -> None:
    """Compare a plan with its measured run, operation by operation."""
    from debubble.ir import InputError, Trace
    from debubble.plans import Plan
    from debubble.views import comparison

    ran = Plan.load(plan)
    try:
        measured = Trace.load(trace)
    except InputError as error:
        raise InputError(_other_file(trace, plan, ran) or str(error)) from error
    result = comparison.compare(ran, measured)
    if json:
        print_answer(**comparison.as_dict(result))
    else:
        console().print(comparison.render(result))


def _other_file(trace: Path, plan: Path, ran: Plan) -> str | None:
    """A sentence if the trace is a plan or another framework's log or trace; else None."""
    from debubble.imports.logs import read_figures
    from debubble.ir import InputError
    from debubble.plans import Plan

    with suppress(InputError):
        Plan.load(trace)
        return f"{trace} is a plan: `debubble show {plan} {trace}` shows both side by side."
    try:
        step = read_figures([trace], ran).step
    except InputError:
        return None
    if step is None:
        return None
    return (
        f"{trace} is a log or trace of another framework, without the plan's operations; its median step takes"
        f" {step:.4g} s: `debubble calibrate {plan} {trace}` compares that with the plan."
    )
