"""Effort: a search budget counted in operations, so that the same call gives the same answer on every machine.

Efforts are in seconds of the reference machine, two idle cores of 2020s server CPUs at about 3 GHz: one for the search
and one for proving bounds.  They do not depend on the clock: operations are counted (moves of the local search, list
schedules, simulations, deterministic time of CP-SAT), and the prices below convert counts to seconds.  Prices are the
best of several measurements: a move takes 11 us at p = 16, m = 32 and 6 us at p = 8, m = 32; a unit of CP-SAT's
deterministic time took 1.7 to 5 s on the models of this package, more on large ones and less on small ones.  Compiling
the kernel, once per machine, is not counted.

The clock is only a limit: after `deadline` seconds a search stops with its best result so far (`Effort.cut_off`), which
then depends on the machine.
"""

from __future__ import annotations

import math
import time
from typing import Any

from debubble.interrupts import solve_interruptibly

CORES = 2
"""Cores of the reference machine."""
MOVE_PRICE, MOVE_PRICE_PER_PAIR = 1e-6, 20e-9
"""Seconds of a move of the local search, plus seconds per pair of a stage and a micro-batch."""
RECOMPUTE_MOVE_FACTOR = 1.5
"""Factor of a move's time if recomputation is a choice: lists are longer, and changes take effect at the forward."""
CHUNKS_MOVE_FACTOR = 0.5
"""Factor of a move's time if devices have several stages and nothing leaves memory: there are fewer devices per pair,
and three operations instead of five (5.6 us at p = 8, m = 32 with two chunks)."""
START_PRICE = 250e-6
"""Seconds per pair to construct and simulate a list schedule."""
SIMULATION_PRICE = 170e-6
"""Seconds per pair to lower and simulate a schedule."""
RESIMULATION_PRICE = 30e-6
"""Seconds per pair to lower and simulate a schedule again after only its costs have changed, without a memory limit."""
EVALUATION_PRICE = 10e-6
"""Seconds per pair to convert a schedule for the local search and evaluate it."""
MODEL_PRICE = 500e-6
"""Seconds per pair to build a CP-SAT model of a schedule."""
LIBRARY_PRICE, DISPATCH_PRICE = (1e-2, 20e-6), (0.15, 60e-6)
OFFLOAD_PRICE, LIST_PRICE = (0.05, 120e-6), (1e-2, 25e-6)
"""Seconds, and seconds per pair, to build a library schedule and fit it to a problem; a schedule that dispatches
candidates; a schedule that tries several offloads; and the best of several list schedules."""
SEARCH_PRICE = 5.0
"""Seconds to build a schedule that searches its order."""
RECOMPUTE_CHOICE_PRICE, PARTITION_SCORE_PRICE = (5e-3, 15e-6), (5e-4, 2.5e-6)
"""Seconds, and seconds per pair, to choose the recomputation of a partition, and to score a chosen one."""
MEMORY_CHECK_PRICE = 50e-6
"""Seconds per pair to check whether a schedule fits in memory, without simulating it."""
LINEAR_PROGRAM_PRICE = 1e-3
"""Seconds to solve a small linear program."""
ROW_PRICE, ITERATION_PRICE = 1e-3, 1e-7
"""Seconds per row of a MILP to build and presolve it and find a first solution, and seconds per row and iteration of
the simplex method."""
SECONDS_PER_DETERMINISTIC_UNIT = 3.0
"""Seconds per unit of CP-SAT's deterministic time, with one worker."""
MAX_LOAD_SECONDS = 4.0
"""Upper limit on the wall-clock seconds to load compiled kernels from disk; compiling them takes much longer."""
DEADLINE_PER_EFFORT, MIN_DEADLINE = 10.0, 60.0
"""The default deadline is this multiple of the effort plus this many seconds."""


