"""One chain of the local search: the compiled kernel with its own arrays, lists and random numbers."""

from __future__ import annotations

import numpy as np

from debubble.ir import Schedule
from debubble.search.annealing.arrays import arrays_of, decode, encode
from debubble.search.annealing.layout import COUNT, DEEPER, FROM_SCRATCH, Shares
from debubble.search.annealing.moves import PRIME, anneal
from debubble.search.problem import Incumbent, OrderProblem

SLOPE = 0.4
"""Weight of the mean end of the backwards for inputs, next to the objective."""


class OrderChain:
    """Lists of a problem that change, and the best that they have been.

    Chains of several threads share nothing.  `orders` and `lengths` are the lists as `encode` writes them,
    `best_orders` and `best_lengths` the best so far.

    Args:
        problem: The operations to order.
        start: Where the chain starts.
        seed: Seed of its random numbers.
        shares: How often which move is made.

    Attributes:
        best: Objective of the best lists, in the costs' unit of time.
        reported: Objective of the lists that were last reported.
        random: State of the random numbers.
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
        # A deeper level changes no temperature.
        times = np.delete(times[:2], DEEPER, axis=1)
        self.unit = float(times[times > 0].mean())

    def restart(self, best: Incumbent) -> None:
        """Go to an incumbent's lists, and forget the best of its own."""
        self.best_orders, self.best_lengths = encode(self.problem, best.schedule)
        self.best = self.reported = float(best.value)
        self.go_back()

    def go_back(self) -> None:
        """Return to the best lists of its own."""
        self.orders, self.lengths = self.best_orders.copy(), self.best_lengths.copy()

    def advance(self, steps: int, *, temperature: float, target: float) -> int:
        """Take up to `steps` moves at a constant temperature, in mean operation times; return how many were taken.

        It ends at the objective `target`, in the costs' unit of time.
        """
        layout, floats, ints, scale = self.arrays
        best, moves = anneal(
            layout, floats, ints, self.orders, self.lengths, self.best_orders, self.best_lengths, self.best * scale,
            steps, temperature * self.unit, SLOPE, target * scale * (1 + 1e-12), self.problem.offload,
            self.problem.recompute, self.shares, self.random,
        )  # fmt: skip
        self.best = best / scale
        return int(moves)

    def take_improvement(self) -> Schedule | None:
        """Report the best schedule since the last restart, if it is better than the one last reported."""
        if self.best >= self.reported:
            return None
        self.reported = self.best
        return decode(self.problem, self.best_orders, self.best_lengths, name=self.name)
