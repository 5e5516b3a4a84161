"""Placement of offloads and reloads in a given order of computation.

`ComputeOrder.selective`: as PipeOffload does it.  What lives long costs most memory, so the longest-lived chunks of a
device go first: half of them, all, or, under a memory limit, the fewest that make it fit.  What lives for less than the
way there and back stays.  O follows its F, and L is placed to end when its I starts; lowering makes each wait for the
link and for memory explicit, so that what the bandwidth cannot carry in time shows in the timeline as a wait.

`ComputeOrder.just_in_time`: as OptPipe describes PipeOffload.  Every activation goes whose backward does not follow at
once, and comes back as early before its backward as the memory limit and the reload's time ask for.
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

STEPS = 4
"""Under a limit a stage's micro-batches are offloaded in shares of one over this."""


@dataclass(frozen=True)
class ComputeOrder:
    """An order of computation, to which transfers are added.

    Attributes:
        schedule: The order of F, I and W, or of F and B, on each device.
        costs: With the time of an offload.
    """

    schedule: Schedule
    costs: StageCosts

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline without transfers, whatever the memory limit."""
        return simulate(self.schedule, self.costs.with_limit(None))

    @cached_property
    def tables(self) -> Tables:
        """The costs of the operations."""
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
        """Add transfers of every activation, reloaded just in time; backwards may be split or whole.

        Raises:
            InfeasibleError: The schedule does not fit the costs' memory limit.
        """
        # Importing the search takes a while, which the other schedules need not wait for.
        from debubble.search.constructive.offload import offload_to_fit
        from debubble.search.problem import OrderProblem

        problem = OrderProblem(
            placement=self.schedule.placement,
            micro_batches=self.schedule.micro_batches,
            costs=self.costs,
            split=bool(self.schedule.split_backward),
            offload=True,
        )
        everything = set(product(range(problem.stages), range(problem.micro_batches)))
        moved = offload_to_fit(problem, self.schedule.orders, eager=everything)
        if moved is None:
            raise InfeasibleError(
                f"The schedule '{self.schedule.name}' does not fit the memory limit although everything is offloaded:"
                " it needs about two activations per device; raise the limit."
            )
        return replace(self.schedule, orders=moved.orders)

    @cached_property
    def times(self) -> tuple[Any, Any]:
        """Start and end of each operation, as nested lists by [kind, stage, micro-batch]."""
        program = self.timeline.program
        shape = len(KINDS), self.schedule.stages, self.schedule.micro_batches
        start, end = np.zeros(shape, dtype=object), np.zeros(shape, dtype=object)
        at = program.kind, program.stage, program.micro_batch
        start[at], end[at] = self.timeline.start, self.timeline.end
        return start.tolist(), end.tolist()

    @cached_property
    def _devices(self) -> tuple[_DeviceTransfers, ...]:
        return tuple(_DeviceTransfers(self, device) for device in range(self.schedule.devices))


class _DeviceTransfers:
    """One device's list, and the times that its operations had without transfers."""

    def __init__(self, base: ComputeOrder, device: int) -> None:
        self.base, self.device, self.costs = base, device, base.costs
        self.micro_batches = base.schedule.micro_batches
        self.compute = base.schedule.orders[device]
        self.start, self.end = base.times
        self.position = {op: at for at, op in enumerate(self.compute)}
        device_stages = base.schedule.placement.stages_of[device]
        self.longest_lived = sorted(device_stages, key=lambda s: (-self._life(s, self.micro_batches // 2), s))

    def order(self, offload: Offload | None) -> tuple[Op, ...]:
        """The list with transfers."""
        stages = len(self.longest_lived)
        if offload is None and self.costs.memory_limit is not None:
            for level in range(stages * STEPS + 1):
                order = self._with_transfers(level)
                try:
                    self._check_memory(order)
                except OutOfMemoryError:
                    continue
                return order
            order = self._with_transfers(stages * STEPS, at_any_price=True)
            self._check_memory(order)
            return order
        return self._with_transfers(stages * STEPS if offload == "full" else (stages + 1) // 2 * STEPS)

    def _check_memory(self, order: tuple[Op, ...]) -> None:
        schedule = self.base.schedule
        orders = (*schedule.orders[: self.device], order, *schedule.orders[self.device + 1 :])
        check_memory(replace(schedule, orders=orders), self.costs, self.device, self.base.tables)

    def _with_transfers(self, level: int, *, at_any_price: bool = False) -> tuple[Op, ...]:
        """Add O and L of the first `level` shares.

        These are every micro-batch of the longest-lived stages, and a part of the next stage's.
        `at_any_price`: what would live shortly goes too, and reloads are as late as can be.
        """
        moved = [
            (s, j)
            for rank, s in enumerate(self.longest_lived)
            for j in range(self.micro_batches)
            if rank * STEPS + j % STEPS < level and self._may_leave(s, j, at_any_price=at_any_price)
        ]
        if not moved:
            return self.compute
        loads = self._load_positions(moved, late=at_any_price)
        order: list[Op] = []
        chosen = set(moved)
        for position, op in enumerate(self.compute):
            here = loads.get(position, ())
            order += [op, *(load for load in here if load[1:] != op[1:])]
            if op.kind is Kind.F and op[1:] in chosen:
                order.append(Op(Kind.O, op.stage, op.micro_batch))
            order += [load for load in here if load[1:] == op[1:]]
        return tuple(order)

    def _load_positions(self, moved: list[tuple[int, int]], *, late: bool) -> dict[int, list[Op]]:
        """Find for each position the reloads that may start with that operation.

        It is the last operation at which the reload is still in time, or, `late`, the one before its backward.
        """
        wanted = sorted((self.start[CODE[Kind.I]][s][j], s, j) for s, j in moved)
        loads: dict[int, list[Op]] = {}
        position = len(self.compute) - 1
        kind, stage, j = self.compute[-1]
        latest = self.end[CODE[kind]][stage][j]
        for needed, s, j in reversed(wanted):
            latest = min(latest, needed + self._lead(Kind.I, s, j)) - self._reload(s, j)
            last = self.position[Op(Kind.I, s, j)] - 1
            position = last if late else min(position, last)
            while not late and position and self._start(self.compute[position]) > latest:
                position -= 1
            loads.setdefault(max(position, self.position[Op(Kind.F, s, j)]), []).insert(0, Op(Kind.L, s, j))
        return loads

    def _may_leave(self, stage: int, j: int, *, at_any_price: bool) -> bool:
        """Tell whether there is something between F and I, or, unless `at_any_price`, time for both transfers."""
        if at_any_price:
            return self.position[Op(Kind.I, stage, j)] > self.position[Op(Kind.F, stage, j)] + 1
        assert self.costs.offload is not None
        offload = self.costs.offload[stage] * self.costs.scale_of(j)
        leads = self._lead(Kind.O, stage, j) + self._lead(Kind.I, stage, j)
        return self._life(stage, j) + leads >= offload + self._reload(stage, j)

    def _start(self, op: Op) -> Number:
        start: Number = self.start[CODE[op.kind]][op.stage][op.micro_batch]
        return start

    def _life(self, stage: int, j: int) -> Number:
        """Time from the end of the forward to the start of the backward."""
        life: Number = self.start[CODE[Kind.I]][stage][j] - self.end[CODE[Kind.F]][stage][j]
        return life

    def _lead(self, kind: Kind, stage: int, j: int) -> Number:
        return self.base.op_costs.lead(Op(kind, stage, j))

    def _reload(self, stage: int, j: int) -> Number:
        assert self.costs.reload is not None
        return self.costs.reload[stage] * self.costs.scale_of(j)
