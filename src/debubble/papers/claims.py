"""A paper's statement next to ours, and whether they are the same.

Whether two figures are the same is computed: they are if ours, rounded to the digits that the paper prints, is what it
prints, or lies in the range that it prints.  Where they are not, the claim says why, and cannot be made without that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
        unit: What stands after the figures, such as `%`.
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
