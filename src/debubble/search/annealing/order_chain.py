"""One chain of the local search: the compiled kernel with its own arrays, lists and random numbers."""

from __future__ import annotations

import numpy as np

from debubble.ir import Schedule
from debubble.search.annealing.arrays import arrays_of, decode, encode
from debubble.search.annealing.layout import COUNT, DEEPER, FROM_SCRATCH, Shares
from debubble.search.annealing.moves import PRIME, anneal
from debubble.search.problem import Incumbent, OrderProblem

MEAN_BACKWARD_WEIGHT = 0.4
"""Weight of the backwards' mean end relative to the objective."""


class OrderChain:
    """An annealing chain over a problem's lists.

    Chains of several threads share nothing.  `orders` and `lengths` are the current lists as `encode` writes them,
    `best_orders` and `best_lengths` the best so far.

    Args:
        problem: The operations to order.
        start: The initial incumbent.
        seed: Random seed.
        shares: Shares of the kinds of moves.

    Attributes:
        best: Objective of the best lists, in the costs' unit of time.
        reported: Objective of the lists last reported.
        random: State of the random number generator.
        unit: Mean time of an operation, in the kernel's unit.
    """

    def __init__(self, problem: OrderProblem, start: Incumbent, *, seed: int, shares: Shares = FROM_SCRATCH) -> None:
        self.problem, self.name, self.shares = problem, start.schedule.name, shares
        self.arrays = arrays_of(problem)
        self.orders, self.lengths = encode(problem, start.schedule)
        self.best_orders, self.best_lengths = self.orders.copy(), self.lengths.copy()
        self.best = self.reported = float(start.value)
        self.random = np.array([(seed + 12345) % (PRIME - 1) + 1], dtype=np.int64)
        layout = self.arrays.layout
        rows = layout.stages * layout.micro_batches // layout.grain
        times = self.arrays.table("time", layout.allocated - layout.time).reshape(-1, COUNT, rows)
        # Deeper levels do not count in the mean, so that temperatures do not depend on them.
        times = np.delete(times[:2], DEEPER, axis=1)
        self.unit = float(times[times > 0].mean())

    def restart(self, best: Incumbent) -> None:
        """Continue from an incumbent, and discard the chain's own best lists."""
        self.best_orders, self.best_lengths = encode(self.problem, best.schedule)
        self.best = self.reported = float(best.value)
        self.return_to_best()

    def return_to_best(self) -> None:
        """Continue from the chain's own best lists."""
        self.orders, self.lengths = self.best_orders.copy(), self.best_lengths.copy()

    def advance(self, steps: int, *, temperature: float, target: float) -> int:
        """Make up to `steps` moves at a constant temperature, in mean operation times; returns how many were made.

        Stops at the objective `target`, in the costs' unit of time.
        """
        layout, floats, ints, scale = self.arrays
        best, moves = anneal(
            layout, floats, ints, self.orders, self.lengths, self.best_orders, self.best_lengths, self.best * scale,
            steps, temperature * self.unit, MEAN_BACKWARD_WEIGHT, target * scale * (1 + 1e-12), self.problem.offload,
            self.problem.recompute, self.shares, self.random,
        )  # fmt: skip
        self.best = best / scale
        return int(moves)

    def take_improvement(self) -> Schedule | None:
        """The best schedule since the last restart, if it is better than the one last reported."""
        if self.best >= self.reported:
            return None
        self.reported = self.best
        return decode(self.problem, self.best_orders, self.best_lengths, name=self.name)
