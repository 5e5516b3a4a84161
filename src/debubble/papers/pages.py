"""The results of all papers as pages: `docs/notes/claims.md`, and one HTML file with every figure and table."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from debubble.papers.registry import BASIS, Cell, EntryResult, PaperReport

INTRODUCTION = """\
# The papers' claims

Every figure, table and section with a figure in it of the four papers, with what it claims, the paper's figures, ours,
and how they compare. *Same* means that ours, rounded to the digits that the paper prints, is what it prints or lies in
the range that it prints; that is computed, not judged. Where a figure is fitted to another one of the paper the table
in the report says so.

`debubble reproduce all --markdown docs/notes/claims.md` computes all of it and writes this page; with the same call
`papers.html` has every figure drawn with its tables. That takes six and a half minutes on two cores of an AMD EPYC,
some 700 CPU seconds; every run gives the same digits. The tests compute each entry and compare it with this page.
"""


LARGE = 1000
"""From here on figures are shown without decimals, and not in powers of ten."""


def shown(cell: Cell) -> str:
    """A cell as a person reads it."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= LARGE else f"{cell:.4g}"


def summary(reports: Sequence[PaperReport]) -> str:
    """The number of claims that are the same, that differ, and that have no figure of ours."""
    words = Counter(claim.verdict.word for report in reports for result in report.results for claim in result.claims)
    claims, same, differ, missing = words.total(), words["same"], words["differs"], words["cannot be had"]
    return f"{same} of {claims} claims are the same, {differ} differ, {missing} cannot be had."


def rows(result: EntryResult) -> list[str]:
    """The rows of an entry in the table of its paper."""
    place = f"**{result.place}**: {result.what}"
    texts = []
    for claim in result.claims:
        cells = (place, claim.statement, claim.paper, claim.ours, str(claim.verdict))
        texts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        place = ""
    return texts


def markdown(reports: Sequence[PaperReport]) -> str:
    """The page of all claims."""
    parts = [INTRODUCTION, summary(reports), ""]
    for report in reports:
        parts += [f"## {report.title}", "", "| where | claim | the paper | ours | |", "| --- | --- | --- | --- | --- |"]
        parts += [row for result in report.results for row in rows(result)]
        parts.append("")
    return "\n".join(parts)


def html(reports: Iterable[PaperReport]) -> str:
    """The page of all claims, figures and tables, in one file."""
    environment = Environment(
        loader=PackageLoader("debubble.papers"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    listed = list(reports)
    return environment.get_template("papers.html").render(
        reports=listed,
        summary=summary(listed),
        shown=shown,
        basis=BASIS,
        encoded=lambda picture: base64.b64encode(picture).decode(),
    )
