import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from debubble.cli.reproduce import split
from debubble.errors import InputError
from debubble.papers import pages
from debubble.papers.claims import KINDS, WORDS, compared, unavailable
from debubble.papers.drawings import Bars, Cells, Lines, svg
from debubble.papers.registry import Entry, EntryResult, Paper, PaperReport, Table, papers, report, reproduced

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SUMMARY = (DOCS / "notes/claims.md").read_text(), (DOCS / "papers.md").read_text()
FIGURES = {"obscura": range(1, 17), "chronospipe": range(1, 17), "optpipe": range(1, 7)}
TABLES = {"obscura": (1,), "optpipe": (1, 2)}
ALGORITHMS = ("obscura", "optpipe", "scope")
EQUATIONS = {"obscura": range(1, 7), "chronospipe": range(1, 9), "optpipe": range(2, 20)}


def is_slow(paper: str, entry: Entry) -> bool:
    return entry.slow or (paper, entry.place) == ("chronospipe", "Figure 5")


ENTRIES = [
    pytest.param(
        paper, entry.place, marks=pytest.mark.slow if is_slow(paper, entry) else (), id=f"{paper}: {entry.place}"
    )
    for paper in papers
    for entry in papers[paper].entries
]


@pytest.mark.parametrize(("paper", "place"), ENTRIES)
def test_an_entry_reproduces_its_rows_on_the_page(paper: str, place: str) -> None:
    result = reproduced(papers[paper].entry(place), draw=False)
    assert pages.claim_rows(result) == rows_of(paper, place)


def rows_of(paper: str, place: str) -> list[str]:
    """The page's rows of an entry: the one that names its place, and the unnamed rows below."""
    lines = section_of(paper).splitlines()
    first, *below = lines[next(index for index, line in enumerate(lines) if line.startswith(f"| **{place}**")) :]
    return [first, *itertools.takewhile(lambda line: line.startswith("|  |"), below)]


def section_of(paper: str) -> str:
    """The section of a paper on the page."""
    return PAGE.split(f"## {papers[paper].title}\n")[1].split("\n## ")[0]


def words_of(text: str) -> dict[str, Counter[str]]:
    """The number of cells by kind of claim and verdict, according to the rows of a page."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, verdict in re.findall(rf"^\|.*\| ({'|'.join(KINDS)}) \|.*\| ([^|]*) \|$", text, re.MULTILINE):
        for phrase in verdict.split(" because ")[0].split(", "):
            number, word = re.fullmatch(r"(?:(\d+) )?(.*)", phrase).groups()  # type: ignore[union-attr]
            counts[kind]["differs" if word == "differ" else word] += int(number or 1)
    return counts


def of_papers(text: str) -> Counter[str]:
    return sum((count for kind, count in words_of(text).items() if kind != "ours"), Counter())


def test_the_page_counts_its_cells() -> None:
    for kind, count in words_of(PAGE).items():
        assert f"| {' | '.join([kind, *(str(count[word]) for word in WORDS)])} |" in PAGE
    words = of_papers(PAGE)
    judged = words.total() - words["input"]
    counted = (
        f"Of {judged} cells of the papers {words['same']} are the same, {words['near']} near, {words['mended']} mended;"
        f" {words['differs']} differ, and {words['cannot be had']} cannot be had."
    )
    assert counted in PAGE
    assert counted in " ".join(SUMMARY.split())


@pytest.mark.parametrize("paper", papers)
def test_the_summary_has_the_counts_of_the_page(paper: str) -> None:
    words = of_papers(section_of(paper))
    counts = " / ".join(str(words[word]) for word in WORDS[:-1])
    assert f"| {counts} |" in re.findall(rf"^\| \[.*\(#{paper}\).*", SUMMARY, re.MULTILINE)[0]


def tables_of_summary() -> Iterator[str]:
    """The rows of papers.md with a claim, the paper's figures and ours."""
    for table in re.findall(r"\| claim \| the .* \| ours \|\n\| --- .*\n((?:\|.*\n)+)", SUMMARY):
        yield from table.splitlines()


