"""Simulated annealing over the points of one placement, scored by the list scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import MAX_COMPILE_SECONDS, is_compiled
from debubble.planners.joint.annealing_kernel import CHOICES, REJECTED, ROW_INDICES, anneal, sample
from debubble.planners.joint.levers import Levers, Point
from debubble.search.annealing.moves import PRIME
from debubble.search.effort import Deadline, Effort

EVALUATION_PRICE, PAIR_PRICE = 2e-5, 2.4e-7
"""Seconds of the reference machine to score a point, plus those per pair of a stage and a micro-batch."""
POINTS_PER_CLOCK_CHECK = 500
"""Points between two checks of the deadline."""


@dataclass
class PointChain:
    """A resumable annealing chain over the points of a placement.

    Attributes:
        levers: The points and their costs.
        seed: Random seed; results depend only on it and on the efforts.
        hosts: Whether random points may offload the optimizer; annealing may in any case.
    """

    levers: Levers
    seed: int
    hosts: bool = True
    _rows: Ints = field(init=False)
    _policy: Floats = field(init=False)
    _best: Ints = field(init=False)
    _best_policy: Floats = field(init=False)
    _values: Floats = field(init=False)
    _random: Ints = field(init=False)

    def __post_init__(self) -> None:
        stages = self.levers.placement.stages
        self._best = np.zeros((CHOICES, stages), np.int64)
        self._best_policy = np.zeros(len(self.levers.policies))
        self._values = np.full(2, REJECTED)
        self._random = np.array([(self.seed * 7919 + 12345) % (PRIME - 1) + 1], dtype=np.int64)

    @property
    def price(self) -> float:
        """Seconds of the reference machine to score a point."""
        return price_of_point(self.levers)

    @property
    def best_score(self) -> float:
        """Score of the best point so far."""
        return float(self._values[1])

    @property
    def complete(self) -> bool:
        """Whether the best point fits."""
        return self.best_score < self.levers.longest

    @property
    def best(self) -> Point:
        """The best point so far."""
        return Point.from_arrays(self._best, self._best_policy)

    def draw(self, effort: Effort) -> None:
        """Score random points until the effort is spent."""
        counts, missing = np.array(self.levers.balanced_counts), np.zeros(ROW_INDICES, np.int64)
        done, draws = 0, max(1, effort.moves(self.price))
        space = self.levers.space if self.hosts else self.levers.space._replace(hostable=0, filled=1)
        while done < draws and not effort.deadline.passed:
            end = min(draws, done + POINTS_PER_CLOCK_CHECK)
            reached = sample(
                space, counts, self._best, self._best_policy, self._values, missing, done, end,
                self._random,
            )  # fmt: skip
            if reached < end:
                self.levers.fill(*missing.tolist())
            effort.spend((reached - done) * self.price)
            done = reached

    def run(self, effort: Effort, *, initial: float, final: float) -> None:
        """Anneal from the best point until the effort is spent; temperatures are fractions of the step time."""
        point, policy, missing = self._best.copy(), self._best_policy.copy(), np.zeros(ROW_INDICES, np.int64)
        self._values[0] = self._values[1]
        done, steps = 0, effort.moves(self.price)
        while done < steps and not effort.deadline.passed:
            end = min(steps, done + POINTS_PER_CLOCK_CHECK)
            reached = anneal(
                self.levers.space, point, policy, self._best, self._best_policy, self._values, missing, done, end,
                steps, initial, final, self._random,
            )  # fmt: skip
            if reached < end:
                self.levers.fill(*missing.tolist())
            effort.spend((reached - done) * self.price)
            done = reached


def price_of_point(levers: Levers) -> float:
    """Seconds of the reference machine to score a point."""
    return EVALUATION_PRICE + PAIR_PRICE * levers.placement.stages * levers.problem.micro_batches


def may_compile(deadline: Deadline) -> bool:
    """Tell whether the chain's kernels are cached on disk or there is time to compile them."""
    return deadline.remaining > MAX_COMPILE_SECONDS or (is_compiled(sample) and is_compiled(anneal))


def compile_kernels(levers: Levers) -> float:
    """Compile the chain's kernels, or load them from disk; returns the wall-clock seconds this took."""
    begin = time.monotonic()
    chain = PointChain(levers, 0)
    chain.draw(Effort(0))
    chain.run(Effort(chain.price), initial=1.0, final=1.0)
    return time.monotonic() - begin
