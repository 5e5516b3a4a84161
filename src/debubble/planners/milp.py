"""OptPipe's mixed-integer program as the paper solves it: a MILP solver that begins with a published schedule.

Source: OptPipe (anonymous, under review), sections 3 and 4.  The solver is Gurobi where it is licensed, else SCIP.  It
begins with the fastest published schedule that fits, AdaOffload's among them, and the triangles that its relaxation
violates are added as cuts.  The program orders one stage per device, moves activations and recomputes nothing; what
`optpipe` searches contains that, so that this planner is there to compare with, and for those who have Gurobi.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.ir import InfeasibleError, InputError
from debubble.planners.offload import PlacedStages, placed_stages
from debubble.planners.optpipe import initial
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import planner
from debubble.search.effort import ROW, Effort
from debubble.search.problem import Incumbent, OrderProblem


@planner("milp", paper="OptPipe, sections 3 and 4", searches=True)
def milp(problem: Problem) -> Solution:
    """Solve OptPipe's mixed-integer program, from the fastest published schedule that fits.

    Raises InputError if it does not hold these costs, or is too large for the effort; InfeasibleError if micro-batches
    differ in length, or no schedule of it fits.
    """
    if isinstance(problem.workload, ModelUnits) and problem.workload.units.micro_batch_scale is not None:
        raise InfeasibleError("The MILP has micro-batches of one length; 'optpipe' orders those of several.")
    effort = problem.begun()
    choices = list(placed_stages(problem))
    found: list[tuple[Incumbent, PlacedStages, str]] = []
    reason: InfeasibleError | None = None
    for rank, stages in enumerate(choices):
        orders = replace(stages.order_problem(problem.micro_batches), recompute=False)
        try:
            best, remark = _solve(orders, effort.part(effort.left / (len(choices) - rank)))
        except InfeasibleError as error:
            reason = error
            continue
        found.append((best, stages, remark))
    if not found:
        raise InfeasibleError(str(reason))
    best, stages, remark = min(found, key=lambda entry: entry[0].value)
    # Another partition may beat its bound, and so may recomputation.
    everything = isinstance(problem.workload, FixedStages) and not stages.order_problem(1).recompute
    solution = stages.solution(best.schedule, lower_bound=best.bound if everything else 0)
    return replace(solution, remark=remark, cut_off=effort.cut_off)


def _solve(problem: OrderProblem, effort: Effort) -> tuple[Incumbent, str]:
    """The best schedule of the program, and what there is to say of it."""
    rows = _rows(problem)
    if ROW * rows > effort.left:
        raise InputError(
            f"The MILP of {problem.devices} devices and {problem.micro_batches} micro-batches has about {rows:,} rows:"
            f" give each partition an --effort of {ROW * rows:.0f}, or ask 'optpipe', which orders the same"
            " operations."
        )
    # They load the solvers.
    from debubble.search.exact.milp import best_backend, milp_incumbents
    from debubble.search.exact.milp_model import MilpModel, Reductions

    program, backend = MilpModel(problem, Reductions(triangles="lazy")), best_backend()
    start = next(iter(initial(problem, effort.part(0))), None)
    stream = list(milp_incumbents(program, effort=effort, start=start, backend=backend))
    if not stream:
        raise InfeasibleError(f"{backend} found no schedule of the MILP with this effort; give it more.")
    best = stream[-1]
    left = "proves that none of its orders is faster" if best.optimal else f"leaves a gap of {best.gap:.1%}"
    return best, f"{backend} {left}, with {program.binaries} binary variables and {program.rows} rows"


def _rows(problem: OrderProblem) -> int:
    """About how many rows the program of a problem has."""
    return (14 if problem.offload else 4) * problem.stages * problem.micro_batches**2
