"""`debubble schema`: the JSON schema of what a command prints with `--json`."""

from __future__ import annotations

from typing import Annotated

from debubble.cli.app import app
from debubble.cli.names import answer_names, name_argument
from debubble.cli.output import Json, print_json


@app.command(rich_help_panel="Lists")
def schema(
    command: Annotated[
        str,
        name_argument(
            answer_names, what="schema", metavar="COMMAND", help="plan, fits, simulate, compare, export, ..."
        ),
    ],
    json: Json = False,
) -> None:
    """Print the JSON schema of what a command prints with --json: every key, its type and what it is.

    The schema is a JSON object itself, so that --json changes nothing.
    """
    from debubble.cli.answers import json_schema

    print_json(json_schema(command))
