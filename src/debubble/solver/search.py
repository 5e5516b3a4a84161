"""The anytime search: starts, then local search, until the bound is met, the steps are done or the time is up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from debubble.ir import DebubbleError, InfeasibleError, Kind, Number, Op, Schedule
from debubble.solver.bounds import lower_bound
from debubble.solver.lists import Block
from debubble.solver.problem import Incumbent, OrderProblem
from debubble.solver.starts import constructed

BURST = 2000
"""Moves between two looks at the clock, at most."""
MILD, HOT, COLD = (0.05, 0.075), (0.15, 0.1), 0.005
"""Temperatures of a cooling, in mean operation times: it begins mildly, which keeps what a start is worth, or hot,
which is surer if there is time for a slow one, and ends cold.  Of two, walkers take the one and the other in turn."""
COOLINGS = (0.0, 0.03, 0.1, 0.3, 1.0)
"""Short ones for easy problems, then a slow one."""
STAIRS = 16
"""Temperatures of a cooling, at least."""
FAR = 1.005
"""Times the best, a walker's own best is given up for it; nearer ones are kept apart, as each may get stuck."""


def search(
    problem: OrderProblem,
    *,
    starts: Iterable[Schedule] = (),
    deadline: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    bound: Number = 0,
    workers: int = 1,
) -> Iterator[Incumbent]:
    """Better and better schedules of a problem, each with its exact objective and a lower bound.

    `starts`: schedules to improve, tried beside the constructed ones.  `deadline`: seconds from now, without those that
    compiling the kernel takes, once on a machine.  `steps`: number of moves; with it and without a deadline the result
    depends on the seed and the number of `workers` alone.  `bound`: one that is already known.
    Stops when the bound is met.  Raises InfeasibleError if no start fits the memory limit.
    """
    clock = Clock.starting(deadline)
    bound = max(bound, lower_bound(problem))
    best: Incumbent | None = None
    reason: DebubbleError | None = None
    for candidate in _candidates(problem, starts):
        if best is not None and clock.over:
            break
        try:
            value = problem.value(candidate)
        except DebubbleError as error:
            reason = error
            continue
        if best is None or value < best.value:
            best = Incumbent(schedule=candidate, value=value, bound=bound, source="start", seconds=clock.passed)
            yield best
            if best.optimal:
                return
    if best is None:
        # The last candidate needs the least memory.
        raise InfeasibleError(f"No order of operations was found that fits. {reason}")
    if steps == 0:
        return
    yield from improve(
        problem,
        best,
        clock=clock.later(readied(problem, best)),
        steps=steps if deadline is not None else steps or 50 * BURST,
        seed=seed,
        workers=workers,
    )


@dataclass(frozen=True)
class Clock:
    """When a search began and when it must end."""

    begin: float
    end: float

    @staticmethod
    def starting(deadline: float | None) -> Clock:
        now = time.monotonic()
        return Clock(now, math.inf if deadline is None else now + deadline)

    @property
    def passed(self) -> float:
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left <= 0

    def later(self, seconds: float) -> Clock:
        """The clock as if it had begun some seconds later."""
        return Clock(self.begin + seconds, self.end + seconds)


def readied(problem: OrderProblem, best: Incumbent) -> float:
    """Seconds until the kernel is there: some twenty if it was never compiled on this machine, else next to none."""
    # Its import costs more than a search that ends at its start.
    from debubble.solver.walker import Walker

    begin = time.monotonic()
    Walker.of(problem, best, seed=0).walk(0, temperature=1.0, target=0.0)
    return time.monotonic() - begin


def improve(
    problem: OrderProblem,
    best: Incumbent,
    *,
    clock: Clock,
    steps: int | None,
    seed: int,
    workers: int = 1,
    block: Block | None = None,
    hot: Sequence[float] = MILD,
    coolings: Sequence[float] = COOLINGS,
) -> Iterator[Incumbent]:
    """Local search from an incumbent: coolings, each from the best of its walker, until the clock or `steps` end it.

    `workers` walk side by side, each `steps` in all; the result depends on their number and the seed.  `block`:
    what of the lists stays periodic.  `hot`: temperatures at which a cooling begins, of the first walker, the second
    and so on in turn.  `coolings`: parts of the search at which one begins, and the last ends.
    """
    from debubble.solver.walker import Walker

    walkers = [Walker.of(problem, best, seed=seed * 7919 + worker, block=block) for worker in range(workers)]
    budget, done = _Budget(math.inf if steps is None else steps, time.monotonic(), clock.end), 0
    with ThreadPoolExecutor(workers) as pool:
        for begin, end in itertools.pairwise(coolings):
            for walker in walkers:
                if walker.best > FAR * float(best.value):
                    walker.restart(best)
                else:
                    walker.go_back()
            while (spent := budget.spent(done)) < end:
                cooled = (spent - begin) / (end - begin)
                count, target = budget.burst(done, end - begin), float(best.bound)
                walks = [
                    pool.submit(walker.walk, count, temperature=first * (COLD / first) ** cooled, target=target)
                    for walker, first in zip(walkers, itertools.cycle(hot), strict=False)
                ]
                done += max(walk.result() for walk in walks)
                for walker in walkers:
                    schedule = walker.news() if walker.best < best.value else None
                    better = None if schedule is None else verified(problem, schedule, best, below=best.value)
                    if better is not None:
                        best = replace(better, source="search", steps=done, seconds=clock.passed)
                        yield best
                if best.optimal:
                    return


@dataclass(frozen=True)
class _Budget:
    """What a search may spend: moves, time or both; infinite where it has no end."""

    moves: float
    begin: float
    end: float

    def spent(self, done: int) -> float:
        """The part that is spent, at least 1 where nothing is left."""
        now = time.monotonic()
        if done >= self.moves or now >= self.end:
            return 1.0
        return max(done / self.moves, (now - self.begin) / (self.end - self.begin))

    def burst(self, done: int, part: float) -> int:
        """Moves until the next look at the clock, in a cooling that takes a part of all."""
        return max(1, int(min(BURST, self.moves - done, self.moves * part / STAIRS)))


def verified(problem: OrderProblem, schedule: Schedule, best: Incumbent, *, below: Number) -> Incumbent | None:
    """The schedule with the best's bound, if exact simulation agrees that it takes less than `below`."""
    try:
        value = problem.value(schedule)
    except DebubbleError:
        return None
    return replace(best, schedule=schedule, value=value) if value < below else None


def _candidates(problem: OrderProblem, given: Iterable[Schedule]) -> Iterator[Schedule]:
    """The given schedules, with their backwards split where that is allowed, and the constructed ones."""
    for start in given:
        if problem.split and len(start.split_backward) < problem.stages * problem.micro_batches:
            yield split_backwards(start)
        yield start
    yield from constructed(problem)


def split_backwards(schedule: Schedule) -> Schedule:
    """The same lists with I and W, side by side, for every B."""
    orders = tuple(
        tuple(
            part
            for op in order
            for part in (
                (Op(Kind.I, op.stage, op.micro_batch), Op(Kind.W, op.stage, op.micro_batch))
                if op.kind is Kind.B
                else (op,)
            )
        )
        for order in schedule.orders
    )
    return replace(schedule, orders=orders)
