"""`debubble reproduce`: the papers' tables and figures beside ours."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from debubble.cli.app import app
from debubble.cli.names import report_names
from debubble.cli.output import Json, console, log, print_json

if TYPE_CHECKING:
    from debubble.reproduce import Report, Table

BASIS = {
    "exact": "exact: follows from the construction, as the paper has it",
    "fitted": "fitted: with inputs chosen from the paper's own figures",
    "modelled": "modelled: computed without fitting; differs from the paper's figure",
    "measured": "measured: the paper's figure needs its hardware; a cost model cannot confirm it",
}


@app.command(rich_help_panel="Look")
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            help="obscura, optpipe, scope or chronospipe; or all of them: all.", autocompletion=report_names
        ),
    ],
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Also draw the figures into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Compute the papers' tables and figures, and print theirs beside ours."""
    from debubble.reproduce import reports

    chosen = list(reports) if paper == "all" else [reports.full_name(paper)]
    computations = [reports[name] for name in chosen]
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    results: list[Report] = []
    for name, compute in zip(chosen, computations, strict=True):
        log().print(f"Computing {name} ...")
        results.append(compute(pictures))
        if not json:
            _print(results[-1])
    if json:
        print_json({"reports": [_plain(report) for report in results]})


def _print(report: Report) -> None:
    out = console()
    out.print(f"\n[bold]{report.paper}[/bold]")
    for table in report.tables:
        out.print(_rich(table))
        out.print(f"  {BASIS.get(table.basis, table.basis)}", style="dim")
        if table.note:
            out.print(f"  {table.note}", style="dim")
    for picture in report.pictures:
        out.print(f"  drawn: {picture}")


def _rich(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", title_style="bold")
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _plain(report: Report) -> dict[str, Any]:
    return {
        "paper": report.paper,
        "tables": [asdict(table) for table in report.tables],
        "pictures": [str(picture) for picture in report.pictures],
    }
