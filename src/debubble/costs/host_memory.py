"""Memory of the hosts that a plan uses: offloaded activations, and the optimizer states of stages that hosts step."""

from __future__ import annotations

from debubble.costs.units import Partition, Units
from debubble.formatting import size_words
from debubble.ir import InfeasibleError, Kind
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import CODE
from debubble.simulator import Timeline


def host_peaks(units: Units, partition: Partition, timeline: Timeline) -> list[float]:
    """The most that each device has on its host at a time.

    An activation is there from the start of its offload to the end of its reload; what a peer device takes is not.
    Optimizer states are there throughout, beside a copy of the gradients and of the weights.

    Args:
        units: The model's units.
        partition: How they form the stages.
        timeline: The simulated step.

    Returns:
        Bytes per device.
    """
    program = timeline.program
    schedule, costs = program.schedule, OpCosts.of(program.schedule, program.costs)
    moved: list[list[tuple[float, float]]] = [[] for _ in range(schedule.devices)]
    if (schedule.arrays.kind == CODE[Kind.O]).any():
        for operation in timeline.operations:
            if operation.op.kind is Kind.O and operation.device not in schedule.peers:
                moved[operation.device].append((float(operation.start), float(costs.frees(operation.op))))
            elif operation.op.kind is Kind.L and operation.device not in schedule.peers:
                moved[operation.device].append((float(operation.end), -float(costs.allocates(operation.op))))
    peaks = []
    for device, changes in enumerate(moved):
        held = [stage for stage in schedule.placement.stages_of[device] if stage in schedule.host_steps]
        states = sum(_states(units, partition, stage) for stage in held)
        most = now = 0.0
        # At one instant, frees come before allocations.
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        peaks.append(states + most)
    return peaks


def check_host_memory(units: Units, partition: Partition, timeline: Timeline) -> None:
    """Refuse a plan that keeps more on a host than there is for a device; raises InfeasibleError."""
    limit = units.host_memory
    if limit is None:
        return
    peaks = host_peaks(units, partition, timeline)
    device, most = max(enumerate(peaks), key=lambda peak: peak[1])
    if most > limit:
        raise InfeasibleError(
            f"Device {device} keeps {size_words(most)} on its host, which has {size_words(limit)} for it: plan with"
            " less offload, or say in a cluster file how much there is (host_memory).",
            missing=most - float(limit),
        )


def _states(units: Units, partition: Partition, stage: int) -> float:
    chosen = [units.units[index] for index, _ in partition[stage]]
    optimizer = sum(float(unit.states.optimizer) for unit in chosen if unit.states)
    return optimizer + sum(float(unit.on_host.gradients + unit.on_host.parameters) for unit in chosen if unit.on_host)
