"""AdaOffload as a planner: as many forwards before the first backward as memory and the link to the host let in.

Source: OptPipe, appendix D; see solver/adaoffload.py for the algorithm as it is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from debubble.ir import InfeasibleError, Schedule
from debubble.planners.orders import Setting, best_of, with_offload
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.solver.adaoffload import ada_offload, pipe_offload


@planner("adaoffload", paper="OptPipe, appendix D")
def adaoffload(problem: Problem) -> Solution:
    """PipeOffload with a denser fill phase, and PipeOffload where that does not fit."""

    def rules(setting: Setting) -> Sequence[Callable[[], Schedule]]:
        if setting.placement.chunks > 1:
            raise InfeasibleError("AdaOffload holds one stage per device; ask for one chunk.")
        costs = with_offload(setting)
        return [partial(rule, costs, problem.micro_batches) for rule in (pipe_offload, ada_offload)]

    return best_of(problem, rules)
