"""`debubble compare`: a plan against what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from debubble.cli.app import app
from debubble.cli.options import PlanFile
from debubble.cli.output import Json, console, print_answer, with_delayed_message


@app.command(rich_help_panel="Look")
@with_delayed_message("Comparing")
def compare(
    plan: PlanFile,
    trace: Annotated[Path, typer.Argument(help="The trace of a run of that plan.", metavar="TRACE")],
    json: Json = False,
) -> None:
    """Compare a plan with what was measured, operation by operation."""
    from debubble.ir import Trace
    from debubble.plans import Plan
    from debubble.views import comparison

    result = comparison.compare(Plan.load(plan), Trace.load(trace))
    if json:
        print_answer(**comparison.as_dict(result))
    else:
        console().print(comparison.render(result))
