"""The results of all papers as pages: `docs/notes/claims.md`, and one HTML file with every figure and table."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from debubble.papers.claims import KINDS, WORDS, Claim, Kind, Word
from debubble.papers.registry import BASIS, Cell, EntryResult, PaperReport

INTRODUCTION = """\
# The papers' claims

Every figure, table and section with a figure in it of the four papers, with what it claims, the paper's figures, ours,
and how they compare, cell by cell; that is computed, not judged. *Same*: ours, rounded to the digits that the paper
prints, is what it prints or lies in the range that it prints. *Near*: within 5% of that. *Mended*: the paper
contradicts itself there. *Differs*: neither, for the reason that is given. *Inputs of a fit* were chosen to be the
paper's, and count as nothing. *Ours* is what no paper claims: debubble compared with itself, or another answer of it.

`debubble reproduce all --markdown docs/notes/claims.md` computes all of it and writes this page; with the same call
`papers.html` has every figure drawn with its tables. That takes some 580 CPU seconds, on two cores at once; every run
gives the same digits. The tests compute each entry and compare it with this page.
"""


MIN_WITHOUT_DECIMALS = 1000
"""Numbers of at least this size are shown without decimals; `g` would switch to scientific notation."""


def format_cell(cell: Cell) -> str:
    """Format a cell for people."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= MIN_WITHOUT_DECIMALS else f"{cell:.4g}"


def count_verdicts(claims: Iterable[Claim]) -> dict[Kind, Counter[Word]]:
    """Count the verdicts on cells per kind of claim."""
    counts: dict[Kind, Counter[Word]] = {kind: Counter() for kind in KINDS}
    for claim in claims:
        counts[claim.kind].update(claim.verdict.words)
    return counts


def total_of_papers(counts: Mapping[Kind, Counter[Word]]) -> Counter[Word]:
    """Sum the counts of all kinds but `ours`."""
    return sum((count for kind, count in counts.items() if kind != "ours"), Counter())


def all_claims(reports: Iterable[PaperReport]) -> list[Claim]:
    """All claims of some papers."""
    return [claim for report in reports for result in report.results for claim in result.claims]


def summary(reports: Sequence[PaperReport]) -> str:
    """A sentence with the number of cells per verdict."""
    words = total_of_papers(count_verdicts(all_claims(reports)))
    judged = words.total() - words["input"]
    return (
        f"Of {judged} cells of the papers {words['same']} are the same, {words['near']} near, {words['mended']} mended;"
        f" {words['differs']} differ, and {words['cannot be had']} cannot be had."
    )


def table_of_kinds(reports: Sequence[PaperReport]) -> list[str]:
    """The page's table of verdict counts, one row per kind of claim."""
    counts = count_verdicts(all_claims(reports))
    body = [f"| {' | '.join([kind, *(str(count[word]) for word in WORDS)])} |" for kind, count in counts.items()]
    return [f"| claims | {' | '.join(WORDS)} |", f"| --- |{' --- |' * len(WORDS)}", *body]


def claim_rows(result: EntryResult) -> list[str]:
    """The table rows of an entry, one per claim."""
    place = f"**{result.place}**: {result.subject}"
    texts = []
    for claim in result.claims:
        cells = (place, claim.statement, claim.kind, claim.paper, claim.ours, str(claim.verdict))
        texts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        place = ""
    return texts


def markdown(reports: Sequence[PaperReport]) -> str:
    """The page of all claims."""
    parts = [INTRODUCTION, summary(reports), "", *table_of_kinds(reports), ""]
    for report in reports:
        parts += [f"## {report.title}", "", "| where | claim | kind | the paper | ours | |", f"|{' --- |' * 6}"]
        parts += [row for result in report.results for row in claim_rows(result)]
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
        format_cell=format_cell,
        basis=BASIS,
        encoded=lambda picture: base64.b64encode(picture).decode(),
    )
