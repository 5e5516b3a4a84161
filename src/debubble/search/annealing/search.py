"""The anytime search: initial schedules, then local search, until the bound is met or the steps are done."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from debubble.ir import DebubbleError, InfeasibleError, Number, Schedule
from debubble.kernels import MAX_COMPILE_SECONDS, is_compiled
from debubble.search.annealing.layout import FROM_SCRATCH, Shares
from debubble.search.bounds import lower_bound
from debubble.search.constructive.initial import initial_schedules
from debubble.search.effort import SIMULATION_PRICE, START_PRICE, Deadline, Effort, price_of_move
from debubble.search.problem import Incumbent, OrderProblem

MAX_BURST_MOVES = 2000
"""Maximum number of moves between two exchanges of the chains."""
MILD_TEMPERATURES, HOT_TEMPERATURES = (0.05, 0.075), (0.15, 0.1)
"""Initial temperatures of a cooling, in mean operation times, which chains use alternately.  Mild ones preserve a good
start; hot ones are more reliable if there is time to cool slowly."""
FINAL_TEMPERATURE = 0.005
"""Temperature at which every cooling ends."""
COOLINGS = (0.0, 0.03, 0.1, 0.3, 1.0)
"""Fractions of the search at which coolings begin: short ones for easy problems, then a slow one."""
MIN_COOLING_STEPS = 16
"""Minimum number of temperatures of a cooling."""
CHECK_RATIO = 10
"""Work between two checks of improvements by simulation, as a multiple of a simulation, once one has agreed with the
chain.  Improvements are also checked at the end of the search, and with parallel chains at the end of each cooling."""
RESTART_RATIO = 1.005
"""A chain restarts from the global best if its own is more than 0.5% worse; closer ones continue independently, as any
of them may get stuck."""


def search(
    problem: OrderProblem, *, starts: Iterable[Schedule] = (), steps: int = 50 * MAX_BURST_MOVES, seed: int = 0
) -> Iterator[Incumbent]:
    """Search a problem; yields improving schedules, each with its exact objective and a lower bound.

    Args:
        problem: The operations to order.
        starts: Schedules to improve, in addition to the constructed ones.
        steps: Number of moves.
        seed: Random seed; the result depends only on it and the steps.

    Returns:
        The stream of incumbents; it ends when the bound is met or the steps are done.

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
    """Simulate the starts, then the constructed schedules; yields each one that is better than all before.

    Stops once the effort is spent and a start has been found.  `bound` is a known lower bound.  Raises InfeasibleError
    if no start fits the memory limit.
    """
    bound = max(bound, lower_bound(problem))
    best: Incumbent | None = None
    failure: DebubbleError | None = None
    for candidate in _candidates(problem, starts):
        if best is not None and effort.over:
            break
        effort.spend(START_PRICE * problem.stages * problem.micro_batches)
        try:
            value = problem.value(candidate)
        except DebubbleError as error:
            failure = error
            continue
        if best is None or value < best.value:
            best = Incumbent(schedule=candidate, value=value, bound=bound, source="start", seconds=effort.spent)
            yield best
            if best.optimal:
                return
    if best is None:
        # The last candidate needs the least memory.
        raise InfeasibleError(f"No order of operations was found that fits. {failure}")


def may_compile(deadline: Deadline) -> bool:
    """Tell whether the kernel is cached on disk or there is time to compile it."""
    # This import takes longer than a search that ends at its start.
    from debubble.search.annealing.moves import anneal

    return deadline.remaining > MAX_COMPILE_SECONDS or is_compiled(anneal)


