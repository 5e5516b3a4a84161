"""`debubble schema`: the JSON schema of a command's `--json` output."""

from __future__ import annotations

from inspect import cleandoc
from typing import Annotated, Any

from debubble.cli.app import app
from debubble.cli.names import answer_names, name_argument
from debubble.cli.output import Json, print_json


@app.command(rich_help_panel="Lists")
def schema(
    command: Annotated[
        str,
        name_argument(
            answer_names, noun="schema", metavar="COMMAND", help="plan, fits, simulate, compare, export, ..."
        ),
    ],
    json: Json = False,
) -> None:
    """Print the JSON schema of what a command prints with --json.

    It says of every key its type and what it is.

    The schema is a JSON object itself, so that --json changes nothing.
    """
    print_json(json_schema(command))


def json_schema(command: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a command's `--json` output."""
    import msgspec

    from debubble.cli.answers import ANSWERS

    described = msgspec.json.schema(ANSWERS[command])
    for type_ in described["$defs"].values():
        if "description" in type_:
            type_["description"] = cleandoc(type_["description"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
