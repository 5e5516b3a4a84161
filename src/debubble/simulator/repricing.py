"""The planners' fast path: one schedule's order under many different costs.

Lowering fixes which operation waits for which; as long as the order stays and nothing is offloaded, other costs
change only durations and sizes.  `Repricer` lowers once, then prices costs with two array passes: about a million
operations a second and more with numba, the same results without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble.ir import Kind, Lane, Moment, Number, Schedule, StageCosts, lower
from debubble.ir.graph import deadlock, predecessors, topological_order
from debubble.simulator.engine import simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Price:
    """What a schedule costs: times in the costs' unit, peaks in bytes per device."""

    makespan: float
    span: float
    peak_memory: tuple[float, ...]


class Repricer:
    """Prices one order of operations.  Raises DeadlockError if the order cannot run at all."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._exact = bool(schedule.offloaded) or any(op.kind is Kind.S for op in schedule.operations)
        if not self._exact:
            self._structure = _Structure(schedule)

    def price(self, costs: StageCosts, *, fused_recompute: frozenset[int] | None = None) -> Price:
        """Makespan, span and peaks under these costs, whatever their memory limit.

        `fused_recompute` replaces the schedule's.
        """
        schedule = self.schedule
        if fused_recompute is not None:
            schedule = replace(schedule, fused_recompute=fused_recompute)
        if self._exact or costs.communication_model == "blocking":
            timeline = simulate(schedule, costs.with_limit(None))
            return Price(float(timeline.makespan), float(timeline.span), tuple(map(float, timeline.peak_memory)))
        return self._structure.price(schedule, costs)

    def peak_memory(self, costs: StageCosts, *, fused_recompute: frozenset[int]) -> tuple[float, ...]:
        """Per device, the most bytes at any instant; without offload the order alone decides."""
        if self._exact:
            return self.price(costs, fused_recompute=fused_recompute).peak_memory
        return self._structure.peaks(replace(self.schedule, fused_recompute=fused_recompute), costs)


class _Structure:
    """A lowered Program's edges and operations as arrays."""

    def __init__(self, schedule: Schedule) -> None:
        # Exclusive links keep all edges; `price` ignores the messages' order under the latency model.
        program = lower(schedule, StageCosts.of(stages=schedule.stages, communication_model="exclusive"))
        instructions = program.instructions
        before = predecessors(program)
        order = topological_order(before)
        if len(order) < len(before):
            raise deadlock(program, before, order)
        self.order = np.array(order, dtype=np.int64)
        self.first = np.cumsum([0, *map(len, before)], dtype=np.int64)
        flat = [edge for edges in before for edge in edges]
        self.other = np.array([other for other, _ in flat], dtype=np.int64)
        self.on_start = np.array([moment is Moment.START for _, moment in flat], dtype=np.bool_)
        message = np.array([i.lane in (Lane.SEND, Lane.RECV) for i in instructions], dtype=np.bool_)
        after = np.repeat(np.arange(len(before)), np.diff(self.first))
        sends = np.array([i.lane is Lane.SEND for i in instructions], dtype=np.bool_)
        receives = message & ~sends
        self.queued = (sends[self.other] & sends[after]) | (receives[self.other] & receives[after])
        self.kind = np.array([_CODES[i.op.kind] for i in instructions], dtype=np.int64)
        self.stage = np.array([i.op.stage for i in instructions], dtype=np.int64)
        self.micro_batch = np.array([i.op.micro_batch for i in instructions], dtype=np.int64)
        self.device = np.array([i.device for i in instructions], dtype=np.int64)
        self.compute = np.array([i.lane is Lane.COMPUTE for i in instructions], dtype=np.bool_)
        self.lists = [
            np.array([program.index[op] for op in device_order], dtype=np.int64) for device_order in schedule.orders
        ]
        self.explicit = np.zeros((schedule.stages, schedule.micro_batches), dtype=np.bool_)
        for stage, j in schedule.explicit_recompute:
            self.explicit[stage, j] = True

    def price(self, schedule: Schedule, costs: StageCosts) -> Price:
        scale = self._scale(schedule, costs)
        durations = _times(schedule, costs)[self.kind, self._mode(schedule), self.stage] * scale
        asynchronous = costs.communication_model == "latency"
        skip = self.queued if asynchronous else np.zeros_like(self.queued)
        starts, ends = _longest_path()(self.order, self.first, self.other, self.on_start, skip, durations)
        span = 0.0
        for device in range(schedule.devices):
            mine = self.compute & (self.device == device)
            span = max(span, float(ends[mine].max() - starts[mine].min()))
        return Price(float(ends.max()), span, self.peaks(schedule, costs))

    def peaks(self, schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
        scale = self._scale(schedule, costs)
        allocated, freed = _sizes(schedule, costs)
        at = (self.kind, self._mode(schedule), self.stage)
        allocations, frees = allocated[at] * scale, freed[at] * scale
        peaks = []
        for device, indices in enumerate(self.lists):
            change = allocations[indices]
            held = np.cumsum(change) - np.concatenate(([0.0], np.cumsum(frees[indices])[:-1]))
            peaks.append(float(costs.static_of(device)) + max(0.0, float(held.max())))
        return tuple(peaks)

    def _mode(self, schedule: Schedule) -> Ints:
        """How each operation's stage and micro-batch recompute: 0 not, 1 fused, 2 explicitly."""
        fused = np.zeros(schedule.stages, dtype=np.int64)
        fused[list(schedule.fused_recompute)] = 1
        mode: Ints = np.where(self.explicit[self.stage, self.micro_batch], 2, fused[self.stage])
        return mode

    def _scale(self, schedule: Schedule, costs: StageCosts) -> Any:
        if costs.micro_batch_scale is None:
            return 1.0
        return np.array(costs.micro_batch_scale, dtype=np.float64)[self.micro_batch]


_CODES = {kind: code for code, kind in enumerate(Kind)}


def _times(schedule: Schedule, costs: StageCosts) -> Floats:
    """Duration by [kind, mode of recomputation, stage]."""
    table = np.zeros((len(_CODES), 3, schedule.stages))
    recompute = np.array([schedule.recompute_time(costs, s) for s in range(schedule.stages)], dtype=np.float64)
    forward, backward_input, backward_weight, communication = (
        np.array(values, dtype=np.float64)
        for values in (costs.forward, costs.backward_input, costs.backward_weight, costs.communication)
    )
    table[_CODES[Kind.F]] = forward
    table[_CODES[Kind.B]] = backward_input + backward_weight
    table[_CODES[Kind.I]] = backward_input
    table[_CODES[Kind.W]] = backward_weight
    table[_CODES[Kind.R]] = recompute
    table[_CODES[Kind.B], 1] += recompute
    table[_CODES[Kind.I], 1] += recompute
    table[_CODES[Kind.SEND_F]] = communication
    table[_CODES[Kind.SEND_B], :, 1:] = communication[:-1]
    for kind, values in ((Kind.G, costs.gradient_reduce), (Kind.P, costs.parameter_load)):
        table[_CODES[kind]] = np.array(values, dtype=np.float64)
    return table


def _sizes(schedule: Schedule, costs: StageCosts) -> tuple[Floats, Floats]:
    """Bytes allocated at the start and freed at the end, by [kind, mode of recomputation, stage]."""
    allocated, freed = np.zeros((2, len(_CODES), 3, schedule.stages))
    activation, after, recomputed = (
        np.array(values, dtype=np.float64)
        for values in (costs.activation, costs.activation_after_input, costs.activation_recomputed)
    )
    share = np.array([float(schedule.recompute_fraction.get(s, 1)) for s in range(schedule.stages)])
    dropped = (activation - recomputed) * share
    before_b = _at_most(costs.recompute_workspace, dropped)
    before_i = (
        before_b if costs.recompute_workspace_input is None else _at_most(costs.recompute_workspace_input, dropped)
    )
    kept, nothing = activation - dropped, np.zeros_like(activation)
    for mode, (left, restored_b, restored_i) in enumerate(
        ((activation, nothing, nothing), (kept, before_b, before_i), (kept, nothing, nothing))
    ):
        there = kept if mode == 1 else activation
        held = there + restored_i
        allocated[_CODES[Kind.F], mode] = left
        allocated[_CODES[Kind.R], mode] = dropped
        allocated[_CODES[Kind.B], mode] = restored_b
        freed[_CODES[Kind.B], mode] = there + restored_b
        allocated[_CODES[Kind.I], mode] = restored_i + np.maximum(after - held, 0.0)
        freed[_CODES[Kind.I], mode] = np.maximum(held - after, 0.0)
        freed[_CODES[Kind.W], mode] = after
    return allocated, freed


def _at_most(workspace: tuple[Number, ...] | None, dropped: Floats) -> Floats:
    return dropped if workspace is None else np.minimum(np.array(workspace, dtype=np.float64), dropped)


def longest_path(
    order: Ints, first: Ints, other: Ints, on_start: NDArray[np.bool_], skip: NDArray[np.bool_], durations: Floats
) -> tuple[Floats, Floats]:
    """Starts and ends of operations in a topological order; `skip` leaves edges out."""
    starts = np.zeros(len(order))
    ends = np.zeros(len(order))
    for index in order:
        start = 0.0
        for edge in range(first[index], first[index + 1]):
            if skip[edge]:
                continue
            at = starts[other[edge]] if on_start[edge] else ends[other[edge]]
            if at > start:
                start = at
        starts[index] = start
        ends[index] = start + durations[index]
    return starts, ends


@cache
def _longest_path() -> Callable[..., tuple[Floats, Floats]]:
    """`longest_path`, compiled."""
    import numba

    compiled: Callable[..., tuple[Floats, Floats]] = numba.njit(cache=True)(longest_path)
    return compiled
