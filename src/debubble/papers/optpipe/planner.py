"""OptPipe: the schedule with offload found by optimisation, and the paper's own integer program.

Source: OptPipe (anonymous, under review).  The paper solves a MILP with Gurobi from AdaOffload's schedule.

`optpipe` gives the same problem (stages x micro-batches, F, I, W, O, L, memory) to the engine of search/optimize.py:
cached and constructed schedules, local search, CP-SAT, and a bound on how far the schedule is from the best.  Beyond
the paper: several chunks per device, recomputation as a third way to free memory, link groups, and per-stage costs.

`milp` solves the MILP (`program/`) as sections 3 and 4 do.  The solver is Gurobi where it is licensed, else SCIP.  It
begins with the fastest published schedule that fits, AdaOffload's among them, and the triangles that its relaxation
violates are added as cuts.  The program orders one stage per device, moves activations and recomputes nothing; what
`optpipe` searches contains that, so that this planner is there to compare with, and for those who have Gurobi.

T_F, T_B, T_W are our forward, backward_input, backward_weight; T_comm is communication; T_offload is offload and
reload; Delta_F is activation, Delta_W is activation_after_input; Gamma is what O moves; M_limit is memory_limit less
static.
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
"""Share of time that the fastest start on some stages may take more than that on others: where nothing is moved no
search makes up for more, and its effort is better spent on the others."""


@planner("optpipe", paper="OptPipe", searches=True)
def optpipe(problem: Problem) -> Solution:
    """Search the order of all operations, what to offload and what to recompute, until it is proven or time is up."""
    effort, cached = problem.begun(), False
    chunks = problem.chunks or 1
    placements = dict.fromkeys(make(problem.devices, chunks) for make in (Placement.looped, Placement.v_shape))
    choices = [stages for placement in placements for stages in placed_stages(problem, placement)]
    beginnings: list[_Beginning] = []
    bounds: list[Number] = []
    reason: DebubbleError | None = None
    for rank, stages in enumerate(choices):
        try:
            share = effort.split_off(effort.remaining / (len(choices) - rank))
            beginnings.append(_Beginning.of(problem, stages, share))
        except InfeasibleError as error:
            reason = error
            bounds.append(0)
    if not beginnings:
        raise InfeasibleError(str(reason))
    beginnings.sort(key=lambda each: each.start.value)
    searched = [each for each in beginnings if each.may_be_best(beginnings[0].start.value)]
    bounds.extend(each.start.bound for each in beginnings if each not in searched)
    best, chosen = beginnings[0].start, beginnings[0].stages
    for rank, beginning in enumerate(searched):
        if rank and beginning.start.bound >= best.value:
            bounds.append(beginning.start.bound)
            continue
        candidate = beginning.search(problem, effort.split_off(effort.remaining / (len(searched) - rank)))
        cached = cached or beginning.cached
        bounds.append(candidate.bound)
        if candidate.value < best.value or not rank:
            best, chosen = candidate, beginning.stages
    # Another partition, or another number of chunks, may beat these bounds.
    bound = min(bounds) if isinstance(problem.workload, FixedStages) else 0
    remark = "its search began with a schedule from this machine's cache" if cached else None
    return replace(
        chosen.solution(best.schedule, lower_bound=bound), remark=remark, cut_off=effort.cut_off
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Beginning:
    """Stages with the fastest start on them."""

    stages: PlacedStages
    orders: OrderProblem
    start: Incumbent
    cached: bool
    """This machine's cache had a start for them."""

    @staticmethod
    def of(problem: Problem, stages: PlacedStages, effort: Effort) -> _Beginning:
        """Try the published schedules, the constructed ones and the cache's; raises InfeasibleError if none fits."""
        from debubble.search import cache
        from debubble.search.optimize import fastest_start

        orders = stages.order_problem(problem.micro_batches)
        cached = cache.nearest(orders, cache.folder()) if problem.cache else None
        published = initial(orders, effort)
        starts = published if cached is None else fastest_first(orders, [*published, cached])
        effort.spend(START_PRICE * orders.stages * orders.micro_batches * len(starts))
        start = fastest_start(orders, starts=starts, effort=effort.split_off(effort.remaining / 4))
        return _Beginning(stages, orders, start, cached is not None)

    def may_be_best(self, fastest: Number) -> bool:
        """Tell whether a search may end before one that begins at `fastest`."""
        return self.orders.offload or self.start.value <= (1 + MAX_START_GAP) * fastest

    def search(self, problem: Problem, effort: Effort) -> Incumbent:
        """Search the best order on these stages."""
        from debubble.search import cache
        from debubble.search.optimize import improve_start

        *_, last = improve_start(self.orders, self.start, effort=effort, seed=problem.seed)
        if problem.cache:
            cache.keep(self.orders, last)
        return last


@planner("milp", paper="OptPipe, sections 3 and 4", searches=True)
def milp(problem: Problem) -> Iterator[Solution]:
    """Solve OptPipe's mixed-integer program, from the fastest published schedule that fits.

    Raises InputError if it does not hold these costs, or is too large for the effort; InfeasibleError if micro-batches
    differ in length, or no schedule of it fits.
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
            for found, remark in _solve_milp(orders, effort.split_off(effort.remaining / (len(choices) - rank))):
                if best is not None and found.value > best.value:
                    continue
                best, solution = found, replace(_milp_solution(problem, stages, found), remark=remark)
                yield solution
        except InfeasibleError as error:
            reason = error
    if solution is None:
        raise InfeasibleError(str(reason))
    yield replace(solution, cut_off=effort.cut_off)


def _milp_solution(problem: Problem, stages: PlacedStages, best: Incumbent) -> Solution:
    """A schedule of the program as the planner's answer."""
    # Another partition may beat its bound, and so may recomputation or, with offload, micro-batches in another order.
    everything = isinstance(problem.workload, FixedStages) and not stages.order_problem(1).frees_memory
    return stages.solution(best.schedule, lower_bound=best.bound if everything else 0)


def _solve_milp(problem: OrderProblem, effort: Effort) -> Iterator[tuple[Incumbent, str]]:
    """Better and better schedules of the program, and what there is to say of each."""
    rows = _rows(problem)
    if ROW_PRICE * rows > effort.remaining:
        raise InputError(
            f"The MILP of {problem.devices} devices and {problem.micro_batches} micro-batches has about {rows:,} rows:"
            f" give each partition an --effort of {ROW_PRICE * rows:.0f}, or ask 'optpipe', which orders the same"
            " operations."
        )
    # They load the solvers.
    from debubble.papers.optpipe.program.milp import best_backend, milp_incumbents
    from debubble.papers.optpipe.program.milp_model import MilpModel, Reductions

    program, backend = MilpModel(problem, Reductions(triangles="lazy")), best_backend()
    start = next(iter(initial(problem, effort.split_off(0))), None)
    best: Incumbent | None = None
    for best in milp_incumbents(program, effort=effort, start=start, backend=backend):
        left = "proves that none of its orders is faster" if best.optimal else f"leaves a gap of {best.gap:.1%}"
        yield best, f"{backend} {left}, with {program.binaries} binary variables and {program.rows} rows"
    if best is None:
        raise InfeasibleError(f"{backend} found no schedule of the MILP with this effort; give it more.")


def _rows(problem: OrderProblem) -> int:
    """About how many rows the program of a problem has."""
    return (14 if problem.offload else 4) * problem.stages * problem.micro_batches**2
