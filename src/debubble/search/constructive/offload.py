"""Belady offloading: makes lists fit by offloading (or recomputing) what is needed furthest in the future.

Only what memory requires is offloaded: if an operation of a device's list would exceed the limit, the activation with
the latest backward is chosen.  Its offload follows its forward, and its reload starts early enough before its backward,
if memory allows.
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

    `eager` pairs are always offloaded, unless their backward follows at once.  None if that does not suffice.
    """
    base = problem.schedule(orders)
    fitted = [_BeladyScan(problem, base, d, eager).run() for d in range(problem.devices)]
    complete = [order for order in fitted if order is not None]
    return None if len(complete) < len(fitted) else problem.schedule(complete)


def movable_pairs(problem: OrderProblem, timetable: ListSchedule) -> frozenset[Pair]:
    """Choose the activations that can be offloaded in time: before their backward, with the link free at the F's end.

    The link may also become free soon after, within half the time of the transfers.
    """
    costs, transfers, pairs = problem.costs, problem.costs.transfers, set[Pair]()
    assert transfers is not None
    for device, (order, ends) in enumerate(zip(timetable.orders, timetable.ends, strict=True)):
        sharers = next((len(group) for group in costs.link_groups if device in group), 1)
        due = {op[1:]: end for op, end in zip(order, ends, strict=True) if op.kind in BACKWARDS}
        link_free: Number = 0
        for op, end in zip(order, ends, strict=True):
            scale = costs.scale_of(op.micro_batch)
            out, back = transfers.offload[op.stage] * scale, transfers.reload[op.stage] * scale
            link_time = sharers * (out + back if transfers.half_duplex else max(out, back))
            leads = problem.max_lead(op._replace(kind=Kind.O)) + problem.backward_lead(op.stage)
            if op.kind is Kind.F and 2 * (link_free - end) <= link_time and due[op[1:]] - end + leads > out + back:
                pairs.add(op[1:])
                link_free = max(link_free, end) + link_time
    return frozenset(pairs)


def recompute_to_fit(problem: OrderProblem, orders: Sequence[Sequence[Op]]) -> Schedule | None:
    """Add an R before as many backwards as memory requires; None if that does not suffice."""
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
    """Insert an R before the backward of the chosen (stage, micro-batch) pairs."""
    result: list[Op] = []
    for op in order:
        if op.kind in BACKWARDS and op[1:] in chosen:
            result.append(Op(Kind.R, op.stage, op.micro_batch))
        result.append(op)
    return tuple(result)


def _first_excess(problem: OrderProblem, schedule: Schedule, capacity: Number, chosen: set[Pair]) -> Pair | None:
    """The resident pair with the latest backward at the first operation that exceeds `capacity`; None if all fit."""
    due = {op[1:]: index for index, op in enumerate(schedule.orders[0]) if op.kind in BACKWARDS}
    costs, recomputed = problem.op_costs, schedule.explicit_recompute
    used: Number = 0
    resident: set[Pair] = set()
    for op in schedule.orders[0]:
        explicit = op[1:] in recomputed
        allocated, freed = costs.allocates(op, explicit=explicit), costs.frees(op, explicit=explicit)
        if op.kind is Kind.F:
            resident.add(op[1:])
        if used + allocated > capacity:
            return max(resident - chosen, key=lambda pair: due[pair], default=op[1:])
        if op.kind in BACKWARDS:
            resident.discard(op[1:])
        used += allocated - freed
    return None


class _BeladyScan:
    """Scans one device's compute operations and inserts transfers."""

    def __init__(self, problem: OrderProblem, base: Schedule, device: int, eager: Container[Pair]) -> None:
        self.problem, self.base, self.eager = problem, base, eager
        self.order = base.orders[device]
        self.capacity = problem.costs.capacity_of(device)
        self.due = {op[1:]: index for index, op in enumerate(self.order) if op.kind in BACKWARDS}
        costs, recomputed = problem.op_costs, [op[1:] in base.explicit_recompute for op in self.order]
        self.time, self.allocated, self.freed = (
            [price(op, explicit=explicit) for op, explicit in zip(self.order, recomputed, strict=True)]
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
        for index, op in enumerate(self.order):
            pair = op[1:]
            if op.kind in BACKWARDS and pair in self.away and not self._reload(pair, index, must=True):
                return None
            if not self._free_capacity(self.allocated[index], pair):
                return None
            self.used += self.allocated[index] - self.freed[index]
            if op.kind is Kind.F:
                self.resident.add(pair)
                if pair in self.eager and self.due[pair] > index + 2:
                    self._evict(pair)
            elif op.kind in BACKWARDS:
                self.resident.discard(pair)
                self.protected.discard(pair)
            self._reload_early(index)
        return self._with_transfers()

    def _reload_early(self, index: int) -> None:
        """Reload the next offloaded activation if it is due within the time of its reload."""
        passed: Number = 0
        spare: Number = 0
        for later in range(index + 1, len(self.order)):
            pair = self.order[later][1:]
            if self.order[later].kind in BACKWARDS and pair in self.away:
                # The operations in between need their memory before this activation is used.
                if self.capacity is None or self.used + self.away[pair] + spare <= self.capacity:
                    self._reload(pair, index + 1, must=False)
                return
            passed += self.time[later]
            spare = max(spare, self.allocated[later])
            if self._too_early(pair[0], passed):
                return

    def _too_early(self, stage: int, passed: Number) -> bool:
        """Tell whether a reload need not start yet; on a half-duplex link it also has to precede an offload."""
        transfers = self.problem.costs.transfers
        assert transfers is not None
        if transfers.half_duplex:
            return passed > transfers.busy(stage)
        return passed >= transfers.reload[stage] - self.problem.backward_lead(stage)

    def _reload(self, pair: Pair, index: int, *, must: bool) -> bool:
        size = self.away[pair]
        if must and not self._free_capacity(size, pair):
            return False
        if self.capacity is not None and self.used + size > self.capacity:
            return not must
        del self.away[pair]
        self.used += size
        self.resident.add(pair)
        self.protected.add(pair)
        self.reloads.setdefault(index, []).append(Op(Kind.L, *pair))
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
        for index, op in enumerate(self.order):
            result.extend(self.reloads.get(index, ()))
            result.append(op)
            if op.kind is Kind.F and op[1:] in self.offloaded:
                result.append(Op(Kind.O, *op[1:]))
        return tuple(result)