class Effort:
    """A search budget in seconds of the reference machine.

    Attributes:
        seconds: The budget.
        spent: Work done; slightly more than `seconds` if the last operation was larger than the remaining budget.

    Args:
        seconds: The budget; infinite for searches that end by themselves.
        deadline: A wall-clock limit; none by default.
        parent: The effort that this one was split off from, in which its work counts too.
    """

    def __init__(self, seconds: float, *, deadline: Deadline | None = None, parent: Effort | None = None) -> None:
        self.seconds, self.spent = seconds, 0.0
        self.deadline = deadline or Deadline(math.inf)
        self._parent = parent

    @staticmethod
    def starting(seconds: float, deadline: float | None = None) -> Effort:
        """An effort with a deadline in `deadline` seconds, by default in ten times the effort plus a minute."""
        return Effort(
            seconds, deadline=Deadline(DEADLINE_PER_EFFORT * seconds + MIN_DEADLINE if deadline is None else deadline)
        )

    @property
    def remaining(self) -> float:
        """The remaining seconds of the reference machine, at least 0."""
        return max(0.0, self.seconds - self.spent)

    @property
    def over(self) -> bool:
        """Whether the budget is spent or the deadline has passed."""
        return self.remaining <= 0 or self.deadline.passed

    @property
    def cut_off(self) -> bool:
        """Whether the deadline has stopped anything, so that with more time the result might differ."""
        return self.deadline.exceeded

    def spend(self, seconds: float) -> None:
        """Count work that takes these seconds on the reference machine."""
        self.spent += seconds
        if self._parent is not None:
            self._parent.spend(seconds)

    def split_off(self, seconds: float) -> Effort:
        """An effort of up to `seconds` of the remaining budget, for one phase of the search."""
        return Effort(min(seconds, self.remaining), deadline=self.deadline, parent=self)

    def moves(self, price: float) -> int:
        """The number of moves that the remaining budget pays for at `price` seconds each."""
        return int(self.remaining / price + 1e-9)


class Deadline:
    """A point in wall-clock time at which searches stop."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.exceeded = False
        """Whether it has stopped anything."""

    @property
    def remaining(self) -> float:
        """The remaining wall-clock seconds."""
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether the caller has to stop."""
        self.check()
        return self.exceeded

    def check(self) -> None:
        """Record that it stops something, if it has passed."""
        self.exceeded = self.exceeded or self.remaining <= 0

    def expire(self) -> None:
        """Make all running searches stop."""
        self._end = -math.inf

    def extend_for_kernels(self, seconds: float) -> None:
        """Extend the deadline by the seconds that kernels took, if they were compiled and not only loaded."""
        if seconds > MAX_LOAD_SECONDS:
            self._end += seconds


def price_of_move(pairs: int, *, recompute: bool = False, of_chunks: bool = False) -> float:
    """Price of a move of the local search with `pairs` stages times micro-batches, in seconds of the reference machine.

    `recompute` if recomputation is a choice, `of_chunks` if devices have several stages and nothing leaves memory.
    The price is that with shared host links; without them a move takes about three quarters of it.
    """
    factor = (RECOMPUTE_MOVE_FACTOR if recompute else 1) * (CHUNKS_MOVE_FACTOR if of_chunks else 1)
    return (MOVE_PRICE + MOVE_PRICE_PER_PAIR * pairs) * factor


def solver_of(effort: Effort, *, seed: int = 0) -> Any:
    """A CP-SAT solver limited to the remaining effort."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = seed
    if effort.remaining < math.inf:
        solver.parameters.max_deterministic_time = effort.remaining / SECONDS_PER_DETERMINISTIC_UNIT
    if effort.deadline.remaining < math.inf:
        solver.parameters.max_time_in_seconds = max(0.01, effort.deadline.remaining)
    return solver


def status_of(solver: Any, model: Any, effort: Effort, callback: Any = None) -> str:
    """Solve a model and count the work; returns the name of the solver's status."""
    answer = solve_interruptibly(lambda: solver.solve(model, callback), solver.stop_search)
    status: str = solver.status_name(answer)
    effort.spend(solver.response_proto.deterministic_time * SECONDS_PER_DETERMINISTIC_UNIT)
    if status in ("FEASIBLE", "UNKNOWN") and effort.remaining > 0:
        effort.deadline.check()
    return status
