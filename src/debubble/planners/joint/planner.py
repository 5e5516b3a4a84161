"""`joint`: partition, chunks, placement, recomputation, offload, steps on the host and order, all in one search.

Not from a paper.  The published planners use some levers each: OptPipe orders and offloads, SCOPE partitions and
recomputes, ChronosPipe chooses what recomputes and what goes to the host.  Here a point is a choice of all of them
at once (`levers.py`), and a compiled list scheduler (`list_scheduler.py`) orders and prices it in a fraction of a
millisecond.  For each number of chunks, looped and in V, random points come first; the best go on by simulated
annealing (`annealing.py`, compiled in `walk.py`).  Single units of the best plans recompute less
(`refinement.py`), and their order is searched by the engine of `search/`, where recomputation is an operation of its
own, for each micro-batch or not.  Two walks go side by side, on the two cores that efforts are counted in.
Every schedule that counts is lowered under the limit and simulated exactly.

Half-layers are not cut, a stage's units share one price of recomputation, and of its activations it offloads quarters.
Backwards are split everywhere.  Points are scored by makespans with messages
that overlap computing, also where the span counts or messages block; the plans that are kept are simulated as asked.
"""

from __future__ import annotations

from debubble.ir import InfeasibleError
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.registry import planner


@planner("joint", paper="debubble's own", searches=True)
def joint(problem: Problem) -> Solution:
    """Search partition, chunks, recomputation, offload and order together."""
    if not isinstance(problem.workload, ModelUnits):
        raise InfeasibleError("Stages that are given leave the order to choose alone, which `optpipe` searches.")
    if problem.workload.units.micro_batch_scale is not None:
        raise InfeasibleError("Micro-batches of different lengths are not searched jointly.")
    # It loads the compiler, which nobody needs who only lists planners.
    from debubble.planners.joint.search import search

    return search(problem, problem.workload.units)
