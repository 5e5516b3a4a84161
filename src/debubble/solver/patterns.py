"""Periodic patterns (modulo scheduling), for large m: what one micro-batch does, repeated every period.

Per device, an operation of micro-batch j starts j periods after that of micro-batch 0.  Lanes must be exclusive and
memory must suffice modulo the period, in the steady state where micro-batches overlap; the way up and down holds less.
CP-SAT finds the starts, for the shortest period that works and within it the shortest way of a micro-batch; unrolling
gives a schedule that the search then compacts at both ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from debubble.ir import Kind, Number, Op, Schedule
from debubble.ir.effects import change, duration
from debubble.ir.ops import Lane
from debubble.solver.cp_model import grid
from debubble.solver.problem import OrderProblem

STRETCH = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""Periods that are tried, as multiples of the least possible one."""


@dataclass(frozen=True)
class Pattern:
    """Starts of micro-batch 0's operations (ends of its offloads), and the period, in steps of `unit`."""

    moments: dict[Op, int]
    period: int
    unit: Number

    @property
    def depth(self) -> int:
        """Periods from a micro-batch's forward to its last operation on the same device, begun ones counted."""
        spans = (moment - self.moments[Op(Kind.F, op.stage, 0)] for op, moment in self.moments.items())
        return max(spans) // self.period + 1


def periodic(problem: OrderProblem, *, seconds: float, seed: int = 0) -> Schedule | None:
    """The unrolled schedule of the shortest period found."""
    pattern = next(patterns(problem, 1, seconds=seconds, seed=seed), None)
    return None if pattern is None else unrolled(problem, pattern)


def patterns(problem: OrderProblem, number: int, *, seconds: float, seed: int = 0) -> Iterator[Pattern]:
    """Up to `number` patterns with the shortest period found, each a period longer under way than the one before.

    For linear placements, alike micro-batches, asynchronous messages and a full-duplex host link; none for others.
    """
    costs = problem.costs
    if problem.placement.chunks > 1 or costs.micro_batch_scale is not None or problem.recompute:
        return
    if costs.communication_model != "latency" or costs.link_groups or costs.host_link == "half-duplex":
        return
    for stretch in STRETCH:
        first = _Model(problem, stretch).solve(seconds / 4, seed)
        if first is None:
            continue
        yield first
        shortest = _under_way(first)
        for more in range(1, number):
            model = _Model(problem, stretch, least=shortest + more * first.period)
            longer = model.solve(seconds / (2 * number), seed)
            if longer is not None:
                yield longer
        return


def _under_way(pattern: Pattern) -> int:
    """From the first device's forward to its backward."""
    backward = min(moment for op, moment in pattern.moments.items() if op.stage == 0 and op.kind in (Kind.I, Kind.B))
    return backward - pattern.moments[Op(Kind.F, 0, 0)]


def unrolled(problem: OrderProblem, pattern: Pattern) -> Schedule:
    """The schedule in which every micro-batch follows the pattern."""
    orders: list[list[tuple[int, int, Op]]] = [[] for _ in range(problem.devices)]
    for op, moment in pattern.moments.items():
        rank = 0 if op.kind is Kind.O else 1 if op.kind is Kind.L else 2
        orders[problem.placement.device_of[op.stage]].extend(
            (moment + j * pattern.period, rank, op._replace(micro_batch=j)) for j in range(problem.micro_batches)
        )
    lists = [sorted(order, key=lambda entry: (entry[0], entry[1], entry[2].micro_batch)) for order in orders]
    return problem.schedule("searched", tuple(tuple(op for *_, op in order) for order in lists))


