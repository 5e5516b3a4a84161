"""Ways to a schedule: which block to build, and how to follow it.

A candidate is a tuple of genes, so that near ones can be tried.  `FIRST` are those to begin with: few that together
serve many costs and limits well, found by searching at length over sizes from 2 to 16 devices, memory from a third of
1F1B's to twice that, times even and uneven, with and without communication.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from debubble.search.constructive.building_blocks import Shape
from debubble.search.constructive.order_following import PATIENT, Manner

Genes = tuple[float, ...]

SLACKS = (0.2, 0.4, 0.1, 0.3, 0.0, 0.01, 0.02, 0.05, 0.15, 0.25, 0.6, 0.8)
TURNS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
HOPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
OVERLAPS = (0, 0.25, 0.5, 0.75, 1)
FILLINGS = (PATIENT, 0, 0.25, 0.5, 1)


@dataclass(frozen=True)
class Candidate:
    """A block, and how it is followed."""

    shape: Shape
    even: bool
    """Build the block for equal times, as the paper's are: its order may be the best for others too."""
    manner: Manner

    @staticmethod
    def of(genes: Genes) -> Candidate:
        slack, *stretch, weight_first, even, overlap, filling, late = genes
        legs = len(stretch) // 2
        shape = Shape(slack, tuple(stretch[:legs]), tuple(stretch[legs:]), weight_first == 1)
        return Candidate(shape, even == 1, Manner(overlap, filling, late == 1))


@dataclass(frozen=True)
class Neighbours:
    """Draws genes for blocks of so many legs: any, or near others."""

    legs: int
    dice: random.Random

    def any(self) -> Genes:
        return tuple(self.dice.choice(choice) if self.dice.random() < 0.5 else choice[0] for choice in self._choices)

    def near(self, genes: Genes) -> Genes:
        """One to three genes changed."""
        changed = list(genes)
        for k in self.dice.sample(range(len(genes)), self.dice.choice((1, 1, 2, 3))):
            changed[k] = self.dice.choice(self._choices[k])
        return tuple(changed)

    @property
    def _choices(self) -> list[tuple[float, ...]]:
        return [SLACKS, *[TURNS] * self.legs, *[HOPS] * self.legs, (0, 1), (0, 1), OVERLAPS, FILLINGS, (0, 0, 1)]


# Slack, turns per leg, hops per leg, weight first, even, overlap, filling.
FIRST: dict[int, tuple[Genes, ...]] = {
    2: (
        (0.3, 0.5, 1, 3, 0.25, 1, 1, 0.25, 0.25, 0),
        (0.8, 1.5, 1, 0.5, 0.75, 1, 1, 0, 0.25, 0),
        (0.05, 0, 0.5, 1, 3, 1, 0, 0.5, 1, 0),
        (0.05, 0, 0.5, 0.25, 0, 1, 0, 0, 0, 0),
        (0.2, 1.5, 1, 0.5, 0.75, 0, 1, 0.25, 0.5, 0),
        (0.8, 0.5, 0, 0.75, 0.25, 1, 1, 0, 0, 0),
        (0.01, 6, 0, 0, 2, 0, 0, 0.5, 0.5, 0),
        (0.8, 6, 4, 0, 1, 0, 1, 0, 0.25, 0),
        (0.1, 1.5, 0, 0.25, 2, 0, 1, 0.75, 1, 0),
        (0.6, 3, 0, 0, 0, 0, 0, 0.75, 0.25, 0),
        (0.8, 0, 3, 0.75, 0.25, 1, 1, 0, 0, 0),
        (0, 2, 1, 1, 0, 1, 0, 0, 0.5, 0),
    ),
    4: (
        (0.8, 3, 0, 5, 1, 0.25, 0.5, 2, 0.25, 0, 1, 0.75, 0.5, 0),
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1),
        (0, 1, 0, 3, 1, 3, 0.5, 2, 0.75, 1, 1, 0.25, 0, 0),
        (0.8, 2, 0, 1.5, 0.5, 1, 0, 2, 0, 1, 1, 0.25, 0.5, 0),
        (0.2, 5, 0, 3, 3, 0.75, 0.75, 0, 0.75, 0, 1, 0.75, 0.5, 0),
        (0.6, 1, 0, 6, 1, 0.5, 0.75, 0, 0.75, 1, 0, 0.25, 0.5, 0),
        (0.6, 3, 3, 2, 0.5, 0, 1, 0.25, 0.25, 1, 1, 0.75, 1, 0),
        (0.1, 6, 3, 1.5, 0, 0.75, 1.5, 1, 0.5, 1, 1, 0.5, 0, 0),
        (0.6, 3, 0, 1.5, 1.5, 0.5, 1.5, 0, 0, 1, 1, 0.5, 0.5, 0),
        (0.1, 4, 1.5, 0.5, 0.5, 0.25, 1, 0, 1, 1, 1, 0.25, 0.5, 0),
        (0.8, 2, 5, 6, 3, 1, 1.5, 0.75, 2, 0, 0, 0.25, 0.5, 0),
        (0.05, 5, 3, 1, 0.5, 0.25, 2, 0.5, 1, 1, 1, 0.75, 0.25, 0),
        (0.3, 4, 1, 0, 2, 0, 0.25, 0, 0.25, 1, 1, 0.25, 0, 0),
        (0.6, 1.5, 0.5, 5, 0, 0.5, 0.5, 0.5, 3, 1, 1, 0.5, 1, 0),
        (0.3, 3, 4, 4, 0.5, 0.75, 1, 0.5, 0, 0, 1, 0, 0.25, 0),
        (0.15, 5, 1.5, 1.5, 2, 0, 0, 3, 2, 1, 1, 0.25, 1, 0),
        (0.8, 3, 0.5, 1, 0.5, 0, 1.5, 0, 3, 0, 1, 0.25, 0, 0),
        (0.6, 3, 0, 1, 1, 0.25, 0.5, 1, 0.75, 0, 0, 0.25, 1, 0),
        (0, 0, 0, 3, 1, 1, 0, 1, 0, 0, 1, 0, 0.5, 0),
        (0.25, 1.5, 0.5, 1.5, 0, 0.5, 0, 0.75, 1, 0, 1, 1, 1, 0),
    ),
}  # fmt: skip
