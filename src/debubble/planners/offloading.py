"""PipeOffload and AdaOffload as planners: the schedules of `schedules/offloading.py` for every partition that is tried.

Sources: Wan et al., PipeOffload, ICML 2025; OptPipe, appendix D.
"""

from __future__ import annotations

from debubble.ir import InfeasibleError, Schedule
from debubble.planners.orders import Setting, best_of, with_offload
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules import schedules


@planner("pipeoffload", paper="PipeOffload, ICML 2025")
def pipeoffload(problem: Problem) -> Solution:
    """Offload the longest-lived activations, as many as the memory limit asks for."""

    def build(setting: Setting) -> Schedule:
        return schedules["pipeoffload"](
            devices=problem.devices, micro_batches=problem.micro_batches, chunks=setting.placement.chunks,
            costs=with_offload(setting), objective=problem.objective,
        )  # fmt: skip

    return best_of(problem, build)


@planner("adaoffload", paper="OptPipe, appendix D")
def adaoffload(problem: Problem) -> Solution:
    """PipeOffload with a denser fill phase, and PipeOffload where that is no faster."""

    def build(setting: Setting) -> Schedule:
        if setting.placement.chunks > 1:
            raise InfeasibleError("AdaOffload holds one stage per device; ask for one chunk.")
        return schedules["adaoffload"](
            devices=problem.devices, micro_batches=problem.micro_batches, costs=with_offload(setting),
            objective=problem.objective,
        )  # fmt: skip

    return best_of(problem, build)
