"""OptPipe: the schedule with offload found by optimisation, with a bound on how far it is from the best.

Source: OptPipe (anonymous, under review).  The paper solves a MILP with Gurobi from AdaOffload's schedule; here the
same problem (stages x micro-batches, F, I, W, O, L, memory) goes to the engine of search/optimize.py: cached and
constructed schedules, local search, CP-SAT.  Beyond the paper: several chunks per device, recomputation as a third way
to free memory, link groups, and per-stage costs.  The MILP itself is search/exact/milp.py.

T_F, T_B, T_W are our forward, backward_input, backward_weight; T_comm is communication; T_offload is offload and
reload; Delta_F is activation, Delta_W is activation_after_input; Gamma is what O moves; M_limit is memory_limit less
static.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, Schedule
from debubble.planners.offload import PlacedStages, placed_stages
from debubble.planners.problem import FixedStages, Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.search.bounds import lower_bound
from debubble.search.effort import BUILT, DISPATCHED, SEARCHED, START, Effort
from debubble.search.problem import Incumbent, OrderProblem

TRIED = 12
"""Schedules that are built and simulated for the starts of one stage per device, at most about."""
IN_LOOP = ("interleaved", "interleaved-less-memory", "group-interleaved", "breadth-first")
IN_V = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules of several chunks that move and recompute nothing, by their placement."""
FAR = 0.05
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
            beginnings.append(_Beginning.of(problem, stages, effort.part(effort.left / (len(choices) - rank))))
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
        candidate = beginning.search(problem, effort.part(effort.left / (len(searched) - rank)))
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
        cached = cache.nearest_of_any_length(orders, cache.folder(), effort=effort) if problem.cache else None
        published = initial(orders, effort)
        starts = published if cached is None else _fastest_first(orders, [*published, cached])
        effort.spend(START * orders.stages * orders.micro_batches * len(starts))
        start = fastest_start(orders, starts=starts, effort=effort.part(effort.left / 4))
        return _Beginning(stages, orders, start, cached is not None)

    def may_be_best(self, fastest: Number) -> bool:
        """Tell whether a search may end before one that begins at `fastest`."""
        return self.orders.offload or self.start.value <= (1 + FAR) * fastest

    def search(self, problem: Problem, effort: Effort) -> Incumbent:
        """Search the best order on these stages."""
        from debubble.search import cache
        from debubble.search.optimize import improve_start

        *_, last = improve_start(self.orders, self.start, effort=effort, seed=problem.seed)
        if problem.cache:
            cache.keep(self.orders, last)
        return last


def initial(problem: OrderProblem, effort: Effort) -> list[Schedule]:
    """The published schedules that answer the problem, fastest first: no search from them ends behind one of them.

    With a link to the host they are PipeOffload and, for one stage per device, AdaOffload; with or without a link, `zb`
    for one stage per device and those in IN_LOOP and IN_V for several, which move nothing.  None of them recomputes or
    moves parts of activations.  Where more effort is left than that takes, `zb` searches its own order too, as that
    schedule does by default, unless the bound of orders that move nothing says that it cannot be the fastest start.
    """
    if problem.fused_recompute or problem.offload_fraction or problem.asynchronous:
        return []
    linear = problem.placement == Placement.linear(problem.devices)
    build = partial(_built, problem)
    schedules_built: list[Schedule | None] = []
    names = IN_LOOP if problem.placement == Placement.looped(problem.devices, problem.placement.chunks) else IN_V
    effort.spend(
        START * problem.stages * problem.micro_batches * TRIED if linear else sum(_price(problem, n) for n in names)
    )
    if problem.offload and problem.placement == Placement.looped(problem.devices, problem.placement.chunks):
        schedules_built.append(build("pipeoffload", chunks=problem.placement.chunks))
    if problem.offload and linear:
        schedules_built.append(build("adaoffload"))
    if linear:
        schedules_built.append(build("zb", steps=0))
    else:
        published = (build(name, chunks=problem.placement.chunks) for name in names)
        schedules_built.extend(made for made in published if made is not None and made.placement == problem.placement)
    starts = _fastest_first(problem, filter(None, schedules_built))
    moves_nothing = lower_bound(replace(problem, offload=False, recompute=False))
    if linear and effort.left > SEARCHED and (not starts or problem.value(starts[0]) > moves_nothing):
        effort.spend(SEARCHED)
        starts = _fastest_first(problem, filter(None, (*starts, build("zb"))))
    return starts


def _price(problem: OrderProblem, name: str) -> float:
    """Effort of building a schedule of the library."""
    once, per_pair = DISPATCHED if "tries" in schedules[name].options else BUILT
    return once + per_pair * problem.stages * problem.micro_batches


def _fastest_first(problem: OrderProblem, candidates: Iterable[Schedule]) -> list[Schedule]:
    """The candidates that fit, by their value."""
    values: list[tuple[Number, Schedule]] = []
    for schedule in candidates:
        with contextlib.suppress(DebubbleError):
            values.append((problem.value(schedule), schedule))
    return [schedule for _, schedule in sorted(values, key=lambda entry: entry[0])]


def _built(problem: OrderProblem, name: str, **options: Any) -> Schedule | None:
    """A schedule of the library for the problem; None if it does not fit, or has another number of chunks."""
    entry = schedules[name]
    given = entry.accepted_options(objective=problem.objective, **options)
    if "chunks" not in entry.options and problem.placement.chunks != entry.default_chunks:
        return None
    try:
        return entry(
            devices=problem.devices, micro_batches=problem.micro_batches, costs=problem.costs, **given
        )  # fmt: skip
    except InfeasibleError:
        return None