@pytest.mark.parametrize("row", list(tables_of_summary()))
def test_a_row_of_the_summary_has_figures_of_the_page(row: str) -> None:
    ours = re.findall(r"\d+(?:\.\d+)?", row.split("|")[3])
    cells = [re.findall(r"\d+(?:\.\d+)?", line.split("|")[5]) for line in PAGE.splitlines() if line.count("|") == 7]
    assert all(any(figure in cell for cell in cells) for figure in ours)


@pytest.mark.parametrize("paper", papers)
def test_the_page_has_the_entries_of_the_registry_in_order(paper: str) -> None:
    places = re.findall(r"^\| \*\*(.*?)\*\*: (.*?) \|", section_of(paper), re.MULTILINE)
    assert places == [(entry.place, entry.subject) for entry in papers[paper].entries]


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_and_table_of_a_paper_has_an_entry(paper: str) -> None:
    places = {entry.place for entry in papers[paper].entries}
    figures = {int(number) for place in places if (number := place.removeprefix("Figure ").rstrip("ab")).isdigit()}
    assert figures == set(FIGURES[paper])
    assert {f"Table {number}" for number in TABLES.get(paper, ())} <= places


@pytest.mark.parametrize(
    ("prefix", "places"),
    [
        ("Figure 9", ["Figure 9a", "Figure 9b"]),
        ("9", ["Figure 9a", "Figure 9b"]),
        ("figure 9a", ["Figure 9a"]),
        ("Figure 1", ["Figure 1"]),
    ],
)
def test_a_prefix_selects_all_places_that_begin_with_it(prefix: str, places: list[str]) -> None:
    assert [entry.place for entry in papers["chronospipe"].select([prefix]).entries] == places


def test_a_place_that_a_paper_lacks_is_refused() -> None:
    for place in ("Table 9", "Figure 99", ""):
        with pytest.raises(InputError, match=f"chronospipe has no {place}; it has Figure 1, "):
            papers["chronospipe"].select([place])


@pytest.mark.parametrize("paper", ALGORITHMS)
def test_the_algorithm_of_a_paper_has_an_entry(paper: str) -> None:
    assert "Algorithm 1" in {entry.place for entry in papers[paper].entries}


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_equation_of_a_paper_is_named(paper: str) -> None:
    named: set[int] = set()
    for text in re.findall(r"[Ee]quations? ([^:;,|]*)", section_of(paper)):
        first, *more = map(int, re.findall(r"\((\d+)\)", text))
        named |= set(range(first, more[-1] + 1)) if " to " in text else {first, *more}
    assert set(EQUATIONS[paper]) <= named


def example_report(*claims: str) -> PaperReport:
    """A report whose claims are the same, or cannot be had if they say 'missing'."""
    entries = tuple(
        unavailable(text, because="no one knows") if "missing" in text else compared(text, paper=("1",), ours=[1])
        for text in claims
    )
    table = Table(title="A table", columns=("a", "b"), rows=((1.23456, None),), basis="exact")
    result = EntryResult(place="Figure 1", subject="an example", claims=entries, tables=(table,), pictures=(b"<svg/>",))
    return PaperReport(name="paper", title="A paper", results=(result,))


def test_the_summary_counts_the_claims() -> None:
    assert pages.summary([example_report("one", "two", "missing")]) == (
        "Of 3 cells of the papers 2 are the same, 0 near, 0 mended; 0 differ, and 1 cannot be had."
    )


def test_the_page_in_markdown_names_a_place_once() -> None:
    text = pages.markdown([example_report("one", "missing | two")])
    assert "| **Figure 1**: an example | one | printed | 1 | 1 | same |" in text
    assert "|  | missing / two | qualitative |  |  | cannot be had because no one knows |" in text


