"""Reproductions: tables with the paper's figure beside ours, and how far each can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from debubble.registry import Registry

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table or figure of a paper.

    Attributes:
        title: Its headline.
        columns: Names of the columns.
        rows: The cells of each row.
        basis: The standing of our figures: `exact` (they follow from the construction, as the paper has it), `fitted`
            (with the fitted inputs named in `note`), `modelled` (nothing fitted, and not the paper's figure; `note`
            says how they differ), or `measured` (the paper's figure needs hardware; a cost model cannot confirm it).
        note: Sentences under the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    basis: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All tables of one paper, and the pictures that were drawn."""

    paper: str
    tables: tuple[Table, ...]
    pictures: tuple[Path, ...] = ()


reports: Registry[Callable[[Path | None], Report]] = Registry("debubble.reproduce", what="paper")
"""Name -> function that computes the report, and draws its pictures into the folder if one is given."""


def report(name: str) -> Callable[[Callable[[Path | None], Report]], Callable[[Path | None], Report]]:
    """Register a paper's reproduction under the name that `debubble reproduce` takes."""

    def register(compute: Callable[[Path | None], Report]) -> Callable[[Path | None], Report]:
        return reports.add(name, compute)

    return register
