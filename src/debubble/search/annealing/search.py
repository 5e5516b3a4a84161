"""The anytime search: starts, then local search, until the bound is met or the steps are done."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from debubble.ir import DebubbleError, InfeasibleError, Kind, Number, Op, Schedule
from debubble.search.annealing.arrays import PeriodicBlock
from debubble.search.bounds import lower_bound
from debubble.search.constructive.initial import constructed
from debubble.search.effort import START, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

BURST = 2000
"""Moves between two exchanges of the walkers, at most."""
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
    steps: int = 50 * BURST,
    seed: int = 0,
    bound: Number = 0,
    workers: int = 1,
) -> Iterator[Incumbent]:
    """Better and better schedules of a problem, each with its exact objective and a lower bound.

    Args:
        problem: What is ordered.
        starts: Schedules to improve, tried beside the constructed ones.
        steps: Number of moves of each walker.
        seed: The result depends on it, on the steps and on the number of walkers alone.
        bound: One that is already known.
        workers: Walkers side by side.

    Returns:
        The stream; it ends when the bound is met or the steps are done.

    Raises:
        InfeasibleError: No start fits the memory limit.
    """
    for best in begun(problem, starts=starts, bound=bound, effort=Effort(math.inf)):
        yield best
    if steps and not best.optimal:
        yield from improve(problem, best, steps=steps, seed=seed, workers=workers)


def begun(
    problem: OrderProblem, *, starts: Iterable[Schedule] = (), bound: Number = 0, effort: Effort
) -> Iterator[Incumbent]:
    """The best start so far, until the effort is spent.  Raises InfeasibleError if none fits the memory limit."""
    bound = max(bound, lower_bound(problem))
    best: Incumbent | None = None
    reason: DebubbleError | None = None
    for candidate in _candidates(problem, starts):
        if best is not None and effort.over:
            break
        effort.spend(START * problem.stages * problem.micro_batches)
        try:
            value = problem.value(candidate)
        except DebubbleError as error:
            reason = error
            continue
        if best is None or value < best.value:
            best = Incumbent(schedule=candidate, value=value, bound=bound, source="start", seconds=effort.spent)
            yield best
            if best.optimal:
                return
    if best is None:
        # The last candidate needs the least memory.
        raise InfeasibleError(f"No order of operations was found that fits. {reason}")


def compiled(problem: OrderProblem, best: Incumbent) -> float:
    """Seconds on the clock until the kernel is there: some twenty where it was never compiled, else next to none."""
    # Its import costs more than a search that ends at its start.
    from debubble.search.annealing.walker import Walker

    begin = time.monotonic()
    Walker.of(problem, best, seed=0).walk(0, temperature=1.0, target=0.0)
    return time.monotonic() - begin


def improve(
    problem: OrderProblem,
    best: Incumbent,
    *,
    steps: int | None = None,
    effort: Effort | None = None,
    seed: int,
    workers: int = 1,
    block: PeriodicBlock | None = None,
    hot: Sequence[float] = MILD,
    coolings: Sequence[float] = COOLINGS,
) -> Iterator[Incumbent]:
    """Local search from an incumbent: coolings, each from the best of its walker, until the steps are done.

    `workers` walk side by side, each `steps` in all, by default as many as the effort pays for; the result depends on
    their number and the seed.  They exchange what they found after every burst.  `block`: what of the lists stays
    periodic.  `hot`: temperatures at which a cooling begins, of the first walker, the second and so on in turn.
    `coolings`: parts of the search at which one begins, and the last ends.
    """
    from debubble.search.annealing.walker import Walker

    effort = effort or Effort(math.inf)
    price = price_of_move(problem.stages * problem.micro_batches, recompute=problem.recompute)
    steps = effort.moves(price) if steps is None else steps
    walkers = [Walker.of(problem, best, seed=seed * 7919 + worker, block=block) for worker in range(workers)]
    done, found = 0, best.seconds
    with ThreadPoolExecutor(workers) as pool:
        for begin, end in itertools.pairwise(coolings):
            for walker in walkers:
                if walker.best > FAR * float(best.value):
                    walker.restart(best)
                else:
                    walker.go_back()
            while (spent := done / steps if done < steps else 1.0) < end and not effort.brake.bites:
                cooled = (spent - begin) / (end - begin)
                count = max(1, int(min(BURST, steps - done, steps * (end - begin) / STAIRS)))
                target = float(best.bound)
                walks = [
                    pool.submit(walker.walk, count, temperature=first * (COLD / first) ** cooled, target=target)
                    for walker, first in zip(walkers, itertools.cycle(hot), strict=False)
                ]
                moved = max(walk.result() for walk in walks)
                done += moved
                effort.spend(moved * price)
                for walker in walkers:
                    schedule = walker.news() if walker.best < best.value else None
                    better = None if schedule is None else verified(problem, schedule, best, below=best.value)
                    if better is not None:
                        best = replace(better, source="search", steps=done, seconds=found + done * price)
                        yield best
                if best.optimal:
                    return


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
