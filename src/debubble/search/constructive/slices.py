"""List schedules of sequences in slices: each device runs what can start first, within a limit on slices in flight.

1F1B alternates forwards and backwards, which leaves gaps if slices take different times.  Here a forward or backward
runs as soon as it can start; ties go to backwards or to forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts

NAME = "list schedule of slices"


class _Choice(NamedTuple):
    """An operation that a device may run next; the smallest one is taken."""

    start: float
    second: bool
    """Whether the other kind comes first in a tie."""
    depth: int
    op: Op


def slice_list_schedule(
    placement: Placement,
    sequences: int,
    costs: StageCosts,
    *,
    in_flight: Sequence[int],
    forwards_first: bool = False,
    fused_recompute: frozenset[int] = frozenset(),
) -> Schedule | None:
    """The list schedule of sequences in the slices of the costs.

    Args:
        placement: The stages on devices.
        sequences: Number of micro-batches of full sequences.
        costs: Times of the stages' slices.
        in_flight: Limit on slices in flight per device, over all its stages.
        forwards_first: Whether forwards win ties against backwards.
        fused_recompute: Stages whose backward recomputes first.

    Returns:
        The schedule; None if devices deadlock because of too few slices in flight.
    """
    dispatch = _SliceDispatcher(placement, sequences, costs, in_flight, forwards_first, fused_recompute)
    for _ in range(2 * placement.stages * dispatch.items):
        choices = [choice for d in range(placement.devices) for choice in dispatch.choices(d)]
        if not choices:
            return None
        dispatch.take(min(choices))
    plain = Schedule.of(NAME, placement, dispatch.items, dispatch.orders)
    return replace(plain, slices=dispatch.slices, fused_recompute=fused_recompute)


class _SliceDispatcher:
    """The state of a list schedule: the orders so far, and the inputs available to each stage."""

    def __init__(
        self,
        placement: Placement,
        sequences: int,
        costs: StageCosts,
        in_flight: Sequence[int],
        forwards_first: bool,
        fused_recompute: frozenset[int],
    ) -> None:
        self.placement, self.costs, self.in_flight, self.forwards_first = placement, costs, in_flight, forwards_first
        self.op_costs = OpCosts(costs=costs, fused_recompute=fused_recompute)
        self.slices = costs.slices
        self.items = sequences * self.slices
        self.orders: list[list[Op]] = [[] for _ in range(placement.devices)]
        self.device_free = [0.0] * placement.devices
        self.in_flight_slices = [0] * placement.devices
        self.ready: dict[Op, float] = {Op(Kind.F, 0, j): 0.0 for j in range(self.items)}
        """Arrival of each operation's input."""
        self.forward = [0] * placement.stages
        """The next forward slice of every stage."""
        self.backward = [[self.slices - 1] * sequences for _ in range(placement.stages)]
        """The next backward slice of every stage and sequence."""

    def choices(self, device: int) -> Iterator[_Choice]:
        """The operations that a device may run next."""
        for stage in self.placement.stages_of[device]:
            op = Op(Kind.F, stage, self.forward[stage])
            if op in self.ready and self.in_flight_slices[device] < self.in_flight[device]:
                yield _Choice(max(self.device_free[device], self.ready[op]), not self.forwards_first, stage, op)
            for sequence, index in enumerate(self.backward[stage]):
                op = Op(Kind.B, stage, sequence * self.slices + index)
                if index >= 0 and op in self.ready:
                    yield _Choice(max(self.device_free[device], self.ready[op]), self.forwards_first, -stage, op)
                    break

    def take(self, choice: _Choice) -> None:
        """Run an operation, and send its result."""
        op, device = choice.op, self.placement.device_of[choice.op.stage]
        end = choice.start + float(self.op_costs.time(op))
        self.device_free[device] = end
        self.orders[device].append(op)
        del self.ready[op]
        if op.kind is Kind.F:
            self.forward[op.stage] += 1
            self.in_flight_slices[device] += 1
            last = op.stage + 1 == self.placement.stages
            following = op._replace(kind=Kind.B) if last else op._replace(stage=op.stage + 1)
        else:
            self.backward[op.stage][op.micro_batch // self.slices] -= 1
            self.in_flight_slices[device] -= 1
            following = op._replace(stage=op.stage - 1)
        if following.stage >= 0:
            self.ready[following] = end + self._message(op.stage, following.stage)

    def _message(self, stage: int, other: int) -> float:
        """The time of a message between neighboring stages; 0 on one device."""
        apart = self.placement.device_of[stage] != self.placement.device_of[other]
        return float(self.costs.communication[min(stage, other)]) if apart else 0.0
