"""Periodic patterns (modulo scheduling), for large m: what a few micro-batches do, repeated every period.

Per device, an operation of micro-batch j + step starts a period after that of micro-batch j.  Lanes must be exclusive
and memory must suffice modulo the period, in the steady state where micro-batches overlap; the way up and down holds
less.  CP-SAT finds the starts, for the shortest period that works and within it the shortest way of a micro-batch;
unrolling gives a schedule that the search then compacts at both ends.

Mostly one micro-batch a period is enough.  Where the host link is too slow to move every micro-batch in the time that
one takes, it pays to move two of three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from debubble.ir import Kind, Number, Op, Schedule
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import grid
from debubble.search.exact.tight_memory import with_late_release
from debubble.search.problem import OrderProblem

STRETCH = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""Periods that are tried, as multiples of the least possible one."""
STRETCH_OF_CHUNKS = (1.1, 32 / 30, 31 / 30, 1.0)
"""Those that are tried with several chunks per device, as long as there is a pattern."""
STEPS = (1, 3, 2)
"""Micro-batches of a period that are tried where one takes longer than its work."""
TRIES = 4
"""Periods that are tried for each."""
EVEN = 10
"""Steps of every F, I and W where a pattern of several chunks is sought."""


@dataclass(frozen=True)
class Pattern:
    """Starts of the first micro-batches' operations (ends of their offloads), and the period, in steps of `unit`."""

    moments: dict[Op, int]
    period: int
    unit: Number
    step: int = 1
    """Micro-batches of a period."""

    @property
    def depth(self) -> int:
        """Periods from a micro-batch's forward to its last operation on the same device, begun ones counted."""
        spans = (moment - self.moments[op._replace(kind=Kind.F)] for op, moment in self.moments.items())
        return max(spans) // self.period + 1

    @property
    def time(self) -> float:
        """Time of a micro-batch, in the costs' unit."""
        return float(self.period * self.unit / self.step)


def find_patterns(problem: OrderProblem, number: int, *, effort: Effort, seed: int = 0) -> Iterator[Pattern]:
    """Find up to `number` patterns with the shortest period, each a period longer under way than the one before.

    Only for linear placements, equal micro-batches, asynchronous messages and a full-duplex host link there are any.
    """
    costs = problem.costs
    if problem.placement.chunks > 1 or not problem.alike or problem.recompute:
        return
    if costs.communication_model != "latency" or costs.link_groups or costs.host_link == "half-duplex":
        return
    times, seconds = StageTimes.of(problem), effort.left
    for period in (math.ceil(times.work * stretch - 1e-9) for stretch in STRETCH):
        first = ModuloModel(problem, times, period).solve(effort.part(seconds / 4), seed)
        if first is None:
            if effort.over:
                return
            continue
        if period > times.work:
            faster = _faster(problem, times, first, effort=effort, seed=seed)
            if faster is not None:
                yield faster
                return
        yield first
        # Steps from the first device's forward to its backward.
        backward = Kind.I if problem.split else Kind.B
        shortest = first.moments[Op(backward, 0, 0)] - first.moments[Op(Kind.F, 0, 0)]
        for more in range(1, number):
            model = ModuloModel(problem, times, period, least=shortest + more * period)
            longer = model.solve(effort.part(seconds / (2 * number)), seed)
            if longer is not None:
                yield longer
        return


def find_pattern_of_chunks(problem: OrderProblem, *, effort: Effort, seed: int = 0) -> Pattern | None:
    """Find a pattern of several chunks per device, of a short period if every F, I and W took equally long.

    What it repeats fits the memory of the problem, whatever the times are, and recomputes nothing.  None if none was
    found, where micro-batches differ, and where activations may go to the host.
    """
    costs = problem.costs
    if not problem.split or problem.offload or not problem.alike:
        return None
    mean = sum(map(costs.work, range(problem.stages))) / (3 * problem.stages)
    message = [round(EVEN * time / mean) for time in costs.communication]
    even = costs.replace(forward=EVEN, backward_input=EVEN, backward_weight=EVEN, communication=message)
    # Room for a W that comes late is room for moves: the search makes more of such patterns.
    coarse = with_late_release(replace(problem, costs=even))
    times, best = StageTimes.of(coarse), None
    for period in (math.ceil(times.work * stretch - 1e-9) for stretch in STRETCH_OF_CHUNKS):
        model = ModuloModel(coarse, times, period)
        found = model.solve(effort.part(effort.left / 2), seed, shortest=False)
        if found is None:
            break
        best = found
    return best


def _faster(problem: OrderProblem, times: StageTimes, than: Pattern, *, effort: Effort, seed: int) -> Pattern | None:
    """Find a pattern whose micro-batches take less time than those of another."""
    best, tries = None, len(STEPS) * TRIES
    for step in STEPS:
        low, high = step * times.work, math.ceil((than if best is None else best).time * step / than.unit) - 1
        for _ in range(TRIES):
            if low <= high:
                # Where there is none it takes all the time to find none: most are tried near those that are known.
                period = high - (high - low) // 4
                model = ModuloModel(problem, times, period, step=step)
                faster = model.solve(effort.part(effort.left / tries), seed)
                if faster is None:
                    low = period + 1
                else:
                    best, high = faster, period - 1
            tries -= 1
    return best


