"""Claims: statements of a paper, compared with our results cell by cell.

The verdict is computed.  A cell is the same if our value, rounded to the printed digits, equals the printed one or lies
in the printed range, and near if it is within 5% of it.  A claim whose cells are not all the same must give a reason;
where the paper contradicts itself such a cell counts as mended, not as different.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

_NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


Word = Literal["same", "near", "mended", "differs", "cannot be had", "input"]
"""Verdicts on a cell of ours; an `input` was chosen to equal the paper's value."""
WORDS: Sequence[Word] = get_args(Word)
Kind = Literal["printed", "derived", "read off a figure", "qualitative", "ours"]
"""Sources of a claim's figures: printed, derived from the paper's formulas, read off its bars, or none (qualitative);
`ours` is no claim of a paper: it compares debubble with itself, or gives a result that no paper has."""
KINDS: Sequence[Kind] = get_args(Kind)
NEAR = 0.05
"""Largest relative difference from the paper's figure that counts as near."""


@dataclass(frozen=True)
class Verdict:
    """The words for each of our cells, and the reason why some are not the same."""

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
        statement: The sentence that states the claim.
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
    """A claim about numbers, with a verdict per cell.

    Args:
        statement: The sentence that states the claim.
        paper: The figures as printed: `1.30`, a range such as `1.22 to 1.27`, `more than 30` or `at most 3`.
        ours: Our figures; None for a missing one, such as a plan that does not fit.
        unit: Suffix of the figures, such as `%`.
        because: The reason if ours differ.
        kind: Where the paper's figures come from.
        mended: Whether the paper contradicts itself where ours differ.
        inputs: Indices of the cells that were chosen to equal the paper's.
    """
    words: list[Word] = [
        "input" if index in inputs else _word(text, value, mended)
        for index, (text, value) in enumerate(zip(paper, ours, strict=True))
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
    """A claim without numbers; the verdict is `same` if both texts are equal."""
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
    """The relative distance of a value from the closest printed figure."""
    figures = [float(match.group()) for match in _NUMBER.finditer(text)]
    closest = min(figures, key=lambda figure: abs(figure - value))
    return abs(value - closest) / abs(closest) if closest else float("inf")


def _digits(text: str) -> int:
    return max(len(match.group(1) or "") for match in _NUMBER.finditer(text))


def _agree(text: str, value: float) -> bool:
    """Tell whether a rounded value equals the printed figure or lies in the printed range."""
    figures = [float(match.group()) for match in _NUMBER.finditer(text)]
    rounded = round(value, _digits(text))
    if text.startswith(("more than", "at least")):
        return rounded >= figures[0]
    if text.startswith("at most"):
        return rounded <= figures[0]
    return figures[0] <= rounded <= figures[-1]


def _rounded(text: str, value: float | None) -> str:
    """Format a value with as many decimals as the printed text has."""
    if value is None:
        return "none"
    digits = _digits(text)
    return f"{value + 0.0:.{digits}f}"
