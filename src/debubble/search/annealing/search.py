"""The anytime search: starts, then local search, until the bound is met or the steps are done."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from debubble.ir import DebubbleError, InfeasibleError, Number, Schedule
from debubble.kernels import COMPILING, is_compiled
from debubble.search.annealing.layout import FROM_SCRATCH, Shares
from debubble.search.bounds import lower_bound
from debubble.search.constructive.initial import initial_schedules
from debubble.search.effort import SIMULATION, START, Deadline, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

BURST = 2000
"""Moves between two exchanges of the chains, at most."""
MILD_TEMPERATURES, HOT_TEMPERATURES = (0.05, 0.075), (0.15, 0.1)
"""First temperatures of a cooling, in mean operation times; chains take the one and the other in turn.  Mild ones keep
what a start is worth; hot ones are surer if there is time to cool slowly."""
LAST_TEMPERATURE = 0.005
"""Temperature at which every cooling ends."""
COOLINGS = (0.0, 0.03, 0.1, 0.3, 1.0)
"""Shares of the search at which coolings begin: short ones for easy problems, then a slow one."""
COOLING_STEPS = 16
"""Temperatures of a cooling, at least."""
CHECK_RATIO = 10
"""Work between two simulations of improvements, in simulations, once one agrees with the chain; others are simulated
where the search ends; of chains in parallel also where a cooling ends."""
RESTART_RATIO = 1.005
"""A chain restarts from the global best when its own is more than 0.5% worse; nearer ones stay apart, as each may
get stuck."""


def search(
    problem: OrderProblem,
    *,
    starts: Iterable[Schedule] = (),
    steps: int = 50 * BURST,
    seed: int = 0,
) -> Iterator[Incumbent]:
    """Better and better schedules of a problem, each with its exact objective and a lower bound.

    Args:
        problem: The operations to order.
        starts: Schedules to improve, tried next to the constructed ones.
        steps: Number of moves.
        seed: The result depends on it and on the steps alone.

    Returns:
        The stream; it ends when the bound is met or the steps are done.

    Raises:
        InfeasibleError: No start fits the memory limit.
    """
    for best in best_starts(problem, starts=starts, effort=Effort(math.inf)):
        yield best
    if steps and not best.optimal:
        yield from improve(problem, best, steps=steps, seed=seed)


def best_starts(
    problem: OrderProblem, *, starts: Iterable[Schedule] = (), bound: Number = 0, effort: Effort
) -> Iterator[Incumbent]:
    """Try one start after the other, and yield each that is better than all before it; the constructed ones come last.

    Once the effort is spent, and there is a start, no other is tried.  `bound` is a lower bound that is already known.
    Raises InfeasibleError if no start fits the memory limit.
    """
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


def may_compile(deadline: Deadline) -> bool:
    """Tell whether the kernel is on the disk, or there is time to compile it."""
    # Its import costs more than a search that ends at its start.
    from debubble.search.annealing.moves import anneal

    return deadline.left > COMPILING or is_compiled(anneal)


def compile_kernel(problem: OrderProblem, best: Incumbent) -> float:
    """Compile the kernel, or load it from disk; return the seconds on the clock that this took.

    These are some twenty where it was never compiled, else next to none.
    """
    # Its import costs more than a search that ends at its start.
    from debubble.search.annealing.order_chain import OrderChain

    begin = time.monotonic()
    OrderChain(problem, best, seed=0).advance(0, temperature=1.0, target=0.0)
    return time.monotonic() - begin


def improve(
    problem: OrderProblem,
    best: Incumbent,
    *,
    steps: int | None = None,
    effort: Effort | None = None,
    seed: int,
    workers: int = 1,
    hot: Sequence[float] = MILD_TEMPERATURES,
    coolings: Sequence[float] = COOLINGS,
    shares: Shares = FROM_SCRATCH,
) -> Iterator[Incumbent]:
    """Search locally from an incumbent, and yield what is better than all before it, until the steps are done.

    A search is coolings, each from the best of its chain.

    Args:
        problem: The operations to order.
        best: The start.
        steps: Moves of each chain; by default as many as the effort pays for.
        effort: Counter of the moves; endless by default.
        seed: The result depends on it, on the steps and on the number of chains alone.
        workers: Chains in parallel, which exchange their best after every burst.
        hot: Temperatures at which a cooling begins, in mean operation times, of the first chain, the second and so on
            in turn.
        coolings: Shares of the search at which a cooling begins; the last entry is where the last one ends.
        shares: How often which move is made.
    """
    from debubble.search.annealing.order_chain import OrderChain

    effort = effort or Effort(math.inf)
    pairs = problem.stages * problem.micro_batches
    price = price_of_move(
        pairs,
        recompute=problem.recompute,
        of_chunks=problem.placement.chunks > 1 and not problem.frees_memory,
    )
    steps = effort.moves(price) if steps is None else steps
    between = CHECK_RATIO * SIMULATION * pairs / price
    chains = [OrderChain(problem, best, seed=seed * 7919 + worker, shares=shares) for worker in range(workers)]
    done, simulated, before, agrees = 0, 0, best.seconds, False
    with ThreadPoolExecutor(workers) as pool:
        for begin, end in itertools.pairwise(coolings):
            for chain in chains:
                if chain.best > RESTART_RATIO * float(best.value):
                    chain.restart(best)
                else:
                    chain.go_back()
            while (spent := done / steps if done < steps else 1.0) < end and not effort.deadline.passed:
                cooled = (spent - begin) / (end - begin)
                count = max(1, int(min(BURST, steps - done, steps * (end - begin) / COOLING_STEPS)))
                target = float(best.bound)
                searches = [
                    pool.submit(
                        chain.advance, count, temperature=first * (LAST_TEMPERATURE / first) ** cooled, target=target
                    )
                    for chain, first in zip(chains, itertools.cycle(hot), strict=False)
                ]
                moves = [search.result() for search in searches]
                done += max(moves)
                effort.spend(max(moves) * price)
                # Chains in parallel exchange their best where a cooling ends.
                until = end if workers > 1 else 1
                goes_on = done / steps < until and min(moves) == count and not effort.deadline.passed
                if goes_on and agrees and done - simulated < between:
                    continue
                simulated = done
                for chain in chains:
                    schedule = chain.take_improvement() if chain.best < best.value else None
                    better = None if schedule is None else verify(problem, schedule, best, below=best.value)
                    if schedule is not None:
                        agrees = better is not None and math.isclose(chain.best, better.value)
                    if better is not None:
                        best = replace(better, source="search", steps=done, seconds=before + done * price)
                        yield best
                if best.optimal:
                    return


def verify(problem: OrderProblem, schedule: Schedule, best: Incumbent, *, below: Number) -> Incumbent | None:
    """Make an incumbent, with the bound of `best`, of a schedule that exact simulation finds to take less than `below`.

    None if it does not, or breaks a limit.
    """
    try:
        value = problem.value(schedule)
    except DebubbleError:
        return None
    return replace(best, schedule=schedule, value=value) if value < below else None


def _candidates(problem: OrderProblem, starts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield these starts, with their backwards split where that is allowed, and the constructed ones."""
    for start in starts:
        if problem.split and len(start.split_backward) < problem.stages * problem.micro_batches:
            yield start.with_split_backwards()
        yield start
    yield from initial_schedules(problem)
