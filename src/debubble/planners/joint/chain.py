"""Simulated annealing over the points of one placement, scored by the list scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import COMPILING, is_compiled
from debubble.planners.joint.annealing_kernel import ADDRESS, CHOICES, REJECTED, anneal, sample
from debubble.planners.joint.levers import Levers, Point
from debubble.search.annealing.moves import PRIME
from debubble.search.effort import Deadline, Effort

EVALUATION, PER_PAIR = 2e-5, 2.4e-7
"""Seconds of the reference machine to score a point, and in addition for every pair of a stage and a micro-batch."""
BURST = 500
"""Points between two looks at the clock."""


@dataclass
class PointChain:
    """Annealing among the points of a placement; it can be continued with more effort.

    Attributes:
        levers: The points and their costs.
        seed: Its result depends on it and on the efforts alone.
        hosts: Whether hosts may step in the points that it draws; annealing may change that.
        least: Score of the best point so far.
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
    def least(self) -> float:
        """Score of the best point so far."""
        return float(self._values[1])

    @property
    def complete(self) -> bool:
        """True if it has met a point that fits."""
        return self.least < self.levers.longest

    @property
    def best(self) -> Point:
        """The best point so far."""
        return Point.of(self._best, self._best_policy)

    def draw(self, effort: Effort) -> None:
        """Try random points until the effort is spent."""
        counts, missing = np.array(self.levers.balanced_counts), np.zeros(ADDRESS, np.int64)
        done, draws = 0, max(1, effort.moves(self.price))
        space = self.levers.space if self.hosts else self.levers.space._replace(hostable=0, full=1)
        while done < draws and not effort.deadline.passed:
            end = min(draws, done + BURST)
            at = sample(
                space, counts, self._best, self._best_policy, self._values, missing, done, end,
                self._random,
            )  # fmt: skip
            if at < end:
                self.levers.fill(*missing.tolist())
            effort.spend((at - done) * self.price)
            done = at

    def run(self, effort: Effort, *, warm: float, cold: float) -> None:
        """Anneal from the best until the effort is spent, from one temperature to another, in parts of the step."""
        point, policy, missing = self._best.copy(), self._best_policy.copy(), np.zeros(ADDRESS, np.int64)
        self._values[0] = self._values[1]
        done, steps = 0, effort.moves(self.price)
        while done < steps and not effort.deadline.passed:
            end = min(steps, done + BURST)
            at = anneal(
                self.levers.space, point, policy, self._best, self._best_policy, self._values, missing, done, end,
                steps, warm, cold, self._random,
            )  # fmt: skip
            if at < end:
                self.levers.fill(*missing.tolist())
            effort.spend((at - done) * self.price)
            done = at


def price_of_point(levers: Levers) -> float:
    """Seconds of the reference machine to score a point."""
    return EVALUATION + PER_PAIR * levers.placement.stages * levers.problem.micro_batches


def may_compile(deadline: Deadline) -> bool:
    """Tell whether the chain's kernels are on the disk, or there is time to compile them."""
    return deadline.left > COMPILING or (is_compiled(sample) and is_compiled(anneal))


def compile_kernels(levers: Levers) -> float:
    """Compile the chain, or load it from disk, and return the seconds on the clock that this took."""
    begin = time.monotonic()
    chain = PointChain(levers, 0)
    chain.draw(Effort(0))
    chain.run(Effort(chain.price), warm=1.0, cold=1.0)
    return time.monotonic() - begin
