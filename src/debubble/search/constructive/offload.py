"""Belady offloading: lists are made to fit by moving (or recomputing) what is needed furthest in the future.

No more is moved than memory demands: where an operation of a device's list would exceed the limit, the activation with
the latest backward goes.  Its offload stands right after its forward, its reload as early before its backward as it
takes, if memory allows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from debubble.ir import Kind, Number, Op, Schedule
from debubble.ir.ops import BACKWARDS
from debubble.search.constructive.list_scheduling import ListSchedule
from debubble.search.problem import OrderProblem

Pair = tuple[int, int]


def offload_to_fit(
    problem: OrderProblem, orders: Sequence[Sequence[Op]], *, eager: Container[Pair] = ()
) -> Schedule | None:
    """Add offloads and reloads to orders of computation, so that every device stays under its limit.

    `eager` pairs are offloaded in any case, unless their backward follows at once.  None if that does not suffice.
    """
    base = problem.schedule(orders)
    fitted = [_BeladyScan(problem, base, d, eager).run() for d in range(problem.devices)]
    complete = [order for order in fitted if order is not None]
    return None if len(complete) < len(fitted) else problem.schedule(complete)


def movable_pairs(problem: OrderProblem, timetable: ListSchedule) -> frozenset[Pair]:
    """Choose the activations that there is time to move: until their backward, and on the link.

    When their F ends in the list schedule, the link has to be free, or soon to be.
    """
    costs, transfers, pairs = problem.costs, problem.costs.transfers, set[Pair]()
    assert transfers is not None
    for device, (order, ends) in enumerate(zip(timetable.orders, timetable.ends, strict=True)):
        sharers = next((len(group) for group in costs.link_groups if device in group), 1)
        due = {op[1:]: end for op, end in zip(order, ends, strict=True) if op.kind in BACKWARDS}
        free: Number = 0
        for op, end in zip(order, ends, strict=True):
            scale = costs.scale_of(op.micro_batch)
            out, back = transfers.offload[op.stage] * scale, transfers.reload[op.stage] * scale
            busy = sharers * (out + back if transfers.half_duplex else max(out, back))
            leads = problem.longest_lead(op._replace(kind=Kind.O)) + problem.backward_lead(op.stage)
            if op.kind is Kind.F and 2 * (free - end) <= busy and due[op[1:]] - end + leads > out + back:
                pairs.add(op[1:])
                free = max(free, end) + busy
    return frozenset(pairs)


def recompute_to_fit(problem: OrderProblem, orders: Sequence[Sequence[Op]]) -> Schedule | None:
    """Add an R before the backward of as many micro-batches as memory demands; None if that does not suffice."""
    costs, chosen = problem.costs, set[Pair]()
    for device, order in enumerate(orders):
        capacity = costs.capacity_of(device)
        while capacity is not None:
            trial = problem.schedule([with_recompute(order, chosen)])
            victim = _first_excess(problem, trial, capacity, chosen)
            if victim is None:
                break
            if victim in chosen:
                return None
            chosen.add(victim)
    return problem.schedule(with_recompute(order, chosen) for order in orders)


def with_recompute(order: Iterable[Op], chosen: set[Pair]) -> tuple[Op, ...]:
    """Put an R before the backward of the chosen (stage, micro-batch) pairs."""
    result: list[Op] = []
    for op in order:
        if op.kind in BACKWARDS and op[1:] in chosen:
            result.append(Op(Kind.R, op.stage, op.micro_batch))
        result.append(op)
    return tuple(result)


def _first_excess(problem: OrderProblem, schedule: Schedule, capacity: Number, chosen: set[Pair]) -> Pair | None:
    """Choose who recomputes so that the first operation beyond `capacity` fits: that with the latest backward."""
    due = {op[1:]: at for at, op in enumerate(schedule.orders[0]) if op.kind in BACKWARDS}
    costs, again = problem.op_costs, schedule.explicit_recompute
    used: Number = 0
    resident: set[Pair] = set()
    for op in schedule.orders[0]:
        allocated, freed = costs.allocates(op, explicit=op[1:] in again), costs.frees(op, explicit=op[1:] in again)
        if op.kind is Kind.F:
            resident.add(op[1:])
        if used + allocated > capacity:
            return max(resident - chosen, key=lambda pair: due[pair], default=op[1:])
        if op.kind in BACKWARDS:
            resident.discard(op[1:])
        used += allocated - freed
    return None


class _BeladyScan:
    """Goes through one device's compute operations and puts transfers between them."""

    def __init__(self, problem: OrderProblem, base: Schedule, device: int, eager: Container[Pair]) -> None:
        self.problem, self.base, self.eager = problem, base, eager
        self.order = base.orders[device]
        self.capacity = problem.costs.capacity_of(device)
        self.due = {op[1:]: at for at, op in enumerate(self.order) if op.kind in BACKWARDS}
        costs, again = problem.op_costs, [op[1:] in base.explicit_recompute for op in self.order]
        self.time, self.allocated, self.freed = (
            [price(op, explicit=explicit) for op, explicit in zip(self.order, again, strict=True)]
            for price in (costs.time, costs.allocates, costs.frees)
        )
        self.used: Number = 0
        self.resident: set[Pair] = set()
        self.away: dict[Pair, Number] = {}
        self.protected: set[Pair] = set()
        self.offloaded: set[Pair] = set()
        self.reloads: dict[int, list[Op]] = {}

    def run(self) -> tuple[Op, ...] | None:
        """The list with transfers; None if it does not fit."""
        for at, op in enumerate(self.order):
            pair = op[1:]
            if op.kind in BACKWARDS and pair in self.away and not self._reload(pair, at, must=True):
                return None
            if not self._free_capacity(self.allocated[at], pair):
                return None
            self.used += self.allocated[at] - self.freed[at]
            if op.kind is Kind.F:
                self.resident.add(pair)
                if pair in self.eager and self.due[pair] > at + 2:
                    self._evict(pair)
            elif op.kind in BACKWARDS:
                self.resident.discard(pair)
                self.protected.discard(pair)
            self._reload_early(at)
        return self._with_transfers()

    def _reload_early(self, at: int) -> None:
        """Bring back what is due within the time that its reload takes."""
        passed: Number = 0
        spare: Number = 0
        for then in range(at + 1, len(self.order)):
            pair = self.order[then][1:]
            if self.order[then].kind in BACKWARDS and pair in self.away:
                # The forwards in between need their place before this one is used.
                if self.capacity is None or self.used + self.away[pair] + spare <= self.capacity:
                    self._reload(pair, at + 1, must=False)
                return
            passed += self.time[then]
            spare = max(spare, self.allocated[then])
            if self._too_early(pair[0], passed):
                return

    def _too_early(self, stage: int, passed: Number) -> bool:
        """Tell whether a reload need not begin yet for what is due then; on a shared link it goes before an offload."""
        transfers = self.problem.costs.transfers
        assert transfers is not None
        if transfers.half_duplex:
            return passed > transfers.busy(stage)
        return passed >= transfers.reload[stage] - self.problem.backward_lead(stage)

    def _reload(self, pair: Pair, at: int, *, must: bool) -> bool:
        size = self.away[pair]
        if must and not self._free_capacity(size, pair):
            return False
        if self.capacity is not None and self.used + size > self.capacity:
            return not must
        del self.away[pair]
        self.used += size
        self.resident.add(pair)
        self.protected.add(pair)
        self.reloads.setdefault(at, []).append(Op(Kind.L, *pair))
        return True

    def _free_capacity(self, size: Number, pair: Pair) -> bool:
        while self.capacity is not None and self.used + size > self.capacity:
            victims = self.resident - self.protected - {pair}
            if not victims:
                return False
            self._evict(max(victims, key=lambda v: self.due[v]))
        return True

    def _evict(self, pair: Pair) -> None:
        size = self.base.moved_bytes(self.problem.costs, *pair) * self.problem.costs.scale_of(pair[1])
        self.resident.discard(pair)
        self.away[pair] = size
        self.used -= size
        self.offloaded.add(pair)

    def _with_transfers(self) -> tuple[Op, ...]:
        result: list[Op] = []
        for at, op in enumerate(self.order):
            result.extend(self.reloads.get(at, ()))
            result.append(op)
            if op.kind is Kind.F and op[1:] in self.offloaded:
                result.append(Op(Kind.O, *op[1:]))
        return tuple(result)
