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
import time
from collections.abc import Callable

from debubble.ir import DebubbleError, InfeasibleError, Schedule, StageCosts
from debubble.planners.orders import Setting, settings
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.solver.adaoffload import ada_offload, pipe_offload
from debubble.solver.problem import Incumbent


@planner("optpipe", paper="OptPipe", searches=True)
def optpipe(problem: Problem) -> Solution:
    """Search the order of all operations, what to offload and what to recompute, until it is proven or time is up."""
    left = problem.effort
    choices = list(settings(problem))
    best: tuple[Incumbent, Setting] | None = None
    reason: DebubbleError | None = None
    for rank, setting in enumerate(choices):
        begin, share = time.monotonic(), left / (len(choices) - rank)
        try:
            found = _ordered(problem, setting, seconds=share)
        except InfeasibleError as error:
            reason = error
            continue
        finally:
            # Compiling the kernel, once on a machine, does not count.
            left -= min(share, time.monotonic() - begin)
        if best is None or found.value < best[0].value:
            best = found, setting
    if best is None:
        raise InfeasibleError(str(reason))
    incumbent, setting = best
    # Another partition, or another number of chunks, may beat this one's bound.
    bound = incumbent.bound if problem.costs is not None else 0
    return setting.solution(incumbent.schedule, lower_bound=bound)


def _ordered(problem: Problem, setting: Setting, *, seconds: float) -> Incumbent:
    from debubble.solver.optimize import optimize

    orders = setting.order_problem(problem.micro_batches)
    *_, last = optimize(orders, starts=_starts(problem, setting), deadline=seconds, seed=problem.seed)
    return last


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
