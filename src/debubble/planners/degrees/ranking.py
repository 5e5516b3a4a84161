"""A ranking of choices by the steps of their quick plans, which plans only those that may be among the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from debubble.ir import DebubbleError

NEGLIGIBLE = 1e-6
"""Share of a step by which a later answer must be faster to take the place of an earlier, simpler one."""

K = TypeVar("K", bound=Hashable)


@dataclass
class Ranking(Generic[K]):
    """The fastest choices of those that were looked at."""

    steps: dict[K, float] = field(default_factory=dict)
    """Seconds of those that fit, in the order in which they were taken."""
    refused: dict[K, DebubbleError] = field(default_factory=dict)
    slower: int = 0
    """Number of those that cannot be among the best."""
    left: int = 0
    """Number of those that are not looked at yet."""

    def best(self, count: int) -> list[K]:
        """The fastest, fastest first; of those that take the same step, the first that was taken."""
        found: list[K] = []
        for choice in sorted(self.steps, key=lambda choice: self.steps[choice]):
            if len(found) == count:
                break
            if not found or self.steps[choice] > self.steps[found[-1]] * (1 + NEGLIGIBLE):
                found.append(choice)
        return found


def rank(
    choices: Sequence[K],
    *,
    bounds: Sequence[Callable[[K], float]],
    step: Callable[[K], float],
    count: int,
    ranking: Ranking[K],
    over: Callable[[], bool] = lambda: False,
    hopeless: Callable[[], bool] = lambda: False,
    within: float = math.inf,
) -> None:
    """Rank choices by the steps of their quick plans, without planning those that cannot be among the best.

    The choice with the least bound comes first: it gets its next bound, or, after the last one, is planned.

    Args:
        choices: What to rank.
        bounds: Seconds that the quick plan of a choice takes at least; from the quickest to work out to the tightest.
            One may raise DebubbleError if it shows that nothing fits.
        step: Seconds of its quick plan; raises DebubbleError if it does not fit.
        count: How many of the best must be right.
        ranking: What is filled in, choice by choice, so that it stands when the work is interrupted.
        over: Whether the effort is spent; something that fits is looked for all the same.
        hopeless: Whether nothing is to be looked for any longer.
        within: Seconds beyond which no choice is looked at.
    """
    coarsest, *tighter = bounds
    waiting = [(coarsest(choice), place, 0) for place, choice in enumerate(choices) if choice not in ranking.steps]
    heapq.heapify(waiting)
    known_best = ranking.best(count)
    most = min(within, ranking.steps[known_best[-1]]) if len(known_best) == count else within
    while waiting:
        ranking.left = len(waiting)
        bound, place, known = heapq.heappop(waiting)
        if bound > most:
            ranking.left, ranking.slower = 0, len(waiting) + 1
            return
        if (over() and ranking.steps) or hopeless():
            return
        choice = choices[place]
        try:
            if known < len(tighter):
                heapq.heappush(waiting, (max(bound, tighter[known](choice)), place, known + 1))
                continue
            ranking.steps[choice] = step(choice)
        except DebubbleError as refusal:
            ranking.refused[choice] = refusal
        best = ranking.best(count)
        most = min(within, ranking.steps[best[-1]]) if len(best) == count else within
    ranking.left = 0
