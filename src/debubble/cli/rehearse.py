"""`debubble rehearse`: a run of a plan's processes and messages with sleeping compute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from debubble.cli.app import app, require_torch
from debubble.cli.options import PlanFile
from debubble.cli.output import Json, warn_of_other_costs, with_delayed_message
from debubble.errors import InputError
from debubble.files import check_writable
from debubble.plans import Plan


@app.command(rich_help_panel="Run")
@with_delayed_message("Rehearsing")
def rehearse(
    plan: PlanFile,
    steps: Annotated[int, typer.Option(help="Steps; the one of median length is compared.", min=1)] = 5,
    scale: Annotated[float, typer.Option(help="Seconds per unit of the plan's time; for abstract costs.")] = 1.0,
    trace: Annotated[Path | None, typer.Option(help="Write the trace here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the predicted and measured timelines here.")] = None,
    json: Json = False,
) -> None:
    """Run a plan with sleeping compute, before it costs GPU hours.

    That checks processes, messages and order.
    """
    require_torch()
    if not scale > 0:
        raise InputError(f"--scale must be above 0, not {scale:g}.")
    check_writable(trace, html)
    loaded = Plan.load(plan)
    warn_of_other_costs(loaded)
    ranks = loaded.devices
    from debubble.runtime.launch.launcher import encode_options, start
    from debubble.training.rehearsal import RehearsalOptions

    options = RehearsalOptions(plan=plan, steps=steps, scale=scale, trace=trace, html=html, json=json)
    start("debubble.training.rehearsal", encode_options(options), ranks=ranks)
