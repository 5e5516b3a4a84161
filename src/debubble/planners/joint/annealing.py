"""Simulated annealing over the points of one placement, scored by the list scheduler."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from debubble.planners.joint.levers import QUARTERS, Levers, Point
from debubble.planners.joint.list_scheduler import makespan
from debubble.search.effort import Effort

EVALUATION, PER_PAIR = 1.5e-4, 4e-7
"""Seconds of the reference machine to score a point, and in addition for every pair of a stage and a micro-batch."""

BACKLOGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 1e9)
PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)
AGES = (0.0, 0.3, 1.0, 3.0, 10.0)
PREFETCHES = (1.0, 2.0, 3.0, 4.0, 6.0)
MANY = 10**6
"""As many micro-batches in flight as memory allows."""

SHIFT, LEVEL, SHARE, FLIGHT = 30, 52, 74, 82
"""Of 100 moves, those below the first number shift units between stages, then change levels, shares of offload, and
micro-batches in flight; the others change the policy."""


@dataclass
class Walk:
    """One annealing of the points of a placement; it can be continued with more effort.

    Attributes:
        levers: The points and their costs.
        point: Where the walk is.
        cost: Its score.
        best: The best point so far.
        least: Its score.
    """

    levers: Levers
    point: Point
    random: random.Random
    cost: float = math.inf
    best: Point = field(init=False)
    least: float = math.inf

    def __post_init__(self) -> None:
        self.cost = self.score(self.point)
        self.best, self.least = self.point, self.cost

    @property
    def price(self) -> float:
        """Seconds of the reference machine to score a point."""
        return EVALUATION + PER_PAIR * self.levers.placement.stages * self.levers.problem.micro_batches

    def score(self, point: Point) -> float:
        """The time of the step; more than any step takes where something does not fit, by how much does not."""
        table, lacking = self.levers.table(point)
        if lacking:
            return self.levers.longest * (10 + lacking / float(self.levers.limits.min()))
        time, missing = makespan(table, self.levers.problem.micro_batches, np.array(point.policy), np.array(point.most))
        if missing:
            pairs = 3 * self.levers.placement.stages * self.levers.problem.micro_batches
            return self.levers.longest * (2 + missing / pairs)
        return time

    def run(self, effort: Effort, *, warm: float, cold: float) -> None:
        """Walk until the effort is spent, cooling from one temperature to another, both parts of the step."""
        moves = effort.moves(self.price)
        for step in range(moves):
            if step % 64 == 0 and effort.brake.bites:
                return
            temperature = warm * (cold / warm) ** (step / moves)
            effort.spend(self.price)
            neighbour = self._neighbour(self.point)
            if neighbour is None or neighbour == self.point:
                continue
            cost = self.score(neighbour)
            if cost <= self.cost or self.random.random() < math.exp((self.cost - cost) / (temperature * self.cost)):
                self.point, self.cost = neighbour, cost
                if cost < self.least:
                    self.best, self.least = neighbour, cost

    def draw(self, effort: Effort) -> None:
        """Try random points until the effort is spent, and go on from the best."""
        for step in range(effort.moves(self.price)):
            if step % 64 == 0 and effort.brake.bites:
                break
            effort.spend(self.price)
            point = random_point(self.levers, self.random)
            cost = self.score(point)
            if cost < self.least:
                self.best, self.least = point, cost
        self.restart()

    def restart(self) -> None:
        """Go back to the best point."""
        self.point, self.cost = self.best, self.least

    def _neighbour(self, point: Point) -> Point | None:
        dice = self.random.randrange(100)
        if dice < SHIFT:
            return self._shifted(point)
        if dice < LEVEL:
            return replace(point, levels=self._changed(point.levels, self._level))
        if dice < SHARE:
            if self.levers.units.offload_bandwidth is None:
                return None
            return replace(point, shares=self._changed(point.shares, self._share))
        if dice < FLIGHT:
            return replace(point, most=self._changed(point.most, self._flight))
        return replace(point, policy=self._policy(point.policy))

    def _shifted(self, point: Point) -> Point | None:
        """Move a unit from one stage to another, through those between them."""
        counts = list(point.counts)
        stages = len(counts)
        giver = self.random.randrange(stages)
        near = self.random.random() < 0.5
        taker = giver + self.random.choice((-1, 1)) if near else self.random.randrange(stages)
        if not 0 <= taker < stages or taker == giver or counts[giver] < 2:
            return None
        counts[giver] -= 1
        counts[taker] += 1
        return replace(point, counts=tuple(counts))

    def _changed(self, values: tuple[int, ...], change: Callable[[int], int]) -> tuple[int, ...]:
        """Change one stage's entry, or the same for all stages of a chunk."""
        result = list(values)
        stages, devices = len(values), self.levers.placement.devices
        s = self.random.randrange(stages)
        to = change(result[s])
        if self.random.random() < 0.2:
            chunk = s // devices
            for other in range(chunk * devices, min(stages, (chunk + 1) * devices)):
                result[other] = to
        else:
            result[s] = to
        return tuple(result)

    def _level(self, level: int) -> int:
        return min(max(level + self.random.choice((-1, 1)), 0), self.levers.levels - 1)

    def _share(self, share: int) -> int:
        return self.random.randrange(QUARTERS + 1)

    def _flight(self, most: int) -> int:
        usual = 2 * self.levers.placement.stages
        return MANY if self.random.random() < 0.3 else self.random.randrange(1, usual)

    def _policy(self, policy: tuple[float, ...]) -> tuple[float, ...]:
        entries = list(policy)
        n = self.random.randrange(len(entries))
        entries[n] = self.random.choice(policy_choices(self.levers)[n])
        return tuple(entries)


def policy_choices(levers: Levers) -> tuple[Sequence[float], ...]:
    """What each entry of a policy may be, in the order of the list scheduler's entries."""
    horizons = [float(operations) for operations in range(1, 2 * levers.placement.stages)]
    return BACKLOGS, PATIENCES, horizons, PREFETCHES, AGES


def random_point(levers: Levers, chance: random.Random) -> Point:
    """A point whose stages have one level and one share per chunk, with a random policy."""
    stages, devices = levers.placement.stages, levers.placement.devices
    chunks = stages // devices
    offloads = levers.units.offload_bandwidth is not None
    level = [chance.randrange(levers.levels) for _ in range(chunks)]
    share = [chance.randrange(QUARTERS + 1) if offloads and chance.random() < 0.6 else 0 for _ in range(chunks)]
    if chance.random() < 0.5:
        # What a step needs last, the shallow chunks' activations, is worth the most time to bring back.
        level.sort(reverse=True)
        share.sort(reverse=True)
    return Point(
        counts=levers.balanced_counts,
        levels=tuple(level[s // devices] for s in range(stages)),
        shares=tuple(share[s // devices] for s in range(stages)),
        most=(MANY,) * stages,
        policy=tuple(chance.choice(entry) for entry in policy_choices(levers)),
    )
