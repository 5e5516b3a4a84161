"""What each operation costs: its time and what it does to memory (design section 3)."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.ir.costs import Number, StageCosts
from debubble.ir.ops import Kind, Lane, Op
from debubble.ir.program import Moment
from debubble.ir.schedule import Schedule


def duration(schedule: Schedule, costs: StageCosts, op: Op, lane: Lane) -> Number:
    """Time of an operation on its lane."""
    kind, stage, j = op
    scale = costs.scale_of(j)
    match kind:
        case Kind.F:
            return costs.forward[stage] * scale
        case Kind.B | Kind.I:
            time = costs.backward(stage) if kind is Kind.B else costs.backward_input[stage]
            if stage in schedule.fused_recompute and (stage, j) not in schedule.explicit_recompute:
                time += schedule.recompute_time(costs, stage)
            return time * scale
        case Kind.W:
            return costs.backward_weight[stage] * scale
        case Kind.R:
            return schedule.recompute_time(costs, stage) * scale
        case Kind.O | Kind.L:
            times = costs.offload if kind is Kind.O else costs.reload
            assert times is not None
            return times[stage] * moved_share(schedule, costs, stage, j) * scale
        case Kind.S:
            return (costs.host_step if lane is Lane.HOST else costs.optimizer_step)[stage]
        case Kind.G:
            return costs.gradient_reduce[stage]
        case Kind.D:
            return costs.gradient_offload[stage]
        case Kind.P:
            return costs.parameter_load[stage]
        case Kind.SEND_F:
            return costs.communication[stage] * scale
        case Kind.SEND_B:
            return costs.communication[stage - 1] * scale
        case Kind.RECV_F | Kind.RECV_B:
            return 0


def moved_share(schedule: Schedule, costs: StageCosts, stage: int, j: int) -> Number:
    """Share of the whole activation that O moves: its times are given for the whole."""
    share = schedule.offload_fraction.get(stage, 1)
    if schedule.recomputes(stage, j) and costs.activation[stage]:
        kept = schedule.kept(costs, stage, j)
        return share if kept == costs.activation[stage] else share * kept / costs.activation[stage]
    return share


def change(schedule: Schedule, costs: StageCosts, op: Op) -> tuple[Number, Number]:
    """(bytes allocated at the start, bytes freed at the end) of an operation on its own device."""
    kind, stage, j = op
    scale = costs.scale_of(j)
    activation = costs.activation[stage] * scale
    match kind:
        case Kind.F:
            return schedule.kept(costs, stage, j) * scale, 0
        case Kind.R:
            return activation - schedule.kept(costs, stage, j) * scale, 0
        case Kind.O:
            return 0, schedule.moved(costs, stage, j) * scale
        case Kind.L:
            return schedule.moved(costs, stage, j) * scale, 0
        case Kind.B:
            restored = _restored(schedule, costs, op) * scale
            return restored, _held(schedule, costs, stage, j) * scale + restored
        case Kind.I:
            restored = _restored(schedule, costs, op) * scale
            held = _held(schedule, costs, stage, j) * scale + restored
            remaining = costs.activation_after_input[stage] * scale
            return restored + max(remaining - held, 0), max(held - remaining, 0)
        case Kind.W:
            return 0, costs.activation_after_input[stage] * scale
        case _:
            return 0, 0


def _held(schedule: Schedule, costs: StageCosts, stage: int, j: int) -> Number:
    """Bytes that are there when the backward starts: all after an R, else what F kept."""
    if (stage, j) in schedule.explicit_recompute:
        return costs.activation[stage]
    return schedule.kept(costs, stage, j)


def _restored(schedule: Schedule, costs: StageCosts, op: Op) -> Number:
    """Bytes that a fused recomputation brings back at a time, before `micro_batch_scale`."""
    kind, stage, j = op
    if stage not in schedule.fused_recompute or (stage, j) in schedule.explicit_recompute:
        return 0
    dropped = costs.activation[stage] - schedule.kept(costs, stage, j)
    workspace = costs.recompute_workspace
    if kind is Kind.I and costs.recompute_workspace_input is not None:
        workspace = costs.recompute_workspace_input
    return dropped if workspace is None else min(workspace[stage], dropped)


def effects(schedule: Schedule, costs: StageCosts, op: Op) -> Iterator[tuple[int, Moment, Number]]:
    """Every change of memory that an operation makes, as (device, moment, change)."""
    device = schedule.placement.device_of[op.stage]
    allocated, freed = change(schedule, costs, op)
    if allocated:
        yield device, Moment.START, allocated
    if freed:
        yield device, Moment.END, -freed
    host = schedule.peers.get(device)
    if host is not None and op.kind is Kind.O:
        yield host, Moment.START, freed
    if host is not None and op.kind is Kind.L:
        yield host, Moment.END, -allocated


def guests(schedule: Schedule, costs: StageCosts) -> dict[int, Number]:
    """The most that each device ever holds for its peers, in bytes."""
    most: dict[int, Number] = {}
    for owner, host in schedule.peers.items():
        held: Number = 0
        peak: Number = 0
        for op in schedule.orders[owner]:
            allocated, freed = change(schedule, costs, op)
            if op.kind is Kind.O:
                held += freed
                peak = max(peak, held)
            elif op.kind is Kind.L:
                held -= allocated
        most[host] = most.get(host, 0) + peak
    return most
