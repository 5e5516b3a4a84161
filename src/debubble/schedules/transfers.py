"""Where a schedule's offloads and reloads stand, given the order of its computation.

`selective`: as PipeOffload does it.  What lives long costs most memory, so the longest-lived chunks of a device go
first: half of them, all, or, under a memory limit, the fewest that make it fit.  What lives for less than the way
there and back stays.  O follows its F, and L is placed to end when its I starts; lowering makes each wait for the link
and for memory explicit, so that what the bandwidth cannot carry in time shows in the timeline as a wait.

`just_in_time`: as OptPipe describes PipeOffload.  Every activation goes whose backward does not follow at once, and
comes back as early before its backward as the memory limit and the reload's time ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from debubble.ir import InfeasibleError, Kind, Number, Op, OutOfMemoryError, Schedule, StageCosts
from debubble.ir.lowering.admission import Admission
from debubble.ir.lowering.op_costs import OpCosts
from debubble.simulator import TimedOperation, simulate

STEPS = 4
"""Under a limit a stage's micro-batches are offloaded in shares of one over this."""


def selective(base: Schedule, costs: StageCosts, offload: str | None = None) -> Schedule:
    """A schedule of split backwards with the O and L of its longest-lived activations.

    Args:
        base: The order of computation: F, I and W.
        costs: With the time of an offload.
        offload: `half` or `full` of each device's stages; None for the fewest that make it fit the costs' memory
            limit, and half without one.

    Raises:
        OutOfMemoryError: The schedule does not fit the limit even if everything is offloaded.
    """
    computed = [o for lane in simulate(base, costs.with_limit(None)).compute for o in lane]
    times = {o.op: o for o in computed}
    orders = tuple(_Device(base, costs, times, d).order(offload) for d in range(base.devices))
    return replace(base, orders=orders)


def just_in_time(base: Schedule, costs: StageCosts) -> Schedule:
    """A schedule of split or whole backwards with every activation offloaded and reloaded just in time.

    Raises:
        InfeasibleError: The schedule does not fit the costs' memory limit.
    """
    # Importing the solver takes a while, which the other schedules need not wait for.
    from debubble.search.constructive.offloading import all_pairs, offload_to_fit
    from debubble.search.problem import OrderProblem

    problem = OrderProblem(
        placement=base.placement,
        micro_batches=base.micro_batches,
        costs=costs,
        split=bool(base.split_backward),
        offload=True,
    )
    moved = offload_to_fit(problem, base.orders, eager=all_pairs(problem))
    if moved is None:
        raise InfeasibleError(
            f"The schedule '{base.name}' does not fit the memory limit although everything is offloaded: it needs about"
            " two activations per device; raise the limit."
        )
    return replace(base, orders=moved.orders)


class _Device:
    """One device's list, and the times that its operations had without transfers."""

    def __init__(self, base: Schedule, costs: StageCosts, times: Mapping[Op, TimedOperation], device: int) -> None:
        self.base, self.costs, self.device = base, costs, device
        self.tables = OpCosts.of(base, costs).tables()
        self.compute = base.orders[device]
        self.times = times
        self.position = {op: at for at, op in enumerate(self.compute)}
        held = base.placement.stages_of[device]
        self.longest_lived = sorted(held, key=lambda s: (-self._life(s, base.micro_batches // 2), s))

    def order(self, offload: str | None) -> tuple[Op, ...]:
        stages = len(self.longest_lived)
        if offload is not None:
            return self._with_transfers(stages * STEPS if offload == "full" else (stages + 1) // 2 * STEPS)
        limit = self.costs.limit_of(self.device)
        if limit is None:
            return self._with_transfers((stages + 1) // 2 * STEPS)
        for level in range(stages * STEPS + 1):
            order = self._with_transfers(level)
            try:
                self._admit(order, limit)
            except OutOfMemoryError:
                continue
            return order
        order = self._with_transfers(stages * STEPS, at_any_price=True)
        self._admit(order, limit)
        return order

    def _admit(self, order: tuple[Op, ...], limit: Number) -> None:
        orders = self.base.orders
        schedule = replace(self.base, orders=(*orders[: self.device], order, *orders[self.device + 1 :]))
        static = self.costs.static_of(self.device)
        Admission(schedule, self.costs, self.device, self.tables, static, limit).check()

    def _with_transfers(self, level: int, *, at_any_price: bool = False) -> tuple[Op, ...]:
        """The list with O and L of the first `level` shares: of the longest-lived stages, every micro-batch and a part
        of the next stage's.  `at_any_price`: what would live shortly too, and reloads as late as can be."""
        moved = [
            (s, j)
            for rank, s in enumerate(self.longest_lived)
            for j in range(self.base.micro_batches)
            if rank * STEPS + j % STEPS < level and self._may_leave(s, j, at_any_price=at_any_price)
        ]
        loads = self._load_positions(moved, late=at_any_price)
        order: list[Op] = []
        chosen = set(moved)
        for position, op in enumerate(self.compute):
            order += [op, *(load for load in loads.get(position, []) if load[1:] != op[1:])]
            if op.kind is Kind.F and op[1:] in chosen:
                order.append(Op(Kind.O, op.stage, op.micro_batch))
            order += [load for load in loads.get(position, []) if load[1:] == op[1:]]
        return tuple(order)

    def _load_positions(self, moved: list[tuple[int, int]], *, late: bool) -> dict[int, list[Op]]:
        """Position -> the reloads that may start with that operation: the last at which each is still in time, or,
        `late`, the one before its backward."""
        wanted = sorted((self.times[Op(Kind.I, s, j)].start, s, j) for s, j in moved)
        loads: dict[int, list[Op]] = {}
        position = len(self.compute) - 1
        latest = self.times[self.compute[-1]].end
        for needed, s, j in reversed(wanted):
            latest = min(latest, needed) - self._back(s, j)
            last = self.position[Op(Kind.I, s, j)] - 1
            position = last if late else min(position, last)
            while not late and position and self.times[self.compute[position]].start > latest:
                position -= 1
            loads.setdefault(max(position, self.position[Op(Kind.F, s, j)]), []).insert(0, Op(Kind.L, s, j))
        return loads

    def _may_leave(self, stage: int, j: int, *, at_any_price: bool) -> bool:
        """Whether something lies between F and I, or, unless `at_any_price`, time for the way there and back."""
        if at_any_price:
            return self.position[Op(Kind.I, stage, j)] > self.position[Op(Kind.F, stage, j)] + 1
        return self._life(stage, j) >= self._there(stage, j) + self._back(stage, j)

    def _life(self, stage: int, j: int) -> Number:
        """From the end of the forward to the start of the backward."""
        return self.times[Op(Kind.I, stage, j)].start - self.times[Op(Kind.F, stage, j)].end

    def _there(self, stage: int, j: int) -> Number:
        assert self.costs.offload is not None
        return self.costs.offload[stage] * self.costs.scale_of(j)

    def _back(self, stage: int, j: int) -> Number:
        assert self.costs.reload is not None
        return self.costs.reload[stage] * self.costs.scale_of(j)
