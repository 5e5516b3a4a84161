"""`debubble reproduce`: papers' figures, tables and claims compared with computed ones."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from debubble.cli.app import app
from debubble.cli.names import name_argument, report_names
from debubble.cli.output import Json, console, log, print_answer
from debubble.files import check_folder, check_writable
from debubble.interrupts import without_interrupts
from debubble.ir import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from debubble.papers.registry import Entry, EntryResult, PaperReport, Table

PAGE = Path("papers.html")
MAX_UNBROKEN = 16
"""Length of a cell, in characters, above which it may be broken into lines."""
COLUMN_PADDING = 3
"""Width of a column's border and padding, in characters."""


@app.command(rich_help_panel="Look")
def reproduce(
    paper: Annotated[
        str,
        name_argument(report_names, noun="paper", help="obscura, optpipe, scope or chronospipe; or all of them: all."),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PLACE", help="Compute this place alone, such as 'Figure 9a' or 'Figure 9'."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help=f"Write every figure and table into one page (all: {PAGE})."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the table of all claims."),
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="DIR", help="Also draw the figures into this folder, as SVG.")
    ] = None,
    json: Json = False,
) -> None:
    """Compute the papers' figures, tables and claims next to theirs."""
    from debubble.papers.registry import papers

    places = only or []
    if places and paper == "all":
        raise InputError("--only names a place of one paper: name the paper too.")
    chosen = list(papers) if paper == "all" else [paper]
    page = html or (PAGE if paper == "all" else None)
    check_writable(page, markdown)
    check_folder(pictures, "--pictures")
    results: list[PaperReport] = []
    for report in _compute(chosen, draw=page is not None or pictures is not None, places=places):
        results.append(report)
        if not json:
            _print(report)
    if pictures is not None:
        _write_pictures(pictures, results)
    if page is not None or markdown is not None:
        _write_pages(page, markdown, results)
    if json:
        print_answer(reports=[_plain(report) for report in results])


def _compute(names: Sequence[str], *, draw: bool, places: Sequence[str]) -> Iterator[PaperReport]:
    """Compute the reports in order, several of them in parallel."""
    from debubble.papers.registry import report

    if len(names) == 1:
        yield report(names[0], draw=draw, places=places, begin=_print_begin)
        return
    for name in names:
        log().print(f"Computing {name} ...")
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        try:
            with without_interrupts():
                futures = [pool.submit(report, name, draw=draw) for name in names]
            for future in futures:
                yield future.result()
        except BaseException:
            # Leaving the pool would wait for running reports.
            for process in active_children():
                process.terminate()
            raise


def _print_begin(entry: Entry) -> None:
    log().print(f"Computing {entry.place}{' (up to minutes)' if entry.slow else ''} ...")


def _write_pictures(folder: Path, reports: Sequence[PaperReport]) -> None:
    from debubble.files import write_whole

    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        for result in report.results:
            for number, picture in enumerate(result.pictures, 1):
                place = re.sub(r"[^a-z0-9]+", "-", result.place.lower()).strip("-")
                more = f"-{number}" if len(result.pictures) > 1 else ""
                write_whole(folder / f"{report.name}-{place}{more}.svg", picture)


def _write_pages(page: Path | None, markdown: Path | None, reports: Sequence[PaperReport]) -> None:
    from debubble.files import write_whole
    from debubble.papers import pages

    if page is not None:
        write_whole(page, pages.html(reports).encode())
        log().print(f"Wrote {page}.")
    if markdown is not None:
        write_whole(markdown, pages.markdown(reports).encode())
        log().print(f"Wrote {markdown}.")


def _print(report: PaperReport) -> None:
    out = console()
    out.print(f"\n[bold]{report.title}[/bold]")
    for result in report.results:
        _print_result(result)


def _print_result(result: EntryResult) -> None:
    from debubble.papers.registry import BASIS

    out = console()
    out.print(f"\n[bold]{result.place}[/bold]: {result.subject}")
    for claim in result.claims:
        out.print(_indented(claim.statement, 2))
        figures = f"the paper ({claim.kind}): {claim.paper}; ours: {claim.ours}; " if claim.ours else ""
        out.print(_indented(f"{figures}{claim.verdict}", 4), style="dim")
    for table in result.tables:
        out.print(f"\n{table.title}", style="bold", markup=False)
        for piece in split(table, out.width):
            out.print(piece)
        out.print(_indented(f"{BASIS[table.basis]}\n{table.note}".strip(), 2), style="dim")


def _indented(text: str, by: int) -> Padding:
    return Padding(Text(text), (0, 0, 0, by))


def split(table: Table, width: int) -> Iterator[RichTable]:
    """Split a table into tables of at most `width` characters, each with the key columns; figures stay unbroken."""
    from debubble.papers.pages import format_cell

    texts = [[format_cell(cell) for cell in row] for row in table.rows]
    longest = [max((len(row[i]) for row in texts), default=0) for i in range(len(table.columns))]
    words = [max(map(len, name.split()), default=0) for name in table.columns]
    min_widths = [max(word, min(MAX_UNBROKEN, text)) for word, text in zip(words, longest, strict=True)]
    keys = list(range(table.keys))
    pieces: list[list[int]] = [keys]
    for pair in _pairs(table):
        if pieces[-1] != keys and _width(min_widths, [*pieces[-1], *pair]) > width:
            pieces.append(keys)
        pieces[-1] = pieces[-1] + pair
    for columns in pieces:
        # Column names are not broken if all of them fit.
        full_widths = [max(len(name), text) for name, text in zip(table.columns, longest, strict=True)]
        full_widths = full_widths if _width(full_widths, columns) <= width else longest
        capacity = width - _width(min_widths, columns)
        drawn = RichTable()
        for i in columns:
            extra = max(0, min(capacity, full_widths[i] - min_widths[i]))
            drawn.add_column(table.columns[i], width=min_widths[i] + extra, overflow="fold")
            capacity -= extra
        for row in texts:
            drawn.add_row(*(row[i] for i in columns))
        yield drawn


def _width(widths: Sequence[int], columns: Sequence[int]) -> int:
    """Width of a table with these columns, in characters."""
    return 1 + sum(widths[i] + COLUMN_PADDING for i in columns)


def _pairs(table: Table) -> list[list[int]]:
    """Groups of columns after the keys: pairs of the paper's and our values, or single columns."""
    pairs: list[list[int]] = []
    for i in range(table.keys, len(table.columns)):
        before, name = table.columns[i - 1 : i + 1]
        if pairs and before.startswith("paper") and name.startswith("ours"):
            pairs[-1].append(i)
        else:
            pairs.append([i])
    return pairs


def _plain(report: PaperReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "title": report.title,
        "entries": [
            {
                "place": result.place,
                "what": result.subject,
                "claims": [vars(claim) | {"verdict": str(claim.verdict)} for claim in result.claims],
                "tables": result.tables,
            }
            for result in report.results
        ],
    }
