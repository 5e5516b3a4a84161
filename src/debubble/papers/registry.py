"""The registry of papers, whose figures, tables and sections are recomputed next to the printed values.

A paper is a list of entries, one per figure, table or section that states numbers.  The entries' claims are the only
record of the results: the page `docs/notes/claims.md`, the report of `debubble reproduce` and the tests read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from debubble.errors import InputError
from debubble.papers.claims import Claim, unavailable
from debubble.papers.drawings import Bars, Drawing, svg
from debubble.registry import PAPERS, Registry

Cell = str | int | float | None


def number(cell: Cell) -> float:
    """Parse the leading number of a cell such as `87.5%` or `38.5 OOM`."""
    match = re.match(r"-?[\d.]+", str(cell))
    assert match, cell
    return float(match.group())


BASIS = {
    "exact": "exact: follows from the construction, as the paper has it",
    "fitted": "fitted: with inputs chosen from the paper's own figures",
    "modelled": "modelled: computed without fitting; it may differ from the paper's figure",
    "measured": "measured: the paper's figure needs its hardware; a cost model cannot confirm it",
}
"""Basis of a table's figures -> the words that explain it."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of our figures, with some of the paper's.

    Attributes:
        title: Title of the table.
        columns: Names of the columns.
        rows: The cells of each row, of type Cell.
        basis: Basis of our figures, a key of BASIS; `note` names fitted inputs, and how modelled figures differ.
        note: Sentences under the table.
        keys: Number of leading columns that identify a row; they are repeated where a wide table is split.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    basis: str
    note: str = ""
    keys: int = 1

    @property
    def by_key(self) -> dict[Any, tuple[Any, ...]]:
        """Key (one cell, or a tuple of several) -> the remaining cells of its row."""
        return {row[0] if self.keys == 1 else row[: self.keys]: row[self.keys :] for row in self.rows}

    def column(self, name: str) -> list[Any]:
        """The cells of a column."""
        return [row[self.columns.index(name)] for row in self.rows]

    def bars(self, unit: str, columns: Sequence[str], *, names: str = "{}", title: str = "", **more: Any) -> Bars:
        """Chart columns as bars, one group per row, named by the template `names`; `more` are arguments of Bars."""
        groups, series = [names.format(*row) for row in self.rows], {name: self.column(name) for name in columns}
        return Bars(title=title or self.title, groups=groups, series=series, unit=unit, **more)


Exhibit = Claim | Table | Drawing
"""One result of an entry: a claim, a table or a drawing."""


@dataclass(frozen=True)
class Entry:
    """A figure, table or section of a paper.

    Attributes:
        place: Its name in the paper, such as `Figure 5`.
        subject: What it shows.
        compute: Function that computes its claims, tables and drawings.
        slow: Whether that takes more than a few seconds.
    """

    place: str
    subject: str
    compute: Callable[[], Iterable[Exhibit]]
    slow: bool = False

    @staticmethod
    def diagram(place: str, subject: str, statement: str, ours: str) -> Entry:
        """An entry for a figure without numbers; `ours` names the document of debubble that shows the same."""
        claim = unavailable(statement, because=f"it is a diagram without figures; {ours}")
        return Entry(place, subject, lambda: (claim,))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper and its entries in the paper's order."""

    name: str
    title: str
    entries: tuple[Entry, ...]

    def entry(self, place: str) -> Entry:
        """The entry of a place."""
        return next(entry for entry in self.entries if entry.place == place)

    def select(self, places: Sequence[str]) -> Paper:
        """A copy of the paper with the selected entries only.  Raises InputError if a place does not exist.

        Args:
            places: Names such as `Figure 9a`, prefixes such as `Figure 9`, or numbers such as `9a`; none selects all.
        """
        if not places:
            return self
        chosen = [entry for place in places for entry in self._entries_named(place)]
        return replace(self, entries=tuple(entry for entry in self.entries if entry in chosen))

    def _entries_named(self, place: str) -> list[Entry]:
        """The entries that a place names, exactly or as a prefix.  Raises InputError if there are none."""
        name = " ".join(place.lower().split())
        names = {entry.place: (entry.place.lower(), entry.place.lower().split()[-1]) for entry in self.entries}
        matches = [entry for entry in self.entries if name in names[entry.place]]
        # `Figure 1` is a prefix of Figure 1a, not of Figure 10.
        prefix = re.compile(re.escape(name) + r"(?!\d)")
        matches = matches or [entry for entry in self.entries if name and any(map(prefix.match, names[entry.place]))]
        if not matches:
            known = ", ".join(entry.place for entry in self.entries)
            raise InputError(f"{self.name} has no {place}; it has {known}.")
        return matches


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """The computed claims and tables of an entry, and its drawings as SVG files."""

    place: str
    subject: str
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = ()
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaperReport:
    """The computed entries of one paper."""

    name: str
    title: str
    results: tuple[EntryResult, ...]


papers: Registry[Paper] = Registry("debubble.papers", kind="paper", folders=(PAPERS, "paper"))
"""Name -> paper, by the names that `debubble reproduce` takes."""


def reproduced(entry: Entry, *, draw: bool) -> EntryResult:
    """Compute an entry, and render its drawings if `draw` is set."""
    exhibits = tuple(entry.compute())
    return EntryResult(
        place=entry.place,
        subject=entry.subject,
        claims=tuple(exhibit for exhibit in exhibits if isinstance(exhibit, Claim)),
        tables=tuple(exhibit for exhibit in exhibits if isinstance(exhibit, Table)),
        pictures=tuple(svg(exhibit) for exhibit in exhibits if isinstance(exhibit, Drawing)) if draw else (),
    )


def report(
    name: str, *, draw: bool = False, places: Sequence[str] = (), begin: Callable[[Entry], None] = lambda _: None
) -> PaperReport:
    """Compute the selected entries of a paper, by default all.

    Args:
        name: Name of the paper in the registry.
        draw: Whether to render the drawings.
        places: The selection, as `Paper.select` takes it.
        begin: Called with every entry before it is computed.

    Raises:
        InputError: If there is no such paper, or it lacks a place.
    """
    paper = papers[name].select(places)
    results = []
    for entry in paper.entries:
        begin(entry)
        results.append(reproduced(entry, draw=draw))
    return PaperReport(name=paper.name, title=paper.title, results=tuple(results))
