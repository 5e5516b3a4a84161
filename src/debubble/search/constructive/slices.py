"""List schedules of sequences in slices: each device takes what can start first, within a number of slices in flight.

1F1B lets forwards and backwards take turns, which leaves gaps where slices take unlike times.  Here a backward is
taken, or a forward, as soon as it can start; of those that start together a backward comes first, or a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts

NAME = "list schedule of slices"


class _Choice(NamedTuple):
    """An operation that a device may do next; the least one is taken."""

    start: float
    second: bool
    """True if the other kind comes first among those that start together."""
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
        sequences: Micro-batches of whole sequences.
        costs: Times of the stages' slices.
        in_flight: Per device, the most slices whose activations it keeps, over its stages.
        forwards_first: Whether forwards come before backwards that start together.
        fused_recompute: Stages whose backward recomputes first.

    Returns:
        The schedule; None if devices wait for each other with so few slices in flight.
    """
    dispatch = _Dispatch(placement, sequences, costs, in_flight, forwards_first, fused_recompute)
    for _ in range(2 * placement.stages * dispatch.items):
        choices = [choice for d in range(placement.devices) for choice in dispatch.choices(d)]
        if not choices:
            return None
        dispatch.take(min(choices))
    plain = Schedule.of(NAME, placement, dispatch.items, dispatch.orders)
    return replace(plain, slices=dispatch.slices, fused_recompute=fused_recompute)


class _Dispatch:
    """The state of a list schedule: what each device has done, and what is there for each stage."""

    def __init__(
        self,
        placement: Placement,
        sequences: int,
        costs: StageCosts,
        in_flight: Sequence[int],
        forwards_first: bool,
        fused_recompute: frozenset[int],
    ) -> None:
        self.placement, self.costs, self.in_flight, self.first = placement, costs, in_flight, forwards_first
        self.op_costs = OpCosts(costs=costs, fused_recompute=fused_recompute)
        self.slices = costs.slices
        self.items = sequences * self.slices
        self.orders: list[list[Op]] = [[] for _ in range(placement.devices)]
        self.free = [0.0] * placement.devices
        self.alive = [0] * placement.devices
        self.ready: dict[Op, float] = {Op(Kind.F, 0, j): 0.0 for j in range(self.items)}
        """The time at which the input of an operation is there."""
        self.forward = [0] * placement.stages
        """The next slice forwards of every stage."""
        self.backward = [[self.slices - 1] * sequences for _ in range(placement.stages)]
        """The next slice backwards of every stage and sequence."""

    def choices(self, device: int) -> Iterator[_Choice]:
        """The operations that a device may do next."""
        for stage in self.placement.stages_of[device]:
            op = Op(Kind.F, stage, self.forward[stage])
            if op in self.ready and self.alive[device] < self.in_flight[device]:
                yield _Choice(max(self.free[device], self.ready[op]), not self.first, stage, op)
            for sequence, index in enumerate(self.backward[stage]):
                op = Op(Kind.B, stage, sequence * self.slices + index)
                if index >= 0 and op in self.ready:
                    yield _Choice(max(self.free[device], self.ready[op]), self.first, -stage, op)
                    break

    def take(self, choice: _Choice) -> None:
        """Do an operation, and hand on its result."""
        op, device = choice.op, self.placement.device_of[choice.op.stage]
        end = choice.start + float(self.op_costs.time(op))
        self.free[device] = end
        self.orders[device].append(op)
        del self.ready[op]
        if op.kind is Kind.F:
            self.forward[op.stage] += 1
            self.alive[device] += 1
            last = op.stage + 1 == self.placement.stages
            following = op._replace(kind=Kind.B) if last else op._replace(stage=op.stage + 1)
        else:
            self.backward[op.stage][op.micro_batch // self.slices] -= 1
            self.alive[device] -= 1
            following = op._replace(stage=op.stage - 1)
        if following.stage >= 0:
            self.ready[following] = end + self._message(op.stage, following.stage)

    def _message(self, stage: int, other: int) -> float:
        """The time of a message between neighbouring stages, or within one."""
        apart = self.placement.device_of[stage] != self.placement.device_of[other]
        return float(self.costs.communication[min(stage, other)]) if apart else 0.0
