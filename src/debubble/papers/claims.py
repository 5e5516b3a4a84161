"""A paper's statement next to ours: of what kind it is, and cell by cell whether the two are the same.

That is computed.  A figure is the same if ours, rounded to the digits that the paper prints, is what it prints, or lies
in the range that it prints, and near if it is within 5% of that.  Where a cell is not the same the claim says why, and
cannot be made without that; it is mended, and not different, where the paper contradicts itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

_NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


Word = Literal["same", "near", "mended", "differs", "cannot be had", "input"]
"""Ways in which a cell of ours compares with the paper's; an input was chosen so that it is the paper's."""
WORDS: Sequence[Word] = get_args(Word)
Kind = Literal["printed", "derived", "read off a figure", "qualitative", "ours"]
"""Sources of a claim's figures: the paper prints them, they follow from its formulas, are the heights of its bars, or
are none; `ours` is no claim of a paper: debubble beside itself, or an answer that no paper has."""
KINDS: Sequence[Kind] = get_args(Kind)
NEAR = 0.05
"""Share of the paper's figure within which ours is near it."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of our cells with the paper's, and the reasons of those that differ."""

    words: tuple[Word, ...]
    because: str = ""

    def __str__(self) -> str:
        counts = Counter(self.words)
        several = len(self.words) > 1
        text = ", ".join(
            f"{counts[word]} {_PLURAL.get(word, word)}" if several else word for word in WORDS if counts[word]
        )
        return f"{text} because {self.because}" if self.because else text


_PLURAL = {"differs": "differ"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper.

    Attributes:
        statement: What is claimed, and of what.
        paper: The paper's figures, as it prints them.
        ours: Our figures; empty if there are none.
        verdict: How the two compare.
        kind: Where the paper's figures come from.
    """

    statement: str
    paper: str
    ours: str
    verdict: Verdict
    kind: Kind = "printed"


def compared(
    statement: str,
    *,
    paper: Sequence[str],
    ours: Sequence[float | None],
    unit: str = "",
    because: str = "",
    kind: Kind = "printed",
    mended: bool = False,
    inputs: Collection[int] = (),
) -> Claim:
    """The claim that figures are the paper's.

    Args:
        statement: What is claimed.
        paper: Each figure as printed: `1.30`, a range such as `1.22 to 1.27`, or `more than 30` and `at most 3`.
        ours: Our figure for each; None where there is none, as where a plan does not fit.
        unit: What stands after the figures, such as `%`.
        because: Why ours differ, should they.
        kind: Where the paper's figures come from.
        mended: Whether the paper contradicts itself where ours differ.
        inputs: The cells that were chosen to be the paper's.
    """
    words: list[Word] = [
        "input" if at in inputs else _word(text, value, mended)
        for at, (text, value) in enumerate(zip(paper, ours, strict=True))
    ]
    shown = [_rounded(text, value) for text, value in zip(paper, ours, strict=True)]
    return Claim(
        statement=statement,
        paper=", ".join(paper) + unit,
        ours=", ".join(shown) + unit,
        verdict=_verdict(statement, words, because),
        kind=kind,
    )


def stated(
    statement: str, *, paper: str, ours: str, because: str = "", kind: Kind = "printed", mended: bool = False
) -> Claim:
    """The claim that something holds which is no figure; ours is the same if it reads the same."""
    word: Word = "same" if paper == ours else "mended" if mended else "differs"
    return Claim(statement=statement, paper=paper, ours=ours, verdict=_verdict(statement, [word], because), kind=kind)


def unavailable(statement: str, *, paper: str = "", because: str, kind: Kind = "qualitative") -> Claim:
    """A claim for which debubble computes nothing."""
    return Claim(statement=statement, paper=paper, ours="", verdict=Verdict(("cannot be had",), because), kind=kind)


def _verdict(statement: str, words: Sequence[Word], because: str) -> Verdict:
    all_same = set(words) <= {"same", "input"}
    assert all_same or because, f"{statement}: say why ours differs."
    return Verdict(tuple(words), "" if all_same else because)


def _word(text: str, value: float | None, mended: bool) -> Word:
    if value is None or not _agree(text, value):
        near = value is not None and _distance(text, value) <= NEAR
        return "near" if near else "mended" if mended else "differs"
    return "same"


def _distance(text: str, value: float) -> float:
    """The distance of a figure from the printed one, as a share of that."""
    figures = [float(match.group()) for match in _NUMBER.finditer(text)]
    closest = min(figures, key=lambda figure: abs(figure - value))
    return abs(value - closest) / abs(closest) if closest else float("inf")


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
    """A figure with as several digits as are printed."""
    if value is None:
        return "none"
    digits = _digits(text)
    return f"{value + 0.0:.{digits}f}"
