"""Papers: what each of their figures, tables and sections says, computed anew next to it.

A paper is a list of entries, one for each of its figures, tables and sections with a figure in it.  Its entries' claims
are the one account of what came out: the page `docs/notes/claims.md`, the report of `debubble reproduce` and the tests
read them.
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
    """The number of a cell such as `87.5%`, or `38.5 OOM`."""
    match = re.match(r"-?[\d.]+", str(cell))
    assert match, cell
    return float(match.group())


BASIS = {
    "exact": "exact: follows from the construction, as the paper has it",
    "fitted": "fitted: with inputs chosen from the paper's own figures",
    "modelled": "modelled: computed without fitting; it may differ from the paper's figure",
    "measured": "measured: the paper's figure needs its hardware; a cost model cannot confirm it",
}
"""The standing of a table's figures, in words."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of ours, some of them next to the paper's.

    Attributes:
        title: Its headline.
        columns: Names of the columns.
        rows: The cells of each row, each a Cell.
        basis: The standing of our figures, a key of BASIS.  Fitted inputs are named in `note`, and so is how modelled
            figures differ.
        note: Sentences under the table.
        keys: The first columns, which say what a row is about; they are repeated where the columns do not fit next to
            each other.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    basis: str
    note: str = ""
    keys: int = 1

    @property
    def by_key(self) -> dict[Any, tuple[Any, ...]]:
        """The other cells of each row by those of its key columns: one, or a tuple of several."""
        return {row[0] if self.keys == 1 else row[: self.keys]: row[self.keys :] for row in self.rows}

    def column(self, name: str) -> list[Any]:
        """The cells of a column."""
        return [row[self.columns.index(name)] for row in self.rows]

    def bars(self, unit: str, columns: Sequence[str], *, names: str = "{}", title: str = "", **more: Any) -> Bars:
        """Columns as bars, a group for each row with its cells in the braces of `names`; `more` as in Bars."""
        groups, series = [names.format(*row) for row in self.rows], {name: self.column(name) for name in columns}
        return Bars(title=title or self.title, groups=groups, series=series, unit=unit, **more)


Exhibit = Claim | Table | Drawing
"""One thing that is shown for a figure, table or section: a claim of the paper, our figures, or a drawing."""


@dataclass(frozen=True)
class Entry:
    """A figure, table or section of a paper.

    Attributes:
        place: Where it is, such as `Figure 5`.
        what: What it shows.
        compute: Computes what is shown for it.
        slow: True if that takes more than a few seconds.
    """

    place: str
    what: str
    compute: Callable[[], Iterable[Exhibit]]
    slow: bool = False

    @staticmethod
    def diagram(place: str, what: str, statement: str, ours: str) -> Entry:
        """A figure without numbers; `ours` says where debubble's own documents show the same."""
        claim = unavailable(statement, because=f"it is a diagram without figures; {ours}")
        return Entry(place, what, lambda: (claim,))


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper, entry by entry in its order."""

    name: str
    title: str
    entries: tuple[Entry, ...]

    def entry(self, place: str) -> Entry:
        """The entry of a place."""
        return next(entry for entry in self.entries if entry.place == place)

    def at(self, places: Sequence[str]) -> Paper:
        """The paper with the entries of these places alone; raises InputError if it lacks one.

        Args:
            places: Such as `Figure 9a`, `Figure 9` for all that begin so, or `9a` for all of that number; none: all.
        """
        if not places:
            return self
        chosen = [entry for place in places for entry in self._called(place)]
        return replace(self, entries=tuple(entry for entry in self.entries if entry in chosen))

    def _called(self, place: str) -> list[Entry]:
        """The entries of a place; raises InputError if there is none."""
        name = " ".join(place.lower().split())
        calls = {entry.place: (entry.place.lower(), entry.place.lower().split()[-1]) for entry in self.entries}
        found = [entry for entry in self.entries if name in calls[entry.place]]
        # Figure 1 begins Figure 1a, and not Figure 10.
        begins = re.compile(re.escape(name) + r"(?!\d)")
        found = found or [entry for entry in self.entries if name and any(map(begins.match, calls[entry.place]))]
        if not found:
            known = ", ".join(entry.place for entry in self.entries)
            raise InputError(f"{self.name} has no {place}; it has {known}.")
        return found


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """An entry that was computed, its drawings as SVG files."""

    place: str
    what: str
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = ()
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaperReport:
    """All that was computed of one paper."""

    name: str
    title: str
    results: tuple[EntryResult, ...]


papers: Registry[Paper] = Registry("debubble.papers", kind="paper", folders=(PAPERS, "paper"))
"""Name -> paper, by the names that `debubble reproduce` takes."""


def reproduced(entry: Entry, *, draw: bool) -> EntryResult:
    """Compute an entry, and draw it if asked to."""
    shown = tuple(entry.compute())
    return EntryResult(
        place=entry.place,
        what=entry.what,
        claims=tuple(each for each in shown if isinstance(each, Claim)),
        tables=tuple(each for each in shown if isinstance(each, Table)),
        pictures=tuple(svg(each) for each in shown if isinstance(each, Drawing)) if draw else (),
    )


def report(
    name: str, *, draw: bool = False, places: Sequence[str] = (), begin: Callable[[Entry], None] = lambda _: None
) -> PaperReport:
    """Compute these places of a paper, or all of it.

    Args:
        name: The paper.
        draw: Whether to draw the figures.
        places: The places, as `Paper.at` takes them.
        begin: Called with every entry before it is computed.

    Raises:
        InputError: If there is no such paper, or it lacks a place.
    """
    paper = papers[name].at(places)
    results = []
    for entry in paper.entries:
        begin(entry)
        results.append(reproduced(entry, draw=draw))
    return PaperReport(name=paper.name, title=paper.title, results=tuple(results))