def test_large_figures_are_shown_without_powers_of_ten() -> None:
    assert [pages.format_cell(cell) for cell in (29936.4, 9999.6, 1.23456, None, "OOM")] == [
        "29936", "10000", "1.235", "-", "OOM",
    ]  # fmt: skip


def test_the_page_in_html_has_every_table_and_picture() -> None:
    text = pages.html([example_report("one")])
    assert "<td>1.235</td><td>-</td>" in text
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in text


def printed(table: Table) -> tuple[int, list[str]]:
    """The number of slices of a table on a terminal of 80 characters, and their lines."""
    console = Console(width=80, record=True, file=io.StringIO())
    slices = list(split(table, 80))
    for columns in slices:
        console.print(columns)
    return len(slices), console.export_text().splitlines()


def test_a_wide_table_is_split_and_repeats_its_key_column() -> None:
    columns = ("method", *(f"stage {number}" for number in range(12)))
    table = Table(title="Memory", columns=columns, rows=(("DAPPLE", *(100.5 + s for s in range(12))),), basis="exact")
    slices, lines = printed(table)
    text = "\n".join(lines)
    assert slices > 1
    assert all(f"{100.5 + number:.4g}" in text for number in range(12))
    assert max(map(len, lines)) <= 80
    assert text.count("DAPPLE") == slices


def test_a_table_of_long_headings_has_its_right_edge() -> None:
    columns = ("method", "paper: activations", "ours", "ours: states", "paper: of + R = 50%", "ours")
    rows = (("interleaved 1F1B + R = 66.7%", 17.23, 17.23, 11.81, None, 0.98),)
    _, lines = printed(Table(title="GB", columns=columns, rows=rows, basis="exact"))
    assert all(line[-1] in "┓┩┃│┘" for line in lines)
    assert any("0.98" in line for line in lines)


def test_our_column_stays_next_to_that_of_the_paper() -> None:
    columns = ("method", *(name for stage in range(5) for name in (f"paper {stage}", f"ours {stage}")))
    table = Table(title="GB", columns=columns, rows=(("Recomp-Non", *(["100.25"] * 10)),), basis="exact")
    heads = [[str(column.header) for column in piece.columns] for piece in split(table, 80)]
    assert len(heads) == 2
    assert all(
        head.index(f"ours {s}") == index + 1
        for head in heads
        for index, n in enumerate(head)
        if (s := n[6:]) and n.startswith("paper")
    )


def test_the_same_drawing_gives_the_same_bytes() -> None:
    drawings = (
        Bars(title="Stacked", groups=("a",), series={"x": (1,), "y": (2,)}, unit="s", stacked=True, limit=2),
        Lines(title="Lines", across="m", x=(1, 2), series={"x": (1, None)}, unit="s", paper={"x": (None, 2)}),
        Cells(title="Cells", labels=("a", "b"), cells=(("on", "off"), ("off", "on")), colors={"on": "k", "off": "w"}),
    )
    for drawing in drawings:
        assert svg(drawing) == svg(drawing)
        assert b"<svg" in svg(drawing)


def test_the_limit_line_is_named_in_the_legend() -> None:
    bars = Bars(title="Bars", groups=("a",), series={"x": (1,)}, unit="GB", limit=32)
    assert b"32 GB" in svg(bars)


def test_an_entry_is_drawn_only_if_asked() -> None:
    bars = Bars(title="Bars", groups=("a",), series={"x": (1,)}, unit="s")
    paper = Paper(name="p", title="P", entries=(Entry("Figure 1", "bars", lambda: (bars,)),))
    entry = paper.entry("Figure 1")
    assert reproduced(entry, draw=False).pictures == ()
    assert len(reproduced(entry, draw=True).pictures) == 1


def test_every_place_is_reported_before_it_is_computed() -> None:
    begun: list[str] = []
    reproduction = report("chronospipe", places=["Figure 1", "Figure 3"], begin=lambda entry: begun.append(entry.place))
    assert begun == [result.place for result in reproduction.results] == ["Figure 1", "Figure 3"]
