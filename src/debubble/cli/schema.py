"""`debubble schema`: the JSON schema of what a command prints with `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from debubble.cli.app import app
from debubble.cli.output import print_json
from debubble.ir import InputError


@app.command(rich_help_panel="Lists")
def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="plan, fits, simulate, compare, export, ...")],
) -> None:
    """Print the JSON schema of what a command prints with --json: every key, its type and what it is."""
    from debubble.cli.answers import ANSWERS, json_schema

    if command not in ANSWERS:
        raise InputError(f"There is no schema for '{command}'; there are: {', '.join(ANSWERS)}.")
    print_json(json_schema(command))
