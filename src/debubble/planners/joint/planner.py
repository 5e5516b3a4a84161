"""`joint`: one search over partition, chunks, placement, recomputation, offload, steps on the host and order.

It is not from a paper.  Published planners use a subset of these levers: OptPipe orders and offloads, SCOPE partitions
and recomputes, ChronosPipe chooses what to recompute and what to offload.  Here a point sets all of them at once
(`levers.py`), and a compiled list scheduler (`list_scheduling`) orders and scores it in a fraction of a millisecond.
The search draws random points for each number of chunks, looped and V-shaped, and continues from the best ones by
simulated annealing (`chain.py`, compiled in `annealing_kernel.py`).  Then single units of the best plans recompute less
(`refinement.py`), and `orders.py` searches their order with the engine of `search/`, where recomputation is a separate
operation, chosen per micro-batch.  If the gap to the bound stays wide because memory is short, the chains get more of
the effort and the order searches less.  Two chains run in parallel, on the two cores in which effort is counted.  Every
reported schedule is lowered under the memory limit and simulated exactly.

If a bound shows that equal stage counts per device cannot balance the units, `assignment.py` also assigns them freely;
for jobs too large for chains, that assignment is the answer.

Layers are not cut, all units of a stage share one price of recomputation, and activations are offloaded in quarters.
All backwards are split.  Points are scored by makespans with messages that overlap computation, even where the
objective is the span or messages block; the reported plans are simulated as requested.
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

MAX_CHUNKS = 6
"""Upper limit on stages per device."""
MAX_PAIRS = 25_000
"""Jobs with more pairs of a stage and a micro-batch are not annealed: chains would score too few points."""
MIN_IMBALANCE = 1.005
"""Free assignment is tried if the bound on equal stage counts exceeds the bound on all assignments by this factor."""
ASSIGNMENT_SHARE = 0.25
"""Fraction of the effort spent on free assignment."""


@planner("joint", paper="debubble's own", searches=True)
def joint(problem: Problem) -> Iterator[Solution]:
    """Search partition, chunks, recomputation, offload and order together."""
    yield from _solutions(problem, draft=False)


def joint_draft(problem: Problem) -> Iterator[Solution]:
    """The answers of `joint` without its final order search, for callers that compare planners before it."""
    yield from _solutions(problem, draft=True)


def _solutions(problem: Problem, *, draft: bool) -> Iterator[Solution]:
    if not isinstance(problem.workload, ModelUnits):
        raise InfeasibleError("Stages that are given leave the order to choose alone, which `optpipe` searches.")
    units = problem.workload.units
    stages = problem.devices * (problem.chunks or min(MAX_CHUNKS, len(units.units) // problem.devices))
    if stages * problem.micro_batches > MAX_PAIRS:
        yield _solution_of_large_job(problem, units)
        return
    # This loads the compiler, which listing the planners does not need.
    from debubble.planners.joint.search import search

    find = partial(search, draft=draft)
    if not _may_assign(problem, units) or not _is_uneven(problem):
        yield from find(problem, units)
        return
    yield from _assigned_then_searched(problem, units, find)


def _solution_of_large_job(problem: Problem, units: Units) -> Solution:
    """Assign the units freely.  Raises InfeasibleError if the problem does not allow it."""
    from debubble.planners.joint.assignment import assign

    if not _may_assign(problem, units):
        raise InfeasibleError(
            f"More than {MAX_PAIRS:,} pairs of a stage and a micro-batch are too many for its chains: `portfolio`"
            " plans such jobs, and `joint` assigns units freely where several devices hold whole parameters, all"
            " micro-batches have one length and neither a number of chunks nor a target is given."
        )
    return assign(problem, units)


def _assigned_then_searched(
    problem: Problem, units: Units, search: Callable[[Problem, Units], Iterator[Solution]]
) -> Iterator[Solution]:
    """Yield the free assignment, then faster solutions with equal stage counts."""
    from debubble.planners.joint.assignment import assign

    best: Number = math.inf
    failure: DebubbleError | None = None
    try:
        solution = assign(replace(problem, effort=ASSIGNMENT_SHARE * problem.effort), units)
        best = problem.step_time(solution.simulate())
        yield solution
    except DebubbleError as error:
        failure = error
    try:
        for solution in search(replace(problem, effort=(1 - ASSIGNMENT_SHARE) * problem.effort), units):
            time = problem.step_time(solution.simulate())
            if time < best:
                best = time
                yield solution
    except DebubbleError:
        if failure is not None:
            raise


def _may_assign(problem: Problem, units: Units) -> bool:
    """Tell whether the problem allows different numbers of stages per device.

    Assignments require equal micro-batches and devices that gather no parameters.
    """
    return problem.devices > 1 and problem.equally_long and assigns_freely(problem) and not units.gathers


def _is_uneven(problem: Problem) -> bool:
    """Tell whether equal stage counts per device balance the units worse than other assignments."""
    bound = proven_bound(problem).time
    return bound_of_equal_counts(problem, known_bound=bound) > MIN_IMBALANCE * float(bound)