def compile_kernel(problem: OrderProblem, best: Incumbent) -> float:
    """Compile the kernel, or load it from disk; returns the wall-clock seconds this took.

    These are about twenty if it was never compiled, else nearly zero.
    """
    # This import takes longer than a search that ends at its start.
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
    temperatures: Sequence[float] = MILD_TEMPERATURES,
    coolings: Sequence[float] = COOLINGS,
    shares: Shares = FROM_SCRATCH,
) -> Iterator[Incumbent]:
    """Run local search from an incumbent until the steps are done; yields each incumbent better than all before.

    A search consists of coolings, each from the best of its chain.

    Args:
        problem: The operations to order.
        best: The initial incumbent.
        steps: Moves of each chain; by default as many as the effort pays for.
        effort: Budget that the moves are counted in; unlimited by default.
        seed: Random seed; the result depends only on it, the steps and the number of chains.
        workers: Number of parallel chains, which exchange their best after every burst.
        temperatures: Initial temperatures of coolings, in mean operation times, which the chains use cyclically.
        coolings: Fractions of the search at which coolings begin; the last entry is the end of the last one.
        shares: Shares of the kinds of moves.
    """
    from debubble.search.annealing.order_chain import OrderChain

    effort = effort or Effort(math.inf)
    pairs = problem.stages * problem.micro_batches
    of_chunks = problem.placement.chunks > 1 and not problem.frees_memory
    price = price_of_move(pairs, recompute=problem.recompute, of_chunks=of_chunks)
    steps = effort.moves(price) if steps is None else steps
    check_interval = CHECK_RATIO * SIMULATION_PRICE * pairs / price
    chains = [OrderChain(problem, best, seed=seed * 7919 + worker, shares=shares) for worker in range(workers)]
    done, simulated, initial_seconds, agrees = 0, 0, best.seconds, False
    with ThreadPoolExecutor(workers) as pool:
        for begin, end in itertools.pairwise(coolings):
            for chain in chains:
                if chain.best > RESTART_RATIO * float(best.value):
                    chain.restart(best)
                else:
                    chain.return_to_best()
            while (progress := done / steps if done < steps else 1.0) < end and not effort.deadline.passed:
                cooled = (progress - begin) / (end - begin)
                count = max(1, int(min(MAX_BURST_MOVES, steps - done, steps * (end - begin) / MIN_COOLING_STEPS)))
                target = float(best.bound)
                searches = [
                    pool.submit(
                        chain.advance,
                        count,
                        temperature=initial * (FINAL_TEMPERATURE / initial) ** cooled,
                        target=target,
                    )
                    for chain, initial in zip(chains, itertools.cycle(temperatures), strict=False)
                ]
                moves = [search.result() for search in searches]
                done += max(moves)
                effort.spend(max(moves) * price)
                # Parallel chains exchange their best at the end of a cooling.
                check_end = end if workers > 1 else 1
                continues = done / steps < check_end and min(moves) == count and not effort.deadline.passed
                if continues and agrees and done - simulated < check_interval:
                    continue
                simulated = done
                for chain in chains:
                    schedule = chain.take_improvement() if chain.best < best.value else None
                    better = None if schedule is None else verify(problem, schedule, best, below=best.value)
                    if schedule is not None:
                        agrees = better is not None and math.isclose(chain.best, better.value)
                    if better is not None:
                        best = replace(better, source="search", steps=done, seconds=initial_seconds + done * price)
                        yield best
                if best.optimal:
                    return


def verify(problem: OrderProblem, schedule: Schedule, best: Incumbent, *, below: Number) -> Incumbent | None:
    """Simulate a schedule; returns it as an incumbent with the bound of `best` if it takes less than `below`.

    None if it does not, or exceeds a limit.
    """
    try:
        value = problem.value(schedule)
    except DebubbleError:
        return None
    return replace(best, schedule=schedule, value=value) if value < below else None


def _candidates(problem: OrderProblem, starts: Iterable[Schedule]) -> Iterator[Schedule]:
    """The starts, first with their backwards split if the problem allows it, then the constructed schedules."""
    for start in starts:
        if problem.split and len(start.split_backward) < problem.stages * problem.micro_batches:
            yield start.with_split_backwards()
        yield start
    yield from initial_schedules(problem)
