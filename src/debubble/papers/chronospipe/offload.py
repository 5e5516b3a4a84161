"""Chronos-Offload: hosts keep and step the optimizer states of the deep chunks, which are needed last and done first.

Source: ChronosPipe, section 5.  A deep chunk's optimizer states and step are the host's: its gradients go down (D)
and its step runs (S) in the bubbles of the cool-down, its 16-bit parameters come up (P) in those of the next warm-up.
Of 18 bytes per parameter 6 stay on the device: 2 of the parameter, 4 of the gradient.

Activations can be offloaded next to it: Chronos-Offload uses the link down only in the cool-down, up only in the
warm-up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from debubble.ir import InputError, Kind, Lane, Number, Op, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.simulator import Timeline

KEPT_BYTES, STATE_BYTES = 6, 18
"""Per parameter: parameter (2) and gradient (4); these, the master copy (4) and two moments (8)."""


def offload_states(made: Schedule, *, chunks: Collection[int]) -> Schedule:
    """Step these chunks on the host: P before their first forward, D and S after their last backward.

    Raises InputError if the schedule has fewer chunks.
    """
    if not set(chunks) <= set(range(made.placement.chunks)):
        raise InputError(f"Chunks {sorted(chunks)} cannot be offloaded: there are {made.placement.chunks}, from 0 on.")
    return made.with_host_steps({stages[chunk] for stages in made.placement.stages_of for chunk in chunks})


def offload_activations(made: Schedule, *, chunks: Collection[int], costs: StageCosts) -> Schedule:
    """Move these chunks' activations to the host right after their forward, and back just in time.

    A reload is issued as many operations ahead as its time needs.  Raises InputError if the costs have no `offload`.
    """
    if costs.reload is None:
        raise InputError("Offloading activations needs costs with an 'offload' time.")
    orders, op_costs = [], OpCosts.from_schedule(made, costs)
    for device_stages, order in zip(made.placement.stages_of, made.orders, strict=True):
        moved = {device_stages[chunk] for chunk in chunks}
        extended: list[Op] = []
        for op in order:
            stage, j = op.stage, op.micro_batch
            if stage in moved and op.kind is (Kind.R if (stage, j) in made.explicit_recompute else Kind.B):
                lead = op_costs.lead(op, explicit=op.kind is Kind.R)
                at = _ahead(extended, Op(Kind.O, stage, j), costs.reload[stage] - lead, costs)
                extended.insert(at, Op(Kind.L, stage, j))
            extended.append(op)
            if stage in moved and op.kind is Kind.F:
                extended.append(Op(Kind.O, stage, j))
        orders.append(tuple(extended))
    return replace(made, orders=tuple(orders))


def _ahead(order: list[Op], offload: Op, time: Number, costs: StageCosts) -> int:
    """The latest place after `offload` from which the operations that follow take at least `time`."""
    at = len(order)
    while time > 0 and order[at - 1] != offload:
        at -= 1
        kind, stage, _ = order[at]
        if kind is Kind.F:
            time -= costs.forward[stage]
        elif kind is Kind.B:
            time -= costs.backward(stage)
    # A reload may start together with the compute operation before it in the list.
    return min(at + 1, len(order))


def step_window(timeline: Timeline, *, device: int, chunk: int) -> Number:
    """Idle compute time of a device in the cool-down, after its last backward of `chunk`: what D and S fit into."""
    stage = timeline.program.schedule.placement.stages_of[device][chunk]
    ended = max(o.end for o in timeline.compute[device] if o.op.stage == stage and o.op.kind is Kind.B)
    later = [o for o in timeline.compute[device] if o.start >= ended]
    return max((o.end for o in later), default=ended) - ended - sum(o.duration for o in later)


def upload_window(timeline: Timeline) -> Number:
    """Idle compute time of device 0 in the warm-up, before its first forward of chunk 1: what P fits into."""
    stage = timeline.program.schedule.placement.stages_of[0][1]
    begun = min(o.start for o in timeline.compute[0] if o.op.stage == stage and o.op.kind is Kind.F)
    earlier = [o for o in timeline.compute[0] if o.end <= begun]
    return begun - min((o.start for o in earlier), default=begun) - sum(o.duration for o in earlier)


def available_offload(devices: int) -> int:
    """Equation (4) for v = 2 and b = 2 f, in backwards of one chunk: device 0's idle time after chunk 1."""
    return devices - max(0, -(-(2 * devices - 3) // 6)) - 1


def available_upload(devices: int) -> int:
    """Equation (6) for v = 2 and b = 2 f, in forwards of one chunk: device 0's idle time before chunk 1."""
    return devices - max(0, -(-(devices - 3) // 6)) - 1


def hidden_share(timeline: Timeline) -> float:
    """The share of D and S of chunk 1 that fits into the cool-down's idle time, on the device where it is least.

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
