"""A paper's statement beside ours, whether they are the same, and sentences that compare.

Whether two figures are the same is computed: they are if ours, rounded to the digits that the paper prints, is what it
prints, or lies in the range that it prints.  Where they are not, the claim says why, and cannot be made without that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


@dataclass(frozen=True)
class Verdict:
    """How ours compares with the paper's: `same`, or `differs` or `cannot be had` for a reason."""

    word: Literal["same", "differs", "cannot be had"]
    because: str = ""

    def __str__(self) -> str:
        return f"{self.word} because {self.because}" if self.because else self.word


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper.

    Attributes:
        statement: What is claimed, and of what.
        paper: The paper's figures, as it prints them.
        ours: Our figures; empty if there are none.
        verdict: How the two compare.
    """

    statement: str
    paper: str
    ours: str
    verdict: Verdict


def compared(
    statement: str, *, paper: Sequence[str], ours: Sequence[float | None], unit: str = "", because: str = ""
) -> Claim:
    """The claim that figures are the paper's.

    Args:
        statement: What is claimed.
        paper: Each figure as printed: `1.30`, a range such as `1.22 to 1.27`, or `more than 30` and `at most 3`.
        ours: Our figure for each; None where there is none, as where a plan does not fit.
        unit: What stands behind the figures, such as `%`.
        because: Why ours differ, should they.
    """
    same = all(value is not None and _agree(text, value) for text, value in zip(paper, ours, strict=True))
    shown = [_rounded(text, value) for text, value in zip(paper, ours, strict=True)]
    return Claim(
        statement=statement,
        paper=", ".join(paper) + unit,
        ours=", ".join(shown) + unit,
        verdict=_verdict(statement, same, because),
    )


def stated(statement: str, *, paper: str, ours: str, because: str = "") -> Claim:
    """The claim that something holds which is no figure; ours is the same if it reads the same."""
    return Claim(statement=statement, paper=paper, ours=ours, verdict=_verdict(statement, paper == ours, because))


def holds(statement: str, ours: bool, *, because: str = "") -> Claim:
    """The claim that a statement is true; `ours` says whether it is."""
    return stated(statement, paper="yes", ours="yes" if ours else "no", because=because)


def unavailable(statement: str, *, paper: str = "", because: str) -> Claim:
    """A claim for which debubble computes nothing."""
    return Claim(statement=statement, paper=paper, ours="", verdict=Verdict("cannot be had", because))


def _verdict(statement: str, same: bool, because: str) -> Verdict:
    assert same or because, f"{statement}: say why ours differs."
    return Verdict("same") if same else Verdict("differs", because)


def _digits(text: str) -> int:
    return max(len(match.group(1) or "") for match in _NUMBER.finditer(text))


def _agree(text: str, value: float) -> bool:
    """Tell whether a figure is what is printed."""
    figures = [float(match.group()) for match in _NUMBER.finditer(text)]
    rounded = round(value, _digits(text))
    if text.startswith(("more than", "at least")):
        return rounded >= figures[0]
    if text.startswith("at most"):
        return rounded <= figures[0]
    return figures[0] <= rounded <= figures[-1]


def _rounded(text: str, value: float | None) -> str:
    """A figure with as many digits as are printed."""
    if value is None:
        return "none"
    digits = _digits(text)
    return f"{value + 0.0:.{digits}f}"


Figures = Mapping[str, float | None]
"""Name -> figure; None where there is none."""


def order(published: Mapping[str, float], ours: Figures) -> str:
    """Say whether the names are in the published order, slowest first, and else in which they are.

    Args:
        published: Speed-ups that a paper states.
        ours: Our speed-ups; names without one are left out.
    """
    compared = {name: figure for name in published if (figure := ours.get(name)) is not None}
    names = sorted(compared, key=lambda name: published[name])
    if all(compared[before] <= compared[after] for before, after in itertools.pairwise(names)):
        return f"The order is the published one: {', '.join(names)}."
    ordered = sorted(compared, key=lambda name: compared[name])
    return f"The published order is {', '.join(names)}; ours is {', '.join(ordered)}."


def fastest(name: str, speed_up: float | None, others: Figures) -> str:
    """Say whether any of the others has a larger speed-up than `name`, and which."""
    if speed_up is None:
        return f"{name} does not fit."
    ahead = [f"{other} ({figure:.3f})" for other, figure in others.items() if figure is not None and figure > speed_up]
    if not ahead:
        return f"None of {', '.join(others)} is faster than {name} ({speed_up:.3f})."
    return f"{' and '.join(ahead)} {'is' if len(ahead) == 1 else 'are'} faster than {name} ({speed_up:.3f})."


def within(low: float, high: float, ours: Figures) -> str:
    """Say how many of our figures are within a published range, and which are below or above it."""
    figures = {name: figure for name, figure in ours.items() if figure is not None}
    below = [f"{name} ({figure:.3g})" for name, figure in figures.items() if figure < low]
    above = [f"{name} ({figure:.3g})" for name, figure in figures.items() if figure > high]
    sides = [f"{side} it: {', '.join(names)}" for side, names in (("below", below), ("above", above)) if names]
    inside = len(figures) - len(below) - len(above)
    return "; ".join([f"{inside} of {len(figures)} are within {low:g} to {high:g}", *sides]) + "."


def span(values: Sequence[float], digits: int = 1) -> str:
    """The range of some figures, such as `9.3 to 10.1`."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
