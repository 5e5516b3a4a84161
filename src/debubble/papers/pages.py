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
paper's, and count as nothing. *Ours* is what no paper claims: debubble beside itself, or another answer of it.

`debubble reproduce all --markdown docs/notes/claims.md` computes all of it and writes this page; with the same call
`papers.html` has every figure drawn with its tables. That takes some 580 CPU seconds, on two cores at once; every run
gives the same digits. The tests compute each entry and compare it with this page.
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


def counted(claims: Iterable[Claim]) -> dict[Kind, Counter[Word]]:
    """The cells of each kind of claim, by how ours compare."""
    counts: dict[Kind, Counter[Word]] = {kind: Counter() for kind in KINDS}
    for claim in claims:
        counts[claim.kind].update(claim.verdict.words)
    return counts


def of_papers(counts: Mapping[Kind, Counter[Word]]) -> Counter[Word]:
    """The cells of all kinds but ours."""
    return sum((count for kind, count in counts.items() if kind != "ours"), Counter())


def claims_of(reports: Iterable[PaperReport]) -> list[Claim]:
    """All claims of some papers."""
    return [claim for report in reports for result in report.results for claim in result.claims]


def summary(reports: Sequence[PaperReport]) -> str:
    """The number of cells of the papers that are the same, near, and so on."""
    words = of_papers(counted(claims_of(reports)))
    judged = words.total() - words["input"]
    return (
        f"Of {judged} cells of the papers {words['same']} are the same, {words['near']} near, {words['mended']} mended;"
        f" {words['differs']} differ, and {words['cannot be had']} cannot be had."
    )


def table_of_kinds(reports: Sequence[PaperReport]) -> list[str]:
    """The cells of each kind of claim by how ours compare, as a table of the page."""
    counts = counted(claims_of(reports))
    body = [f"| {' | '.join([kind, *(str(count[word]) for word in WORDS)])} |" for kind, count in counts.items()]
    return [f"| claims | {' | '.join(WORDS)} |", f"| --- |{' --- |' * len(WORDS)}", *body]


def rows(result: EntryResult) -> list[str]:
    """The rows of an entry in the table of its paper."""
    place = f"**{result.place}**: {result.what}"
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
