"""Chronos-Offload: the optimizer states of the deep chunks are offloaded and their step runs on the CPU.

Source: ChronosPipe, section 5.  Deep chunks finish their backward passes first and start their forward passes last.
The bubbles of the cool-down hide the offload of their gradients (D) and the CPU step (S), together T_step / 2p, those
of the next warm-up the upload of the 16-bit weights (P), T_upload / 2p.  6 of 18 bytes per parameter stay on device.

Activations can be offloaded concurrently: Chronos-Offload uses D2H only in the cool-down, H2D only in the warm-up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from debubble.ir import InputError, Kind, Lane, Number, Op, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.simulator import Timeline

DEVICE_BYTES, STATE_BYTES = 6, 18
"""Bytes per parameter: parameter (2) and gradient (4); these, the master weight (4) and two moments (8)."""


def offload_states(schedule: Schedule, *, chunks: Collection[int]) -> Schedule:
    """Offload the states of these chunks: P before their first forward, D and S after their last backward.

    Raises InputError if a chunk does not exist.
    """
    if not set(chunks) <= set(range(schedule.placement.chunks)):
        count = schedule.placement.chunks
        raise InputError(f"Chunks {sorted(chunks)} cannot be offloaded: there are {count}, from 0 on.")
    return schedule.with_host_steps({stages[chunk] for stages in schedule.placement.stages_of for chunk in chunks})


def offload_activations(schedule: Schedule, *, chunks: Collection[int], costs: StageCosts) -> Schedule:
    """Offload these chunks' activations right after their forward, and reload them just in time.

    A reload is issued as many operations ahead as its time requires.  Raises InputError if the costs have no `offload`.
    """
    if costs.reload is None:
        raise InputError("Offloading activations needs costs with an 'offload' time.")
    orders, op_costs = [], OpCosts.from_schedule(schedule, costs)
    for device_stages, order in zip(schedule.placement.stages_of, schedule.orders, strict=True):
        moved = {device_stages[chunk] for chunk in chunks}
        extended: list[Op] = []
        for op in order:
            stage, j = op.stage, op.micro_batch
            if stage in moved and op.kind is (Kind.R if (stage, j) in schedule.explicit_recompute else Kind.B):
                lead = op_costs.lead(op, explicit=op.kind is Kind.R)
                index = _reload_index(extended, Op(Kind.O, stage, j), costs.reload[stage] - lead, costs)
                extended.insert(index, Op(Kind.L, stage, j))
            extended.append(op)
            if stage in moved and op.kind is Kind.F:
                extended.append(Op(Kind.O, stage, j))
        orders.append(tuple(extended))
    return replace(schedule, orders=tuple(orders))


def _reload_index(order: list[Op], offload: Op, time: Number, costs: StageCosts) -> int:
    """The last index after `offload` from which the remaining compute operations take at least `time`."""
    index = len(order)
    while time > 0 and order[index - 1] != offload:
        index -= 1
        kind, stage, _ = order[index]
        if kind is Kind.F:
            time -= costs.forward[stage]
        elif kind is Kind.B:
            time -= costs.backward(stage)
    # A reload may start together with the compute operation before it in the list.
    return min(index + 1, len(order))


def step_window(timeline: Timeline, *, device: int, chunk: int) -> Number:
    """Idle compute time of a device in the cool-down, after its last backward of `chunk`: the window of D and S."""
    stage = timeline.program.schedule.placement.stages_of[device][chunk]
    ended = max(o.end for o in timeline.compute[device] if o.op.stage == stage and o.op.kind is Kind.B)
    later = [o for o in timeline.compute[device] if o.start >= ended]
    return max((o.end for o in later), default=ended) - ended - sum(o.duration for o in later)


def upload_window(timeline: Timeline) -> Number:
    """Idle compute time of device 0 in the warm-up, before its first forward of chunk 1: the window of P."""
    stage = timeline.program.schedule.placement.stages_of[0][1]
    begun = min(o.start for o in timeline.compute[0] if o.op.stage == stage and o.op.kind is Kind.F)
    earlier = [o for o in timeline.compute[0] if o.end <= begun]
    return begun - min((o.start for o in earlier), default=begun) - sum(o.duration for o in earlier)


def available_offload(devices: int) -> int:
    """T_available_offload of equation (4), in backwards of one chunk: device 0's idle time after chunk 1."""
    return devices - max(0, -(-(2 * devices - 3) // 6)) - 1


def available_upload(devices: int) -> int:
    """T_available_upload of equation (6), in forwards of one chunk: device 0's idle time before chunk 1."""
    return devices - max(0, -(-(devices - 3) // 6)) - 1


def hidden_share(timeline: Timeline) -> float:
    """The fraction of chunk 1's D and S that fits into the cool-down's idle time: the minimum over devices.

    Conditions (5) and (7) hold if this is 1 and P fits into `upload_window`.
    """
    shares = []
    for device, device_stages in enumerate(timeline.program.schedule.placement.stages_of):
        needed = sum(
            o.duration
            for o in timeline.operations
            if o.op.stage == device_stages[1] and o.lane in (Lane.D2H, Lane.HOST) and o.op.kind in (Kind.D, Kind.S)
        )
        window = step_window(timeline, device=device, chunk=1)
        shares.append(min(1.0, float(window / needed)) if needed else 1.0)
    return min(shares)
