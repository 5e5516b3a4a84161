"""PipeOffload: activations go to the host between forward and backward, as many as the link can carry unseen.

Source: Wan et al., PipeOffload, ICML 2025.  Its B is our I; the order of computation is its GIS (`group_interleaved`).

What lives long costs most memory, so the longest-lived chunks of a device go first: half of them (`offload="half"`),
all (`"full"`), or, under a memory limit, the fewest that make it fit.  What lives for less than the way there and back
stays.  I and W stand together, which needs least memory; under a limit that leaves room, W is delayed as in
`group_interleaved`.

The original offloads whole chunks on a fixed grid of copies, and refuses what misses it.  Here O follows its F, L is
placed to end when its I starts, and lowering makes each wait for the link and for memory explicit: what the bandwidth
cannot carry in time shows in the timeline as a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from debubble.ir import InputError, Kind, Number, Op, OutOfMemoryError, Schedule, StageCosts
from debubble.ir.admission import Admission
from debubble.ir.op_costs import OpCosts
from debubble.schedules.group_interleaved import with_delays
from debubble.schedules.pace import Times, paced
from debubble.schedules.registry import schedule
from debubble.simulator import simulate

STEPS = 4
"""Under a limit a stage's micro-batches are offloaded in shares of one over this."""


@schedule(
    "pipeoffload",
    paper="PipeOffload, ICML 2025",
    bubble="(p - 1)(f + i - w) / v where the link keeps up",
    memory="about p / 2 for half, less for full, or memory_limit",
    default_chunks=2,
)
def pipeoffload(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    costs: StageCosts | None = None,
    offload: Literal["half", "full"] | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    group: int | None = None,
) -> Schedule:
    """Group-interleaved with the longest-lived activations on the host.

    `offload`: `half` or `full`; by default what the memory limit (bytes per device, as in StageCosts) asks for, and
    half without one.  `group`: as in `group-interleaved`.  Raises OutOfMemoryError if even offloading all does not fit.
    """
    if offload not in (None, "half", "full"):
        raise InputError(f"'offload' is {offload!r}; it must be 'half' or 'full'.")
    costs = costs or StageCosts.of(stages=devices * chunks)
    if costs.offload is None:
        costs = costs.replace(offload=[f / 2 for f in costs.forward], reload=None)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    build = partial(with_delays, "pipeoffload", devices, micro_batches, chunks, group or devices)
    together = partial(with_transfers, build(delays=[0] * devices), costs, offload)
    if offload is not None or costs.memory_limit is None:
        return together()
    # W may only wait where memory is left for it.
    try:
        delayed = with_transfers(build(delays=range(devices)), costs, None)
    except OutOfMemoryError:
        return together()
    return min(together(), delayed, key=lambda s: simulate(s, costs).makespan)


def with_transfers(base: Schedule, costs: StageCosts, offload: str | None) -> Schedule:
    """A schedule of split backwards with O and L: of `half` or all stages, or of the fewest that make it fit."""
    starts, ends = paced(base, costs)
    orders = tuple(_Device(base, costs, starts, ends, d).order(offload) for d in range(base.devices))
    return replace(base, orders=orders)


class _Device:
    """One device's list, and the times that its operations had without transfers."""

    def __init__(self, base: Schedule, costs: StageCosts, start: Times, end: Times, device: int) -> None:
        self.base, self.costs, self.device = base, costs, device
        self.tables = OpCosts.of(base, costs).tables()
        self.compute = base.orders[device]
        self.start, self.end = start, end
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
        wanted = sorted((self.start[Op(Kind.I, s, j)], s, j) for s, j in moved)
        loads: dict[int, list[Op]] = {}
        position = len(self.compute) - 1
        latest = self.end[self.compute[-1]]
        for needed, s, j in reversed(wanted):
            latest = min(latest, needed) - self._back(s, j)
            last = self.position[Op(Kind.I, s, j)] - 1
            position = last if late else min(position, last)
            while not late and position and self.start[self.compute[position]] > latest:
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
        return self.start[Op(Kind.I, stage, j)] - self.end[Op(Kind.F, stage, j)]

    def _there(self, stage: int, j: int) -> Number:
        assert self.costs.offload is not None
        return self.costs.offload[stage] * self.costs.scale_of(j)

    def _back(self, stage: int, j: int) -> Number:
        assert self.costs.reload is not None
        return self.costs.reload[stage] * self.costs.scale_of(j)
