"""PipeOffload as a planner: every activation goes to the host, and comes back just before its backward.

Source: Wan et al., PipeOffload, ICML 2025, as OptPipe (section 4.1.3) uses it: F, O, L and a backward in one piece, in
1F1B's order.  With several chunks per device its own interleaved order (schedules/pipeoffload.py) is tried beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from debubble.ir import Schedule
from debubble.planners.orders import Setting, best_of, with_offload
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules
from debubble.solver.adaoffload import pipe_offload


@planner("pipeoffload", paper="PipeOffload, ICML 2025")
def pipeoffload(problem: Problem) -> Solution:
    """Offload every activation, whatever the limit, and reload it just in time."""

    def rules(setting: Setting) -> Sequence[Callable[[], Schedule]]:
        costs = with_offload(setting)
        chunks = setting.placement.chunks
        if chunks == 1:
            return [partial(pipe_offload, costs, problem.micro_batches)]
        interleaved = partial(
            schedules["pipeoffload"], devices=problem.devices, micro_batches=problem.micro_batches, chunks=chunks,
            costs=costs,
        )  # fmt: skip
        return [partial(interleaved, offload=offload) for offload in ("half", "full")]

    return best_of(problem, rules)
