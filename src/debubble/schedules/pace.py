"""When the operations of a schedule start and end: the longest path through F, I and W alone.

What `simulate` finds for schedules without transfers and limits where messages are latency, at a tenth of its work.
"""

from __future__ import annotations

from debubble.ir import Kind, Number, Op, Schedule, StageCosts
from debubble.simulator import simulate

Times = dict[Op, Number]


def paced(schedule: Schedule, costs: StageCosts) -> tuple[Times, Times]:
    """Start and end of every operation of a schedule of F, I and W, whatever the memory limit."""
    if costs.communication_model == "latency":
        return _longest_path(schedule, costs)
    timeline = simulate(schedule, costs.with_limit(None))
    operations = [o for lane in timeline.compute for o in lane]
    return {o.op: o.start for o in operations}, {o.op: o.end for o in operations}


def _longest_path(schedule: Schedule, costs: StageCosts) -> tuple[Times, Times]:
    placement, orders = schedule.placement, schedule.orders
    last, device_of = placement.stages - 1, placement.device_of
    scale = [costs.scale_of(j) for j in range(schedule.micro_batches)]
    times = {Kind.F: costs.forward, Kind.I: costs.backward_input, Kind.W: costs.backward_weight}
    message = [0 if device_of[s] == device_of[s + 1] else costs.communication[s] for s in range(last)]
    starts: Times = {}
    ends: Times = {}
    at = [0] * len(orders)
    free: list[Number] = [0] * len(orders)
    waiting: dict[Op, int] = {}
    active = list(range(len(orders)))
    while active:
        d = active.pop()
        order = orders[d]
        while at[d] < len(order):
            op = order[at[d]]
            kind, s, j = op
            start = free[d]
            if (kind is Kind.F and s) or (kind is Kind.I and s < last):
                # W follows its I, and the last I its F, on the same device.
                before = Op(kind, s - 1 if kind is Kind.F else s + 1, j)
                if before not in ends:
                    waiting[before] = d
                    break
                start = max(start, ends[before] + message[min(s, before.stage)] * scale[j])
            starts[op] = start
            ends[op] = free[d] = start + times[kind][s] * scale[j]
            at[d] += 1
            if op in waiting:
                active.append(waiting.pop(op))
    return starts, ends
