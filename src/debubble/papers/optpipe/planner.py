"""OptPipe: search for the best schedule with activation offload, and the paper's MILP.

Source: OptPipe (anonymous, under review).  The paper solves a MILP with Gurobi, warm-started from AdaOffload.

`optpipe` solves the same problem (stages x micro-batches, F, I, W, O, L, memory) with the engine of search/optimize.py:
cached and constructed schedules, local search, CP-SAT, and a lower bound.  Beyond the paper it supports several chunks
per device, recomputation as a third way to free memory, link groups, and per-stage costs.

`milp` solves the MILP (`program/`) as in sections 3 and 4, with Gurobi where it is licensed, else SCIP.  It starts from
the fastest published schedule that fits, AdaOffload's among them, and adds triangle inequality cuts that the LP
relaxation violates.  The MILP has one stage per device and no recomputation, so its schedules are a subset of those of
`optpipe`: this planner serves for comparison, and for users of Gurobi.

T_F, T_B, T_W are our forward, backward_input, backward_weight; T_comm is communication; T_offload is offload and
reload; Delta_F is activation, Delta_W is activation_after_input; Gamma is the bytes that O moves; M_limit is
memory_limit minus static.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from debubble.ir import DebubbleError, InfeasibleError, InputError, Number, Placement
from debubble.planners.baselines.pipeoffload import PlacedStages, placed_stages
from debubble.planners.initial_schedules import fastest_first, initial
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.planners.registry import planner
from debubble.search.effort import ROW_PRICE, START_PRICE, Effort
from debubble.search.problem import Incumbent, OrderProblem

MAX_START_GAP = 0.05
"""Stages are searched only if their initial schedule is at most this fraction slower than the fastest one.  Without
offload no search gained more; the effort is better spent on the other stages."""


@planner("optpipe", paper="OptPipe", searches=True)
def optpipe(problem: Problem) -> Solution:
    """Search operation order, offload and recomputation until optimality is proven or the effort is spent."""
    effort, cached = problem.begun(), False
    chunks = problem.chunks or 1
    placements = dict.fromkeys(make(problem.devices, chunks) for make in (Placement.looped, Placement.v_shape))
    choices = [stages for placement in placements for stages in placed_stages(problem, placement)]
    candidates: list[_StartedStages] = []
    bounds: list[Number] = []
    reason: DebubbleError | None = None
    for rank, stages in enumerate(choices):
        try:
            candidates.append(
                _StartedStages.begin(problem, stages, effort.split_off(effort.remaining / (len(choices) - rank)))
            )
        except InfeasibleError as error:
            reason = error
            bounds.append(0)
    if not candidates:
        raise InfeasibleError(str(reason))
    candidates.sort(key=lambda candidate: candidate.start.value)
    searched = [candidate for candidate in candidates if candidate.may_be_best(candidates[0].start.value)]
    bounds.extend(candidate.start.bound for candidate in candidates if candidate not in searched)
    best, chosen = candidates[0].start, candidates[0].stages
    for rank, candidate in enumerate(searched):
        if rank and candidate.start.bound >= best.value:
            bounds.append(candidate.start.bound)
            continue
        incumbent = candidate.search(problem, effort.split_off(effort.remaining / (len(searched) - rank)))
        cached = cached or candidate.cached
        bounds.append(incumbent.bound)
        if incumbent.value < best.value or not rank:
            best, chosen = incumbent, candidate.stages
    # Another partition, or another number of chunks, may beat these bounds.
    bound = min(bounds) if isinstance(problem.workload, FixedStages) else 0
    remark = "its search began with a schedule from this machine's cache" if cached else None
    return replace(
        chosen.solution(best.schedule, lower_bound=bound), remark=remark, cut_off=effort.cut_off
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _StartedStages:
    """Stages on devices with their initial solution."""

    stages: PlacedStages
    orders: OrderProblem
    start: Incumbent
    cached: bool
    """Whether this machine's cache had a schedule for them."""

    @staticmethod
    def begin(problem: Problem, stages: PlacedStages, effort: Effort) -> _StartedStages:
        """Try published, constructed and cached schedules.  Raises InfeasibleError if none fits."""
        from debubble.search import cache
        from debubble.search.optimize import fastest_start

        orders = stages.order_problem(problem.micro_batches)
        cached = cache.nearest(orders, cache.folder()) if problem.cache else None
        published = initial(orders, effort)
        starts = published if cached is None else fastest_first(orders, [*published, cached])
        effort.spend(START_PRICE * orders.stages * orders.micro_batches * len(starts))
        start = fastest_start(orders, starts=starts, effort=effort.split_off(effort.remaining / 4))
        return _StartedStages(stages, orders, start, cached is not None)

    def may_be_best(self, fastest: Number) -> bool:
        """Tell whether a search from here may beat one that starts from a step time of `fastest`."""
        return self.orders.offload or self.start.value <= (1 + MAX_START_GAP) * fastest

    def search(self, problem: Problem, effort: Effort) -> Incumbent:
        """Improve the initial solution on these stages, and cache the result."""
        from debubble.search import cache
        from debubble.search.optimize import improve_start

        *_, last = improve_start(self.orders, self.start, effort=effort, seed=problem.seed)
        if problem.cache:
            cache.keep(self.orders, last)
        return last


