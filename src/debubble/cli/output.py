"""Standard output: rich tables for people, or one JSON object; everything else goes to standard error."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from debubble.formatting import ANSWER_VERSION

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel="Output")
]


def console() -> Console:
    """The console of results that people read."""
    return Console(highlight=False)


def log() -> Console:
    """The console of progress and remarks."""
    return Console(stderr=True, highlight=False)


def figure_table(*columns: str, **style: Any) -> Table:
    """A table without lines: names in the first column, figures in the others."""
    table = Table(*columns, box=None, header_style="bold", **style)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def print_answer(**entries: Any) -> None:
    """Print one JSON object with the version of its keys, and nothing else."""
    print_json({"schema": ANSWER_VERSION, **entries})


def print_json(value: Any) -> None:
    """Print one JSON object and nothing else."""
    json.dump(value, sys.stdout, indent=1, default=_plain)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
