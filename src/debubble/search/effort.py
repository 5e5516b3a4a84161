"""Effort: how much a search may do, counted in work, so that the same call gives the same answer on every machine.

An effort is given in seconds of the reference machine, two idle cores of 2020s server CPUs at some 3 GHz: on one the
search, on the other its prover of bounds.  No clock is read for it.  What was done is counted instead, moves of the
local search, list schedules, simulations, deterministic time of CP-SAT, and the prices below turn counts into seconds.
They are the best of several measurements: a move takes 11 us at p = 16, m = 32 and 6 us at p = 8, m = 32; a unit of
CP-SAT's deterministic time took 1.7 to 5 s on the models of this package, more on large ones and less on small ones.
Compiling the kernel, once on a machine, is no work.

The clock only limits: after `deadline` seconds a search stops with what it has (`Effort.cut_off`).
What it answers then depends on the machine.
"""

from __future__ import annotations

import math
import time
from typing import Any

from debubble.interrupts import solve_interruptibly

CORES = 2
"""Cores of the reference machine."""
MOVE, MOVE_PER_PAIR = 1e-6, 20e-9
"""Seconds of a move of the local search, and in addition for every pair of a stage and a micro-batch."""
MOVE_RECOMPUTING = 1.5
"""Factor of that time where recomputation is a choice: lists are longer, and a change of it begins at a forward."""
MOVE_OF_CHUNKS = 0.5
"""Factor of that time where devices have several stages and nothing leaves memory: there are fewer devices to a pair,
and three operations instead of five (5.6 us at p = 8, m = 32 with two chunks)."""
START = 250e-6
"""Seconds, per pair, to construct a list schedule and to simulate it."""
SIMULATION = 170e-6
"""Seconds, per pair, to lower and simulate a schedule."""
RESIMULATED = 30e-6
"""Seconds, per pair, to lower and simulate again a schedule whose costs alone have changed, whatever its limit."""
EVALUATED = 10e-6
"""Seconds, per pair, to lay a schedule out for the local search and to evaluate it."""
MODEL = 500e-6
"""Seconds, per pair, to build a CP-SAT model of a schedule."""
BUILT, DISPATCHED, MOVED, LISTED = (1e-2, 20e-6), (0.15, 60e-6), (0.05, 120e-6), (1e-2, 25e-6)
"""Seconds, and in addition per pair, to build a schedule of the library and fit it to a problem; one that dispatches
candidates; one that tries ways to offload; and the best of some list schedules."""
SEARCHED = 5.0
"""Seconds of a schedule that searches its order while it is built."""
REPRICED, SCORED = (5e-3, 15e-6), (5e-4, 2.5e-6)
"""Seconds, and in addition per pair, to choose the recomputation of a partition, and to score one that is chosen."""
CHECKED = 50e-6
"""Seconds, per pair, to check that a schedule fits, or does not, without simulating it."""
LINEAR = 1e-3
"""Seconds of a small linear program."""
ROW, ITERATION = 1e-3, 1e-7
"""Seconds to build a row of a MILP, to presolve it and to look for a first solution; and, for every row, of an
iteration of the simplex method."""
DETERMINISTIC = 3.0
"""Seconds of a unit of CP-SAT's deterministic time, with one worker."""
LOADED = 4.0
"""Seconds on the clock in which compiled kernels are loaded from disk; to compile them takes many times as long."""
DEADLINE_PER_EFFORT, MIN_DEADLINE = 10.0, 60.0
"""The deadline where none is given: so many times the effort, and so many seconds."""


class Effort:
    """Seconds of the reference machine that a search may spend, and what it has spent.

    Attributes:
        seconds: Work that may be spent, in seconds of the reference machine.
        spent: Work that is spent, in the same unit; a little more than `seconds` where the last step was larger than
            the rest.

    Args:
        seconds: As above; infinite for what ends by itself.
        deadline: The moment at which it stops all the same; none by default.
        whole: The effort that this is a part of: what is spent here is spent there too.
    """

    def __init__(self, seconds: float, *, deadline: Deadline | None = None, whole: Effort | None = None) -> None:
        self.seconds, self.spent = seconds, 0.0
        self.deadline = deadline or Deadline(math.inf)
        self._whole = whole

    @staticmethod
    def starting(seconds: float, deadline: float | None = None) -> Effort:
        """An effort that stops `deadline` seconds from now, by default after ten times the effort and a minute."""
        return Effort(
            seconds, deadline=Deadline(DEADLINE_PER_EFFORT * seconds + MIN_DEADLINE if deadline is None else deadline)
        )

    @property
    def left(self) -> float:
        """Seconds of the reference machine, at least 0."""
        return max(0.0, self.seconds - self.spent)

    @property
    def over(self) -> bool:
        """True if all is spent, or the deadline has passed."""
        return self.left <= 0 or self.deadline.passed

    @property
    def cut_off(self) -> bool:
        """True if the deadline has stopped anything: with more time on the clock the answer might be another one."""
        return self.deadline.exceeded

    def spend(self, seconds: float) -> None:
        """Count work, by the seconds that it takes on the reference machine."""
        self.spent += seconds
        if self._whole is not None:
            self._whole.spend(seconds)

    def part(self, seconds: float) -> Effort:
        """Set apart up to `seconds` of what is left for a part of the search."""
        return Effort(min(seconds, self.left), deadline=self.deadline, whole=self)

    def moves(self, price: float) -> int:
        """Count the moves that the rest pays for, `price` seconds of the reference machine each."""
        return int(self.left / price + 1e-9)


class Deadline:
    """A moment on the clock at which searches stop whatever they have left to do."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.exceeded = False
        """True once it has stopped anything."""

    @property
    def left(self) -> float:
        """Seconds on the clock."""
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        """True if the caller has to stop."""
        self.check()
        return self.exceeded

    def check(self) -> None:
        """Note that it stops something, if its time has come."""
        self.exceeded = self.exceeded or self.left <= 0

    def expire(self) -> None:
        """Stop whatever still runs."""
        self._end = -math.inf

    def extend_for_kernels(self, seconds: float) -> None:
        """Put the end off by the seconds on the clock that kernels took, if they were compiled and not only loaded."""
        if seconds > LOADED:
            self._end += seconds


def price_of_move(pairs: int, *, recompute: bool = False, of_chunks: bool = False) -> float:
    """Price a move of the local search on so many stages times micro-batches, in seconds of the reference machine.

    `recompute` if recomputation is a choice, `of_chunks` if devices have several stages and nothing leaves memory.
    With links to the host that devices share a move takes as long as this says, without them some three quarters of it.
    """
    factor = (MOVE_RECOMPUTING if recompute else 1) * (MOVE_OF_CHUNKS if of_chunks else 1)
    return (MOVE + MOVE_PER_PAIR * pairs) * factor


def solver_of(effort: Effort, *, seed: int = 0) -> Any:
    """A solver that does what is left of an effort."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = seed
    if effort.left < math.inf:
        solver.parameters.max_deterministic_time = effort.left / DETERMINISTIC
    if effort.deadline.left < math.inf:
        solver.parameters.max_time_in_seconds = max(0.01, effort.deadline.left)
    return solver


def status_of(solver: Any, model: Any, effort: Effort, callback: Any = None) -> str:
    """Solve a model and count what that took: the name of the solver's status."""
    answer = solve_interruptibly(lambda: solver.solve(model, callback), solver.stop_search)
    status: str = solver.status_name(answer)
    effort.spend(solver.response_proto.deterministic_time * DETERMINISTIC)
    if status in ("FEASIBLE", "UNKNOWN") and effort.left > 0:
        effort.deadline.check()
    return status
