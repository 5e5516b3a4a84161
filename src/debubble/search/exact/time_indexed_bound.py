"""A bound for slow links: the first device alone, in slots of time, by how much of each kind has begun.

Micro-batches are alike and keep their order, so that a device's state at a moment is five numbers: how many F, I, W, O
and L have begun.  Its lanes, its memory and the round trip of a micro-batch then are linear in these numbers, and which
micro-batches leave memory is one literal each.  CP-SAT refutes one number of slots after the other.

Times are rounded down to whole slots, so that what is refuted for them is refuted for the device, and a problem whose
first device needs longer needs longer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from debubble.ir import Kind, Number, Op
from debubble.search.bounds import round_trip
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import grid
from debubble.search.problem import OrderProblem

KINDS = (Kind.F, Kind.I, Kind.W, Kind.O, Kind.L)
MOST_SLOTS = 200
"""Longest schedules, in slots, that are worth a try."""
STRIDE = 2
"""Slots from one number that is tried to the next: a refutation of less is time lost."""


@dataclass(frozen=True)
class _FirstDevice:
    """The first device, in whole slots and whole units of memory."""

    micro_batches: int
    time: Mapping[Kind, int]
    round_trip: int
    """Slots from the end of an F to the start of its I."""
    lead: Mapping[Kind, int]
    """Slots before the end of its F in which an O may start, or an I before that of its L."""
    allocated: Mapping[Kind, int]
    freed: Mapping[Kind, int]
    room: int
    half_duplex: bool


class Prover:
    """Raises a bound on the makespan.

    How far it is at a moment of the search depends on the machine, and only what it has proven when it has finished
    does not; a bound that meets a value earlier is the optimum, and so the same whenever it is asked.
    """

    def __init__(self, problem: OrderProblem, *, bound: Number, below: Number) -> None:
        self.bound = bound
        self._slot, self._below = _slot(problem), below
        self._device = None if self._slot is None else _device(problem, self._slot)
        self._solver: Any = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run(self, effort: Effort) -> None:
        """Refute one number of slots after the other, while the bound is below what some schedule takes."""
        if self._slot is None or self._device is None:
            return
        slots = math.ceil(self.bound / self._slot)
        while not self._stopped and slots < self._below / self._slot <= MOST_SLOTS and not effort.over:
            self._solver = solver_of(effort)
            if status_of(self._solver, _SlotModel(self._device, slots).cp, effort) != "INFEASIBLE":
                return
            self.bound = (slots + 1) * self._slot
            slots += STRIDE

    def start(self, effort: Effort) -> None:
        """Run in a thread of its own."""
        self._thread = threading.Thread(target=self.run, args=(effort,), daemon=True)
        self._thread.start()

    def finish(self) -> Number:
        """The bound when the effort is spent, or there is no more to prove."""
        if self._thread is not None:
            self._thread.join()
        return self.bound

    def stop(self) -> None:
        """End what runs."""
        self._stopped = True
        while self._thread is not None and self._thread.is_alive():
            if self._solver is not None:
                # Nothing happens where it has not begun yet.
                self._solver.stop_search()
            self._thread.join(0.02)


@contextmanager
def running_prover(problem: OrderProblem, *, bound: Number, below: Number, effort: Effort) -> Iterator[Prover]:
    """Let a prover work on a core of its own, until it has spent its effort or the context is left.

    `bound` is a lower bound that is known; some schedule takes `below`, so that the bound cannot be higher.
    """
    prover = Prover(problem, bound=bound, below=below)
    prover.start(effort)
    try:
        yield prover
    finally:
        prover.stop()


def _slot(problem: OrderProblem) -> Number | None:
    """The common step of the times; None for problems that this bound is not for.

    These have several chunks, unlike micro-batches, recomputation, whole backwards, a link that devices share, no
    offload, or times without a common step.
    """
    costs = problem.costs
    if problem.placement.chunks > 1 or not problem.alike or problem.recompute or not problem.split:
        return None
    if not problem.halves_cover_wholes:
        return None
    if not problem.offload or problem.fused_recompute or costs.link_groups or problem.objective == "span":
        return None
    times = [problem.op_costs.time(Op(kind, 0, 0)) for kind in KINDS]
    times += _leads(problem).values()
    return None if any(isinstance(t, float) and not t.is_integer() for t in times) else grid(times)


def _leads(problem: OrderProblem) -> dict[Kind, Number]:
    """How long before the end of its F an O may start, and before that of its L an I, or a B in its place."""
    return {Kind.O: problem.longest_lead(Op(Kind.O, 0, 0)), Kind.I: problem.backward_lead(0)}


def _device(problem: OrderProblem, slot: Number) -> _FirstDevice | None:
    costs, op_costs = problem.costs, problem.op_costs
    room = costs.room_of(problem.placement.device_of[0])
    if room is None:
        return None
    ops = {kind: Op(kind, 0, 0) for kind in KINDS}
    changes = {kind: (op_costs.allocates(op), op_costs.frees(op)) for kind, op in ops.items()}
    unit = grid(size for pair in changes.values() for size in pair)
    allocated, freed = ({kind: round(pair[side] / unit) for kind, pair in changes.items()} for side in (0, 1))
    return _FirstDevice(
        micro_batches=problem.micro_batches,
        time={kind: round(op_costs.time(op) / slot) for kind, op in ops.items()},
        round_trip=math.floor(round_trip(problem, 0) / slot + 1e-9),
        lead={kind: math.ceil(lead / slot - 1e-9) for kind, lead in _leads(problem).items()},
        allocated=allocated,
        freed=freed,
        room=math.floor(room / unit + 1e-9),
        half_duplex=costs.host_link == "half-duplex",
    )


class _SlotModel:
    """The CP-SAT model of one number of slots."""

    def __init__(self, device: _FirstDevice, slots: int) -> None:
        from ortools.sat.python import cp_model

        self.device, self.slots, self.cp = device, slots, cp_model.CpModel()
        self.begins = {kind: [self.cp.new_bool_var("") for _ in range(slots)] for kind in KINDS}
        self.counts = {kind: self._running(self.begins[kind]) for kind in KINDS}
        self.away = self._running([self.cp.new_bool_var("") for _ in range(device.micro_batches)])
        self._lanes()
        self._data()
        self._memory()
        self._identities()

    def _running(self, literals: list[Any]) -> list[Any]:
        """Count the literals that hold, up to each."""
        sums: list[Any] = []
        for literal in literals:
            total = self.cp.new_int_var(0, self.device.micro_batches, "")
            self.cp.add(total == (sums[-1] if sums else 0) + literal)
            sums.append(total)
        return sums

    def _begun(self, kind: Kind, slot: int) -> Any:
        """Count those that have begun by a slot, that slot included."""
        return self.counts[kind][slot] if slot >= 0 else 0

    def _ended(self, kind: Kind, slot: int) -> Any:
        """Count those that have ended before a slot."""
        return self._begun(kind, slot - self.device.time[kind])

    def _ended_soon(self, kind: Kind, slot: int, follower: Kind) -> Any:
        """Count those that end so soon after a slot that what follows them may start in it."""
        return self._begun(kind, min(slot - self.device.time[kind] + self.device.lead[follower], self.slots - 1))

    def _lanes(self) -> None:
        transfers = [(Kind.O, Kind.L)] if self.device.half_duplex else [(Kind.O,), (Kind.L,)]
        for kinds in ((Kind.F, Kind.I, Kind.W), *transfers):
            for slot in range(self.slots):
                running = (
                    begin
                    for kind in kinds
                    for begin in self.begins[kind][max(0, slot - self.device.time[kind] + 1) : slot + 1]
                )
                self.cp.add_at_most_one(running)
        for kind in (Kind.F, Kind.I, Kind.W):
            self.cp.add(self._ended(kind, self.slots) == self.device.micro_batches)
        for kind in (Kind.O, Kind.L):
            self.cp.add(self._ended(kind, self.slots) == self.away[-1])

    def _data(self) -> None:
        for slot in range(self.slots):
            self.cp.add(self._begun(Kind.I, slot) <= self._ended(Kind.F, slot - self.device.round_trip))
            self.cp.add(self._begun(Kind.W, slot) <= self._ended(Kind.I, slot))
            self.cp.add(self._begun(Kind.O, slot) <= self._ended_soon(Kind.F, slot, Kind.O))
            self.cp.add(self._begun(Kind.L, slot) <= self._ended(Kind.O, slot))

    def _memory(self) -> None:
        allocated, freed = self.device.allocated, self.device.freed
        for slot in range(self.slots):
            resident = sum(
                allocated[kind] * self._begun(kind, slot) - freed[kind] * self._ended(kind, slot) for kind in KINDS
            )
            self.cp.add(resident <= self.device.room)

    def _identities(self) -> None:
        """The k-th transfer is that of the k-th micro-batch that leaves: behind its F, and before its I."""
        for j in range(self.device.micro_batches):
            before = self.away[j - 1] if j else 0
            for slot in range(self.slots):
                left = self._reaches(self._ended_soon(Kind.F, slot, Kind.O), j + 1)
                if left is not None:
                    self.cp.add(self._begun(Kind.O, slot) <= before).only_enforce_if(~left)
                back = self._reaches(self._begun(Kind.I, slot), j + 1)
                if back is not None:
                    self.cp.add(self._ended_soon(Kind.L, slot, Kind.I) >= self.away[j]).only_enforce_if(back)

    def _reaches(self, count: Any, number: int) -> Any:
        """A literal for count >= number; None where a count is a constant."""
        if isinstance(count, int):
            return None
        literal = self.cp.new_bool_var("")
        self.cp.add(count >= number).only_enforce_if(literal)
        self.cp.add(count < number).only_enforce_if(~literal)
        return literal
