"""Insertion of offloads and reloads into an order of computation.

`ComputeOrder.selective` is PipeOffload's rule.  Long lifetimes cost the most memory, so the longest-lived chunks of a
device are offloaded first: half of them, all, or, under a memory limit, the fewest that make it fit.  Activations that
live for less than the time of both transfers stay.  O follows its F, and L is placed to end when its I starts; lowering
makes waits for the link and for memory explicit, so a lack of bandwidth appears in the timeline as a wait.

`ComputeOrder.just_in_time` is PipeOffload as OptPipe describes it.  Every activation is offloaded unless its backward
follows at once, and reloaded as early before its backward as the memory limit and the reload's time require.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from debubble.ir import InfeasibleError, Kind, Number, Op, OutOfMemoryError, Schedule, StageCosts
from debubble.ir.lowering.admission import check_memory
from debubble.ir.lowering.op_costs import OpCosts, Tables
from debubble.ir.ops import CODE, KINDS
from debubble.simulator import Timeline, simulate

Offload = Literal["half", "full"]

SHARES_PER_STAGE = 4
"""Number of shares in which a stage's micro-batches are offloaded under a memory limit."""


@dataclass(frozen=True)
class ComputeOrder:
    """An order of computation, to which transfers are added.

    Attributes:
        schedule: The order of F, I and W, or of F and B, on each device.
        costs: The stages' costs, including the time of an offload.
    """

    schedule: Schedule
    costs: StageCosts

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline without transfers, ignoring the memory limit."""
        return simulate(self.schedule, self.costs.with_limit(None))

    @cached_property
    def tables(self) -> Tables:
        """The costs of the operations as tables."""
        return self.op_costs.tables()

    @cached_property
    def op_costs(self) -> OpCosts:
        """The costs of the operations."""
        return OpCosts.from_schedule(self.schedule, self.costs)

    def selective(self, offload: Offload | None = None) -> Schedule:
        """Add the O and L of the longest-lived activations to an order of split backwards.

        Args:
            offload: `half` or `full` of each device's stages; None for the fewest that make it fit the costs' memory
                limit, and half without one.

        Raises:
            OutOfMemoryError: The schedule does not fit the limit even if everything is offloaded.
        """
        return replace(self.schedule, orders=tuple(device.order(offload) for device in self._devices))

    def just_in_time(self) -> Schedule:
        """Add transfers of every activation, reloaded just in time; backwards may be split or fused.

        Raises:
            InfeasibleError: The schedule does not fit the costs' memory limit.
        """
        # Importing the search is slow, and other schedules do not need it.
        from debubble.search.constructive.offload import offload_to_fit
        from debubble.search.problem import OrderProblem

        problem = OrderProblem(
            placement=self.schedule.placement,
            micro_batches=self.schedule.micro_batches,
            costs=self.costs,
            split=bool(self.schedule.split_backward),
            offload=True,
        )
        all_pairs = set(product(range(problem.stages), range(problem.micro_batches)))
        offloaded = offload_to_fit(problem, self.schedule.orders, eager=all_pairs)
        if offloaded is None:
            raise InfeasibleError(
                f"The schedule '{self.schedule.name}' does not fit the memory limit although everything is offloaded:"
                " it needs about two activations per device; raise the limit."
            )
        return replace(self.schedule, orders=offloaded.orders)

    @cached_property
    def times(self) -> tuple[Any, Any]:
        """Start and end of each operation, as nested lists [kind, stage, micro-batch]."""
        program = self.timeline.program
        shape = len(KINDS), self.schedule.stages, self.schedule.micro_batches
        start, end = np.zeros(shape, dtype=object), np.zeros(shape, dtype=object)
        indices = program.kind, program.stage, program.micro_batch
        start[indices], end[indices] = self.timeline.start, self.timeline.end
        return start.tolist(), end.tolist()

    @cached_property
    def _devices(self) -> tuple[_DeviceTransfers, ...]:
        return tuple(_DeviceTransfers(self, device) for device in range(self.schedule.devices))


class _DeviceTransfers:
    """Adds transfers to one device's list, using the times of its operations without transfers."""

    def __init__(self, base: ComputeOrder, device: int) -> None:
        self.base, self.device, self.costs = base, device, base.costs
        self.micro_batches = base.schedule.micro_batches
        self.compute = base.schedule.orders[device]
        self.start, self.end = base.times
        self.position = {op: index for index, op in enumerate(self.compute)}
        device_stages = base.schedule.placement.stages_of[device]
        self.longest_lived = sorted(device_stages, key=lambda s: (-self._lifetime(s, self.micro_batches // 2), s))

    def order(self, offload: Offload | None) -> tuple[Op, ...]:
        """The list with transfers."""
        stages = len(self.longest_lived)
        if offload is None and self.costs.memory_limit is not None:
            for level in range(stages * SHARES_PER_STAGE + 1):
                order = self._with_transfers(level)
                try:
                    self._check_memory(order)
                except OutOfMemoryError:
                    continue
                return order
            order = self._with_transfers(stages * SHARES_PER_STAGE, force=True)
            self._check_memory(order)
            return order
        return self._with_transfers((stages if offload == "full" else (stages + 1) // 2) * SHARES_PER_STAGE)

    def _check_memory(self, order: tuple[Op, ...]) -> None:
        schedule = self.base.schedule
        orders = (*schedule.orders[: self.device], order, *schedule.orders[self.device + 1 :])
        check_memory(replace(schedule, orders=orders), self.costs, self.device, self.base.tables)

    def _with_transfers(self, level: int, *, force: bool = False) -> tuple[Op, ...]:
        """Add O and L of the first `level` shares.

        These are all micro-batches of the longest-lived stages, and some of the next stage's.  With `force`, those
        with short lifetimes are offloaded too, and reloads are as late as possible.
        """
        offloaded = [
            (s, j)
            for rank, s in enumerate(self.longest_lived)
            for j in range(self.micro_batches)
            if rank * SHARES_PER_STAGE + j % SHARES_PER_STAGE < level and self._may_leave(s, j, force=force)
        ]
        if not offloaded:
            return self.compute
        loads = self._load_positions(offloaded, late=force)
        order: list[Op] = []
        chosen = set(offloaded)
        for position, op in enumerate(self.compute):
            reloads = loads.get(position, ())
            order += [op, *(load for load in reloads if load[1:] != op[1:])]
            if op.kind is Kind.F and op[1:] in chosen:
                order.append(Op(Kind.O, op.stage, op.micro_batch))
            order += [load for load in reloads if load[1:] == op[1:]]
        return tuple(order)

    def _load_positions(self, offloaded: list[tuple[int, int]], *, late: bool) -> dict[int, list[Op]]:
        """For each position, the reloads that may start with its operation.

        That is the last operation at which the reload is still in time, or, if `late`, the one before its backward.
        """
        backwards = sorted((self.start[CODE[Kind.I]][s][j], s, j) for s, j in offloaded)
        loads: dict[int, list[Op]] = {}
        position = len(self.compute) - 1
        kind, stage, j = self.compute[-1]
        latest = self.end[CODE[kind]][stage][j]
        for needed, s, j in reversed(backwards):
            latest = min(latest, needed + self._lead(Kind.I, s, j)) - self._reload(s, j)
            last = self.position[Op(Kind.I, s, j)] - 1
            position = last if late else min(position, last)
            while not late and position and self._start(self.compute[position]) > latest:
                position -= 1
            loads.setdefault(max(position, self.position[Op(Kind.F, s, j)]), []).insert(0, Op(Kind.L, s, j))
        return loads

    def _may_leave(self, stage: int, j: int, *, force: bool) -> bool:
        """Tell whether there is time for both transfers between F and I, or, with `force`, any operation."""
        if force:
            return self.position[Op(Kind.I, stage, j)] > self.position[Op(Kind.F, stage, j)] + 1
        assert self.costs.offload is not None
        offload = self.costs.offload[stage] * self.costs.scale_of(j)
        leads = self._lead(Kind.O, stage, j) + self._lead(Kind.I, stage, j)
        return self._lifetime(stage, j) + leads >= offload + self._reload(stage, j)

    def _start(self, op: Op) -> Number:
        start: Number = self.start[CODE[op.kind]][op.stage][op.micro_batch]
        return start

    def _lifetime(self, stage: int, j: int) -> Number:
        """Time from the end of the forward to the start of the backward."""
        lifetime: Number = self.start[CODE[Kind.I]][stage][j] - self.end[CODE[Kind.F]][stage][j]
        return lifetime

    def _lead(self, kind: Kind, stage: int, j: int) -> Number:
        return self.base.op_costs.lead(Op(kind, stage, j))

    def _reload(self, stage: int, j: int) -> Number:
        assert self.costs.reload is not None
        return self.costs.reload[stage] * self.costs.scale_of(j)
