"""`debubble export`: a plan as another framework's configuration, with a report of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from debubble.cli.app import app
from debubble.cli.names import export_names, name_option
from debubble.cli.options import PlanFile
from debubble.cli.output import Json, console, print_answer, print_wrapped, warn_of_other_costs, with_delayed_message


@app.command(rich_help_panel="Take along")
@with_delayed_message("Exporting")
def export(
    plan: PlanFile,
    to: Annotated[
        str,
        name_option(
            export_names,
            noun="framework",
            help="torch, torchtitan, automodel, megatron, primus, deepspeed or mindformers; see docs/exports.md.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files (default: PLAN-TARGET).")
    ] = None,
    json: Json = False,
) -> None:
    """Write a plan for another framework.

    What that cannot express is reported.
    """
    from debubble.exports import exports
    from debubble.files import check_folder
    from debubble.plans import Plan

    check_folder(output, "--output")
    loaded = Plan.load(plan)
    warn_of_other_costs(loaded)
    made = exports[to](loaded)
    written = made.write(output or plan.with_name(f"{plan.stem}-{to}"))
    if json:
        print_answer(target=to, files=list(map(str, written)), losses=list(made.losses), own_kernels=made.own_kernels)
        return
    for path in written:
        console().print(f"Wrote {path}.", soft_wrap=True)
    if made.losses:
        console().print(f"\nWhat {to} cannot express:")
        for loss in made.losses:
            print_wrapped(f"  - {loss}")
    else:
        console().print(f"{to} expresses all of the plan.")
    if made.own_kernels is not None:
        print_wrapped(f"\n{made.own_kernels}")