class _Model:
    """The CP-SAT model of one period."""

    def __init__(self, problem: OrderProblem, stretch: float, *, least: int = 0) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.cp, self.least, costs = problem, cp_model.CpModel(), least, problem.costs
        self.compute = (Kind.F, Kind.I, Kind.W) if problem.split else (Kind.F, Kind.B)
        self.transfers = (Kind.O, Kind.L) if problem.offload else ()
        self.template = problem.schedule("pattern", ())
        kinds, stages = (*self.compute, *self.transfers), range(problem.stages)
        self.unit = grid([*(self._duration(k, s) for k in kinds for s in stages), *costs.communication])
        self.time = {(k, s): math.ceil(self._duration(k, s) / self.unit - 1e-9) for k in kinds for s in stages}
        self.message = [math.ceil(c / self.unit - 1e-9) for c in costs.communication]
        self.period = math.ceil(max(sum(self.time[k, s] for k in self.compute) for s in stages) * stretch)
        self.horizon = least + 2 * (sum(self.time.values()) + 2 * sum(self.message)) + 4 * self.period
        self.at = {Op(k, s, 0): self.cp.new_int_var(0, self.horizon, "") for k in kinds for s in stages}
        self.away = [self.cp.new_bool_var("") for _ in stages]

    def solve(self, seconds: float, seed: int) -> Pattern | None:
        """The pattern with the shortest way of a micro-batch, or None if none was found in time."""
        from ortools.sat.python import cp_model

        for stage in range(self.problem.stages):
            self._data(stage)
            for kinds in (self.compute, *((kind,) for kind in self.transfers)):
                self._lane(stage, kinds)
            self._memory(stage)
        self.cp.add(self.at[Op(self.compute[1], 0, 0)] - self.at[Op(Kind.F, 0, 0)] >= self.least)
        self.cp.minimize(self.at[Op(self.compute[1], 0, 0)] - self.at[Op(Kind.F, 0, 0)])
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        if solver.status_name(solver.solve(self.cp)) not in ("OPTIMAL", "FEASIBLE"):
            return None
        return Pattern(
            {
                op: solver.value(start) + (self.time[Kind.O, op.stage] if op.kind is Kind.O else 0)
                for op, start in self.at.items()
                if op.kind in self.compute or solver.value(self.away[op.stage])
            },
            self.period,
            self.unit,
        )

    def _duration(self, kind: Kind, stage: int) -> Number:
        return duration(self.template, self.problem.costs, Op(kind, stage, 0), Lane.COMPUTE)

    def _end(self, kind: Kind, stage: int) -> Any:
        return self.at[Op(kind, stage, 0)] + self.time[kind, stage]

    def _data(self, s: int) -> None:
        """Dependencies of one micro-batch."""
        backward = self.compute[1]
        for kind, then in itertools.pairwise(self.compute):
            self.cp.add(self.at[Op(then, s, 0)] >= self._end(kind, s))
        if s + 1 < self.problem.stages:
            self.cp.add(self.at[Op(Kind.F, s + 1, 0)] >= self._end(Kind.F, s) + self.message[s])
            self.cp.add(self.at[Op(backward, s, 0)] >= self._end(backward, s + 1) + self.message[s])
        if self.transfers:
            self.cp.add(self.at[Op(Kind.O, s, 0)] >= self._end(Kind.F, s))
            self.cp.add(self.at[Op(Kind.L, s, 0)] >= self._end(Kind.O, s)).only_enforce_if(self.away[s])
            self.cp.add(self.at[Op(backward, s, 0)] >= self._end(Kind.L, s)).only_enforce_if(self.away[s])

    def _lane(self, s: int, kinds: tuple[Kind, ...]) -> None:
        """No two operations of a lane at the same time, modulo the period."""
        reference, intervals = self.at[Op(kinds[0], s, 0)], []
        for kind in kinds:
            phase, _ = self._modulo(self.at[Op(kind, s, 0)] - reference)
            fits = self.cp.add(phase + self.time[kind, s] <= self.period)
            if kind in self.transfers:
                fits.only_enforce_if(self.away[s])
            intervals.append(self.cp.new_fixed_size_interval_var(phase, self.time[kind, s], ""))
        self.cp.add_no_overlap(intervals)

    def _memory(self, s: int) -> None:
        """What is resident whenever memory is taken: each change counts once for every period up to that moment."""
        costs, device = self.problem.costs, self.problem.placement.device_of[s]
        limit = costs.limit_of(device)
        if limit is None:
            return
        changes = {kind: change(self.template, costs, Op(kind, s, 0)) for kind in (*self.compute, *self.transfers)}
        unit = grid([size for pair in changes.values() for size in pair])
        room = math.floor((limit - costs.static_of(device)) / unit + 1e-9)
        for taker, (taken, _) in changes.items():
            if not taken:
                continue
            held = [
                round(size / unit) * self._count(self.at[Op(taker, s, 0)] - when, kind, s)
                for kind, (allocated, freed) in changes.items()
                for size, when in ((allocated, self.at[Op(kind, s, 0)]), (-freed, self._end(kind, s)))
                if size
            ]
            fits = self.cp.add(sum(held) <= room)
            if taker in self.transfers:
                fits.only_enforce_if(self.away[s])

    def _count(self, since: Any, kind: Kind, s: int) -> Any:
        """How often something has happened that first did so `since` ago; never for a transfer that is not there."""
        _, turns = self._modulo(since)
        if kind not in self.transfers:
            return turns + 1
        counted = self.cp.new_int_var(-self.horizon, self.horizon, "")
        self.cp.add(counted == turns + 1).only_enforce_if(self.away[s])
        self.cp.add(counted == 0).only_enforce_if(~self.away[s])
        return counted

    def _modulo(self, value: Any) -> tuple[Any, Any]:
        """(phase, turns) with value = turns x period + phase."""
        phase = self.cp.new_int_var(0, self.period - 1, "")
        most = 2 * self.horizon // self.period + 1
        turns = self.cp.new_int_var(-most, most, "")
        self.cp.add(value == turns * self.period + phase)
        return phase, turns