def unroll(problem: OrderProblem, pattern: Pattern) -> Schedule:
    """Let every micro-batch of the problem follow the pattern."""
    orders: list[list[tuple[int, int, Op]]] = [[] for _ in range(problem.devices)]
    for op, moment in pattern.moments.items():
        rank = 0 if op.kind is Kind.O else 1 if op.kind is Kind.L else 2
        orders[problem.placement.device_of[op.stage]].extend(
            (moment + j // pattern.step * pattern.period, rank, op._replace(micro_batch=j))
            for j in range(op.micro_batch, problem.micro_batches, pattern.step)
        )
    lists = [sorted(order, key=lambda entry: (entry[0], entry[1], entry[2].micro_batch)) for order in orders]
    return problem.schedule([op for *_, op in order] for order in lists)


@dataclass(frozen=True)
class StageTimes:
    """The operations of a micro-batch, and their times in steps of `unit`."""

    compute: tuple[Kind, ...]
    transfers: tuple[Kind, ...]
    unit: Number
    time: dict[tuple[Kind, int], int]
    """Durations by kind and stage."""
    message: tuple[int, ...]
    work: int
    """Work of the busiest device: no period is shorter."""

    @staticmethod
    def of(problem: OrderProblem) -> StageTimes:
        """Round the problem's times up to steps of their grid."""
        costs, stages = problem.costs, range(problem.stages)
        compute = (Kind.F, Kind.I, Kind.W) if problem.split else (Kind.F, Kind.B)
        transfers = (Kind.O, Kind.L) if problem.offload else ()
        exact = {(kind, s): problem.op_costs.time(Op(kind, s, 0)) for kind in (*compute, *transfers) for s in stages}
        unit = grid([*exact.values(), *costs.communication])
        steps = {key: math.ceil(time / unit - 1e-9) for key, time in exact.items()}
        within = [a == b for a, b in itertools.pairwise(problem.placement.device_of)]
        message = tuple(
            0 if s < len(within) and within[s] else math.ceil(time / unit - 1e-9)
            for s, time in enumerate(costs.communication)
        )
        work = max(sum(steps[kind, s] for kind in compute for s in own) for own in problem.placement.stages_of)
        return StageTimes(compute, transfers, unit, steps, message, work)


class ModuloModel:
    """The CP-SAT model of one period."""

    def __init__(self, problem: OrderProblem, times: StageTimes, period: int, *, least: int = 0, step: int = 1) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.cp, self.period, self.least = problem, cp_model.CpModel(), period, least
        self.unit, self.time, self.message = times.unit, times.time, times.message
        self.compute, self.transfers = times.compute, times.transfers
        self.op_costs = problem.op_costs
        kinds, stages = (*self.compute, *self.transfers), range(problem.stages)
        way = sum(self.time[k, s] for k in self.compute[:2] for s in stages) + 2 * sum(self.message)
        aside = max(sum(self.time[k, s] for k in (*self.compute[2:], *self.transfers)) for s in stages)
        # The longer several micro-batches may take, the longer CP-SAT takes to find, or not to find, where they are.
        self.horizon = way + aside + self.period if step > 1 else least + 2 * (way + aside) + 4 * self.period
        self.own = range(step)
        self.at = {
            Op(k, s, j): self.cp.new_int_var(0, self.horizon, "") for k in kinds for s in stages for j in self.own
        }
        self.away = {(s, j): self.cp.new_bool_var("") for s in stages for j in self.own}

    def solve(self, effort: Effort, seed: int, *, shortest: bool = True) -> Pattern | None:
        """Find the pattern with the shortest way of a micro-batch, or just any; None if none was found."""
        for device, own in enumerate(self.problem.placement.stages_of):
            for stage in own:
                for j in self.own:
                    self._data(stage, j)
            for kinds in (self.compute, *((kind,) for kind in self.transfers)):
                self._lane(device, kinds)
            for stage in own:
                self._in_turn(stage)
            self._memory(device)
        self.cp.add(self.at[Op(Kind.F, 0, 0)] == 0)
        ways = [self.at[Op(self.compute[1], 0, j)] - self.at[Op(Kind.F, 0, j)] for j in self.own]
        self.cp.add(ways[0] >= self.least)
        if len(ways) == 1 and shortest:
            self.cp.minimize(ways[0])
        solver = solver_of(effort, seed=seed)
        # Relaxations say little of lanes modulo a period, and probing takes longer than the search.
        solver.parameters.linearization_level = 0
        solver.parameters.cp_model_probing_level = 0
        if status_of(solver, self.cp, effort) not in ("OPTIMAL", "FEASIBLE"):
            return None
        return Pattern(
            {
                op: solver.value(start) + (self.time[Kind.O, op.stage] if op.kind is Kind.O else 0)
                for op, start in self.at.items()
                if op.kind in self.compute or solver.value(self.away[op.stage, op.micro_batch])
            },
            self.period,
            self.unit,
            len(self.own),
        )

    def _end(self, kind: Kind, s: int, j: int) -> Any:
        return self.at[Op(kind, s, j)] + self.time[kind, s]

    def _data(self, s: int, j: int) -> None:
        """Dependencies of one micro-batch."""
        backward = self.compute[1]
        for kind, then in itertools.pairwise(self.compute):
            self.cp.add(self.at[Op(then, s, j)] >= self._end(kind, s, j))
        if s + 1 < self.problem.stages:
            self.cp.add(self.at[Op(Kind.F, s + 1, j)] >= self._end(Kind.F, s, j) + self.message[s])
            self.cp.add(self.at[Op(backward, s, j)] >= self._end(backward, s + 1, j) + self.message[s])
        if self.transfers:
            out, back = (
                math.floor(self.op_costs.lead(Op(kind, s, 0)) / self.unit + 1e-9) for kind in (Kind.O, backward)
            )
            self.cp.add(self.at[Op(Kind.O, s, j)] >= self._end(Kind.F, s, j) - out)
            self.cp.add(self.at[Op(Kind.L, s, j)] >= self._end(Kind.O, s, j)).only_enforce_if(self.away[s, j])
            read = self.cp.add(self.at[Op(backward, s, j)] >= self._end(Kind.L, s, j) - back)
            read.only_enforce_if(self.away[s, j])
            for kind in self.transfers:
                # One place for what is not there.
                absent = self.cp.add(self.at[Op(kind, s, j)] == self._end(Kind.F, s, j))
                absent.only_enforce_if(~self.away[s, j])

    def _in_turn(self, s: int) -> None:
        """Micro-batches keep their order."""
        for kind in self.compute:
            for j in self.own[1:]:
                self.cp.add(self.at[Op(kind, s, j)] >= self._end(kind, s, j - 1))
            self.cp.add(self.at[Op(kind, s, 0)] + self.period >= self._end(kind, s, self.own[-1]))

    def _lane(self, device: int, kinds: tuple[Kind, ...]) -> None:
        """Require that no two operations of a lane run at the same time, modulo the period."""
        intervals = []
        for s, kind, j in itertools.product(self.problem.placement.stages_of[device], kinds, self.own):
            phase, _ = self._modulo(self.at[Op(kind, s, j)])
            length = self.time[kind, s]
            # Twice, for those that end in the next period.
            for start in (phase, phase + self.period):
                if kind in self.transfers:
                    away = self.away[s, j]
                    intervals.append(self.cp.new_optional_fixed_size_interval_var(start, length, away, ""))
                else:
                    intervals.append(self.cp.new_fixed_size_interval_var(start, length, ""))
        self.cp.add_no_overlap(intervals)

    def _memory(self, device: int) -> None:
        """Limit what is resident whenever memory is taken: a change counts once for every period up to that moment."""
        free, own = self.problem.costs.room_of(device), self.problem.placement.stages_of[device]
        if free is None:
            return
        ops = [Op(kind, s, 0) for s in own for kind in (*self.compute, *self.transfers)]
        changes = {op: (self.op_costs.allocates(op), self.op_costs.frees(op)) for op in ops}
        unit = grid([size for pair in changes.values() for size in pair])
        room = math.floor(free / unit + 1e-9)
        for (taker, (taken, _)), j in itertools.product(changes.items(), self.own):
            if not taken:
                continue
            now = self.at[taker._replace(micro_batch=j)]
            resident = [
                round(size / unit) * self._count(now - when, op.kind, op.stage, other)
                for (op, (allocated, freed)), other in itertools.product(changes.items(), self.own)
                for size, when in (
                    (allocated, self.at[op._replace(micro_batch=other)]),
                    (-freed, self._end(op.kind, op.stage, other)),
                )
                if size
            ]
            fits = self.cp.add(sum(resident) <= room)
            if taker.kind in self.transfers:
                fits.only_enforce_if(self.away[taker.stage, j])
        if len(own) > 1 and not self.transfers:
            # What follows from these, and what the solver does not see: the area under the memory of a period.
            area = [
                -round(allocated / unit) * self.at[op] + round(freed / unit) * self._end(op.kind, op.stage, 0)
                for op, (allocated, freed) in changes.items()
            ]
            self.cp.add(sum(area) <= room * self.period)

    def _count(self, since: Any, kind: Kind, s: int, j: int) -> Any:
        """Count how often something has happened that first did so `since` ago; 0 for a transfer that is not there."""
        _, turns = self._modulo(since)
        if kind not in self.transfers:
            return turns + 1
        counted = self.cp.new_int_var(-self.horizon, self.horizon, "")
        self.cp.add(counted == turns + 1).only_enforce_if(self.away[s, j])
        self.cp.add(counted == 0).only_enforce_if(~self.away[s, j])
        return counted

    def _modulo(self, value: Any) -> tuple[Any, Any]:
        """(phase, turns) with value = turns x period + phase."""
        phase = self.cp.new_int_var(0, self.period - 1, "")
        most = 2 * self.horizon // self.period + 1
        turns = self.cp.new_int_var(-most, most, "")
        self.cp.add(value == turns * self.period + phase)
        return phase, turns
