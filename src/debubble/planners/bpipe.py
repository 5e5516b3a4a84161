"""BPipe: 1F1B whose early stages keep activations on the late ones, recomputing MLPs only if that does not suffice.

Source: Kim et al., BPipe, ICML 2023; with the MLP recomputation that Obscura (USENIX ATC 2025) compares with.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.ir import InfeasibleError
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, peer_bandwidth
from debubble.planners.registry import planner
from debubble.schedules.bpipe import bpipe as bpipe_schedule
from debubble.simulator import simulate


@planner("bpipe", paper="BPipe, ICML 2023", peers=True)
def bpipe(problem: Problem) -> Solution:
    """1F1B on the even partition, early stages keeping activations on late ones; MLP recomputation only if needed."""
    keeping, recomputing = bpipe_variants(problem)
    try:
        simulate(keeping.schedule, keeping.costs)
    except InfeasibleError:
        return recomputing
    return keeping


def bpipe_variants(problem: Problem) -> tuple[Solution, Solution]:
    """BPipe without and with MLP recomputation; fixed stages recompute wholly or not.

    Activations move over the link between devices.  Its bandwidth follows from the time of a message, which is the
    input that fully recomputing units keep; fixed stages use their offload times.
    """
    stages = Stages.even(problem)
    schedule = bpipe_schedule(devices=problem.devices, micro_batches=problem.micro_batches)
    mlp = "full" if isinstance(problem.workload, FixedStages) else "mlp"
    keeping, recomputing = (
        _between_devices(problem, stages.solution(schedule, stages.named(strategy))) for strategy in ("none", mlp)
    )
    return keeping, recomputing


def _between_devices(problem: Problem, solution: Solution) -> Solution:
    """The solution with the transfer times of the link between devices."""
    costs = solution.costs
    match problem.workload:
        case FixedStages():
            if costs.offload is None:
                raise InfeasibleError("BPipe moves activations between devices; the costs have no 'offload' time.")
            return solution
        case ModelUnits(units):
            pace = 1 / peer_bandwidth(units) if units.communication else 0
            return replace(solution, costs=costs.replace(offload=[pace * a for a in costs.activation], reload=None))