@planner("milp", paper="OptPipe, sections 3 and 4", searches=True)
def milp(problem: Problem) -> Iterator[Solution]:
    """Solve OptPipe's MILP, starting from the fastest published schedule that fits.

    Raises InputError if it does not model these costs, or is too large for the effort; InfeasibleError if micro-batches
    differ in length, or no schedule fits.
    """
    if isinstance(problem.workload, ModelUnits) and problem.workload.units.micro_batch_scale is not None:
        raise InfeasibleError("The MILP has micro-batches of one length; 'optpipe' orders those of several.")
    effort = problem.begun()
    choices = list(placed_stages(problem))
    best: Incumbent | None = None
    solution: Solution | None = None
    reason: InfeasibleError | None = None
    for rank, stages in enumerate(choices):
        orders = replace(stages.order_problem(problem.micro_batches), recompute=False)
        try:
            for incumbent, remark in _solve_milp(orders, effort.split_off(effort.remaining / (len(choices) - rank))):
                if best is not None and incumbent.value > best.value:
                    continue
                best, solution = incumbent, replace(_milp_solution(problem, stages, incumbent), remark=remark)
                yield solution
        except InfeasibleError as error:
            reason = error
    if solution is None:
        raise InfeasibleError(str(reason))
    yield replace(solution, cut_off=effort.cut_off)


def _milp_solution(problem: Problem, stages: PlacedStages, best: Incumbent) -> Solution:
    """Convert a schedule of the MILP to a solution of the problem."""
    # Another partition may beat its bound, and so may recomputation or, with offload, micro-batches in another order.
    bound_holds = isinstance(problem.workload, FixedStages) and not stages.order_problem(1).frees_memory
    return stages.solution(best.schedule, lower_bound=best.bound if bound_holds else 0)


def _solve_milp(problem: OrderProblem, effort: Effort) -> Iterator[tuple[Incumbent, str]]:
    """Improving schedules of the MILP, each with the plan's remark."""
    rows = _estimated_rows(problem)
    if ROW_PRICE * rows > effort.remaining:
        raise InputError(
            f"The MILP of {problem.devices} devices and {problem.micro_batches} micro-batches has about {rows:,} rows:"
            f" give each partition an --effort of {ROW_PRICE * rows:.0f}, or ask 'optpipe', which orders the same"
            " operations."
        )
    # Imported here because these modules load the solvers.
    from debubble.papers.optpipe.program.milp import best_backend, milp_incumbents
    from debubble.papers.optpipe.program.milp_model import MilpModel, Reductions

    program, backend = MilpModel(problem, Reductions(triangles="lazy")), best_backend()
    start = next(iter(initial(problem, effort.split_off(0))), None)
    best: Incumbent | None = None
    for best in milp_incumbents(program, effort=effort, start=start, backend=backend):
        result = "proves that none of its orders is faster" if best.optimal else f"leaves a gap of {best.gap:.1%}"
        yield best, f"{backend} {result}, with {program.binaries} binary variables and {program.rows} rows"
    if best is None:
        raise InfeasibleError(f"{backend} found no schedule of the MILP with this effort; give it more.")


def _estimated_rows(problem: OrderProblem) -> int:
    """Estimated number of rows of the MILP."""
    return (14 if problem.offload else 4) * problem.stages * problem.micro_batches**2
