"""Best-first branch and bound: ranks choices by their quick plans, and plans only those that may be among the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from debubble.ir import DebubbleError

NEGLIGIBLE_DIFFERENCE = 1e-6
"""Relative speedup that a later answer needs to replace an earlier, simpler one."""

K = TypeVar("K", bound=Hashable)


@dataclass
class Ranking(Generic[K]):
    """The choices examined so far, with their steps or errors."""

    steps: dict[K, float] = field(default_factory=dict)
    """Step in seconds of the choices that fit, in the order in which they were planned."""
    infeasible: dict[K, DebubbleError] = field(default_factory=dict)
    slower: set[K] = field(default_factory=set)
    """Choices whose bounds exclude them from the best."""
    remaining: int = 0
    """Number of choices that are not examined yet."""

    def best(self, count: int) -> list[K]:
        """The fastest choices, fastest first; of those with equal steps, the first that was planned."""
        fastest: list[K] = []
        for choice in sorted(self.steps, key=lambda choice: self.steps[choice]):
            if len(fastest) == count:
                break
            if not fastest or self.steps[choice] > self.steps[fastest[-1]] * (1 + NEGLIGIBLE_DIFFERENCE):
                fastest.append(choice)
        return fastest


def rank(
    choices: Sequence[K],
    *,
    bounds: Sequence[Callable[[K], float]],
    step: Callable[[K], float],
    count: int,
    ranking: Ranking[K],
    effort_spent: Callable[[], bool] = lambda: False,
    expired: Callable[[], bool] = lambda: False,
    max_seconds: float = math.inf,
) -> None:
    """Rank choices by the steps of their quick plans, without planning those that cannot be among the best.

    The choice with the smallest bound comes first: its next, tighter bound is computed, or, after the last one, it is
    planned.

    Args:
        choices: Choices to rank.
        bounds: Lower bounds in seconds on a choice's quick plan, from the cheapest to the tightest.  One may raise
            DebubbleError if it shows that nothing fits.
        step: Seconds of its quick plan; raises DebubbleError if it does not fit.
        count: Number of best choices that must be exact.
        ranking: The ranking to extend; it is valid whenever the work is interrupted.
        effort_spent: Whether the effort is spent, which ends the ranking as soon as some choice fits.
        expired: Whether to stop even if nothing fits.
        max_seconds: Choices with larger bounds are not planned.
    """
    coarsest, *tighter = bounds
    waiting = [(coarsest(choice), index, 0) for index, choice in enumerate(choices) if choice not in ranking.steps]
    heapq.heapify(waiting)
    known_best = ranking.best(count)
    threshold = min(max_seconds, ranking.steps[known_best[-1]]) if len(known_best) == count else max_seconds
    while waiting:
        ranking.remaining = len(waiting)
        bound, index, level = heapq.heappop(waiting)
        if bound > threshold:
            ranking.remaining, ranking.slower = 0, {choices[index], *(choices[other] for _, other, _ in waiting)}
            return
        if (effort_spent() and ranking.steps) or expired():
            return
        choice = choices[index]
        try:
            if level < len(tighter):
                heapq.heappush(waiting, (max(bound, tighter[level](choice)), index, level + 1))
                continue
            ranking.steps[choice] = step(choice)
        except DebubbleError as refusal:
            ranking.infeasible[choice] = refusal
        best = ranking.best(count)
        threshold = min(max_seconds, ranking.steps[best[-1]]) if len(best) == count else max_seconds
    ranking.remaining = 0
