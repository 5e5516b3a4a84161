"""`joint`: partition, chunks, placement, recomputation, offload, steps on the host and order, all in one search.

Not from a paper.  The published planners use some levers each: OptPipe orders and offloads, SCOPE partitions and
recomputes, ChronosPipe chooses what recomputes and what goes to the host.  Here a point is a choice of all of them
at once (`levers.py`), and a compiled list scheduler (`list_scheduling`) orders and prices it in a fraction of a
millisecond.  For each number of chunks, looped and in V, random points come first; the best continue by simulated
annealing (`chain.py`, compiled in `annealing_kernel.py`).  Single units of the best plans recompute less
(`refinement.py`), and their order is searched (`orders.py`) by the engine of `search/`, where recomputation is an
operation of its own, for each micro-batch or not.  Where the gap stays wide, as memory is short, chains go on longer
and orders are searched more briefly.  Two chains go in parallel, on the two cores that efforts are counted in.  Every
schedule that counts is lowered under the limit and simulated exactly.

Where as many stages on every device cannot share out the units evenly, as a bound says, they are assigned freely too
(`assignment.py`), and where a job is too large for chains, that is the answer.

Half-layers are not cut, a stage's units share one price of recomputation, and of its activations it offloads quarters.
Backwards are split everywhere.  Points are scored by makespans with messages
that overlap computing, also where the span counts or messages block; the plans that are kept are simulated as asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Number
from debubble.planners.bounds.proven import assigns_freely, bound_of_equal_counts, proven_bound
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.registry import planner

MOST_CHUNKS = 6
"""Stages per device that its search tries at most."""
MOST_PAIRS = 25_000
"""Pairs of a stage and a micro-batch up to which chains score points enough to find anything."""
UNEVEN = 1.005
"""Times the bound on all assignments, from which the bound on equal counts says that others are worth trying."""
ASSIGNMENT_SHARE = 0.25
"""The part of the effort in which they are tried."""


@planner("joint", paper="debubble's own", searches=True)
def joint(problem: Problem) -> Iterator[Solution]:
    """Search partition, chunks, recomputation, offload and order together."""
    yield from _solutions(problem, draft=False)


def joint_draft(problem: Problem) -> Iterator[Solution]:
    """The answers of `joint` before its long search of one order, for callers that compare others with them first."""
    yield from _solutions(problem, draft=True)


def _solutions(problem: Problem, *, draft: bool) -> Iterator[Solution]:
    if not isinstance(problem.workload, ModelUnits):
        raise InfeasibleError("Stages that are given leave the order to choose alone, which `optpipe` searches.")
    units = problem.workload.units
    stages = problem.devices * (problem.chunks or min(MOST_CHUNKS, len(units.units) // problem.devices))
    if stages * problem.micro_batches > MOST_PAIRS:
        yield _of_large_job(problem, units)
        return
    # It loads the compiler, which nobody needs who only lists planners.
    from debubble.planners.joint.search import search

    find = partial(search, draft=draft)
    if not _may_assign(problem, units) or not _is_uneven(problem):
        yield from find(problem, units)
        return
    yield from _faster(problem, units, find)


def _of_large_job(problem: Problem, units: Units) -> Solution:
    """The units assigned freely.  Raises InfeasibleError if that is not open."""
    from debubble.planners.joint.assignment import assign

    if not _may_assign(problem, units):
        raise InfeasibleError(
            f"More than {MOST_PAIRS:,} pairs of a stage and a micro-batch are too many for its chains: `portfolio`"
            " plans such jobs, and `joint` assigns units freely where several devices hold whole parameters, all"
            " micro-batches have one length and neither a number of chunks nor a target is given."
        )
    return assign(problem, units)


def _faster(
    problem: Problem, units: Units, search: Callable[[Problem, Units], Iterator[Solution]]
) -> Iterator[Solution]:
    """Units assigned freely, and then what a search over equal counts finds that is faster."""
    from debubble.planners.joint.assignment import assign

    best: Number = math.inf
    reason: DebubbleError | None = None
    try:
        solution = assign(replace(problem, effort=ASSIGNMENT_SHARE * problem.effort), units)
        best = problem.step_time(solution.simulate())
        yield solution
    except DebubbleError as error:
        reason = error
    try:
        for solution in search(replace(problem, effort=(1 - ASSIGNMENT_SHARE) * problem.effort), units):
            time = problem.step_time(solution.simulate())
            if time < best:
                best = time
                yield solution
    except DebubbleError:
        if reason is not None:
            raise


def _may_assign(problem: Problem, units: Units) -> bool:
    """Tell whether devices may have unlike numbers of stages, as a search of assignments has them.

    Devices that gather parameters do so for every stage, and an assignment is judged by micro-batches that are alike.
    """
    return problem.devices > 1 and problem.equally_long and assigns_freely(problem) and not units.gathers


def _is_uneven(problem: Problem) -> bool:
    """Tell whether as many stages on every device cannot share out the units as evenly as others."""
    least = proven_bound(problem).time
    return bound_of_equal_counts(problem, known_bound=least) > UNEVEN * float(least)
