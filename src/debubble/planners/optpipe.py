"""OptPipe: the schedule with offload found by optimisation, with a bound on how far it is from the best.

Source: OptPipe (anonymous, under review).  The paper solves a MILP with Gurobi from AdaOffload's schedule; here the
same problem (stages x micro-batches, F, I, W, O, L, memory) goes to the engine of solver/optimize.py: cached and
constructed schedules, local search, CP-SAT.  Beyond the paper: several chunks per device, recomputation as a third way
to free memory, link groups, and per-stage costs.  The MILP itself is solver/milp.py.

T_F, T_B, T_W are our forward, backward_input, backward_weight; T_comm is communication; T_offload is offload and
reload; Delta_F is activation, Delta_W is activation_after_input; Gamma is what O moves; M_limit is memory_limit less
static.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from debubble.ir import DebubbleError, InfeasibleError, Schedule, StageCosts
from debubble.planners.orders import Setting, settings
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.solver.adaoffload import ada_offload, pipe_offload
from debubble.solver.effort import START, Effort
from debubble.solver.problem import Incumbent


@planner("optpipe", paper="OptPipe", searches=True)
def optpipe(problem: Problem) -> Solution:
    """Search the order of all operations, what to offload and what to recompute, until it is proven or time is up."""
    effort, cached = problem.begun(), False
    choices = list(settings(problem))
    best: tuple[Incumbent, Setting] | None = None
    reason: DebubbleError | None = None
    for rank, setting in enumerate(choices):
        try:
            found, from_cache = _ordered(problem, setting, effort.part(effort.left / (len(choices) - rank)))
        except InfeasibleError as error:
            reason = error
            continue
        cached = cached or from_cache
        if best is None or found.value < best[0].value:
            best = found, setting
    if best is None:
        raise InfeasibleError(str(reason))
    incumbent, setting = best
    # Another partition, or another number of chunks, may beat this one's bound.
    bound = incumbent.bound if problem.costs is not None else 0
    remark = "its search began with a schedule from this machine's cache" if cached else None
    return replace(
        setting.solution(incumbent.schedule, lower_bound=bound), remark=remark, cut_off=effort.cut_off
    )  # fmt: skip


def _ordered(problem: Problem, setting: Setting, effort: Effort) -> tuple[Incumbent, bool]:
    """The best order of a setting, and whether the cache had a start for it."""
    from debubble.solver import cache
    from debubble.solver.optimize import optimize

    orders, starts = setting.order_problem(problem.micro_batches), _starts(problem, setting)
    cached = cache.nearest(orders, cache.folder()) if problem.cache else None
    starts += [] if cached is None else [cached]
    effort.spend(START * orders.stages * orders.micro_batches * len(starts))
    *_, last = optimize(orders, starts=starts, effort=effort, seed=problem.seed)
    if problem.cache:
        cache.keep(orders, last)
    return last, cached is not None


def _starts(problem: Problem, setting: Setting) -> list[Schedule]:
    """The paper's initial solutions, where they apply."""
    if setting.costs.offload is None or setting.placement.chunks > 1:
        return []
    return initial(setting.costs, problem.micro_batches)


def initial(costs: StageCosts, micro_batches: int) -> list[Schedule]:
    """AdaOffload, PipeOffload, and the zero-bubble order that moves nothing, as far as they fit."""
    rules: tuple[Callable[[], Schedule], ...] = (
        lambda: ada_offload(costs, micro_batches),
        lambda: pipe_offload(costs, micro_batches),
        lambda: schedules["zb"](devices=costs.stages, micro_batches=micro_batches, costs=costs, steps=0),
    )
    found: list[Schedule] = []
    for rule in rules:
        with contextlib.suppress(InfeasibleError):
            found.append(rule())
    return found
