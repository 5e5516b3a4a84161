"""The exact model: constraint programming with interval variables (CP-SAT).

Per (stage, micro-batch): F, the backward (I and W, or B), and as options O with L, and R.  Every lane is a no-overlap,
every device's memory a cumulative over the intervals in which something is resident: from F's start to the backward's
end, or to the offload's end and again from the reload's start; then what W needs until W's end.  Micro-batches keep
their order within each kind of a stage, which loses nothing when they are alike.

Times and sizes are whole numbers of a grid, rounded in favour of the schedule, so that the bound always holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from debubble.ir import Kind, Lane, Number, Op, Schedule
from debubble.ir.effects import change, duration
from debubble.solver.problem import OrderProblem

GRID = 2**20
"""Steps that the longest time or the largest size is divided into where numbers are no fractions."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A CP-SAT model of a problem, with its variables by operation."""

    problem: OrderProblem
    cp: Any
    starts: Mapping[Op, Any]
    ends: Mapping[Op, Any]
    present: Mapping[Op, Any]
    """Presence literals of the optional operations."""
    objective: Any
    unit: Number
    """Time of one step of the grid."""


def build(problem: OrderProblem, *, horizon: Number, exact: Collection[int] | None = None) -> Model:
    """The model of all schedules that take at most `horizon`.

    `exact`: the devices whose lanes and memory count; the others are delays only, which makes a relaxation.
    """
    return _Builder(problem, horizon, range(problem.devices) if exact is None else exact).run()


@dataclass
class _Resident:
    """What lies in a device's memory: interval variables and their sizes."""

    intervals: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, interval: Any, size: int) -> None:
        if size:
            self.intervals.append(interval)
            self.sizes.append(size)


class _Builder:
    def __init__(self, problem: OrderProblem, horizon: Number, exact: Collection[int]) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.exact = problem, exact
        self.cp = cp_model.CpModel()
        costs = problem.costs
        pairs = [(s, j) for s in range(problem.stages) for j in range(problem.micro_batches)]
        kept = problem.schedule("kept", ())
        dropped = problem.schedule("dropped", (tuple(Op(Kind.R, *pair) for pair in pairs),))
        self.template = {False: kept, True: dropped}
        times = [self._time(Op(k, s, 0), r) for s in range(problem.stages) for k in Kind for r in (False, True)]
        self.unit = grid([*times, *costs.communication])
        self.size_unit = grid([*costs.activation, *costs.activation_after_input, *costs.activation_recomputed])
        self.horizon = math.ceil(horizon / self.unit)
        self.starts: dict[Op, Any] = {}
        self.ends: dict[Op, Any] = {}
        self.present: dict[Op, Any] = {}
        self.lanes: dict[tuple[int, Lane, int], list[Any]] = {}
        self.memory = [_Resident() for _ in range(problem.devices)]

    def run(self) -> Model:
        problem = self.problem
        for stage in range(problem.stages):
            for j in range(problem.micro_batches):
                self._micro_batch(stage, j)
        self._messages()
        if problem.costs.micro_batch_scale is None:
            self._keep_order()
        for intervals in self.lanes.values():
            self.cp.add_no_overlap(intervals)
        for device in self.exact:
            limit = problem.costs.limit_of(device)
            if limit is not None:
                room = math.floor((limit - problem.costs.static_of(device)) / self.size_unit + 1e-9)
                self.cp.add_cumulative(self.memory[device].intervals, self.memory[device].sizes, room)
        objective = self._objective()
        return Model(
            problem=problem, cp=self.cp, starts=self.starts, ends=self.ends, present=self.present,
            objective=objective, unit=self.unit,
        )  # fmt: skip

    def _micro_batch(self, stage: int, j: int) -> None:
        problem, device = self.problem, self.problem.placement.device_of[stage]
        counts, memory = device in self.exact, self.memory[device]
        backward = Op(Kind.I if problem.split else Kind.B, stage, j)
        forward = self._operation(Op(Kind.F, stage, j))
        self._operation(backward)
        self.cp.add(self.starts[backward] >= self.ends[forward])
        if problem.split:
            weight = self._operation(Op(Kind.W, stage, j))
            self.cp.add(self.starts[weight] >= self.ends[backward])
        if not counts:
            return
        if problem.split:
            memory.add(self._between(self.ends[backward], self.ends[weight]), self._size(weight, 1))
        memory.add(self._between(self.starts[backward], self.ends[backward]), self._size(backward, 0))
        moved = self._offload(stage, j, backward)
        kept, kept_at_least = self._size(forward, 0), self._size(forward, 0, recomputed=True)
        always = self._between(self.starts[forward], self.ends[backward])
        if not problem.recompute:
            memory.add(always, kept - moved)
            return
        memory.add(always, kept_at_least)
        recompute = Op(Kind.R, stage, j)
        literal = self._operation(recompute, recomputed=True, optional=True)
        self.cp.add(self.starts[recompute] >= self.ends[forward])
        self.cp.add(self.starts[backward] >= self.ends[recompute]).only_enforce_if(self.present[literal])
        dropped, is_present = kept - kept_at_least, self.present[recompute]
        memory.add(self._between(self.starts[forward], self.ends[backward], unless=[is_present, *self._away(stage, j)]),
                   dropped)  # fmt: skip
        memory.add(self._between(self.starts[recompute], self.ends[backward], when=is_present), dropped)

    def _offload(self, stage: int, j: int, backward: Op) -> int:
        """O and L as options; returns the size of what they take out of the way."""
        problem, memory = self.problem, self.memory[self.problem.placement.device_of[stage]]
        moved = self._size(Op(Kind.O, stage, j), 1) if problem.offload else 0
        if not moved:
            return 0
        out, back, forward = Op(Kind.O, stage, j), Op(Kind.L, stage, j), Op(Kind.F, stage, j)
        self._operation(out, optional=True)
        away = self.present[back] = self.present[out]
        self._operation(back, optional=True)
        self.cp.add(self.starts[out] >= self.ends[forward])
        self.cp.add(self.starts[back] >= self.ends[out]).only_enforce_if(away)
        self.cp.add(self.starts[backward] >= self.ends[back]).only_enforce_if(away)
        stays, goes, comes = (self.starts[forward], self.ends[backward]), self.ends[out], self.starts[back]
        if not problem.recompute:
            memory.add(self._between(*stays, unless=[away]), moved)
        memory.add(self._between(stays[0], goes, when=away), moved)
        memory.add(self._between(comes, stays[1], when=away), moved)
        return moved

    def _away(self, stage: int, j: int) -> list[Any]:
        out = Op(Kind.O, stage, j)
        return [self.present[out]] if out in self.present else []

    def _operation(self, op: Op, *, recomputed: bool = False, optional: bool = False) -> Op:
        """Start, end and (on a lane that counts) interval of an operation."""
        time = math.floor(self._time(op, recomputed) / self.unit + 1e-9)
        start = self.starts[op] = self.cp.new_int_var(0, self.horizon, op.name)
        end = self.ends[op] = start + time
        device = self.problem.placement.device_of[op.stage]
        if device not in self.exact:
            return op
        key = self._lane(op.kind, device)
        if optional:
            literal = self.present.setdefault(op, self.cp.new_bool_var(f"{op.name} there"))
            interval = self.cp.new_optional_fixed_size_interval_var(start, time, literal, op.name)
            # An absent operation has no start worth deciding.
            self.cp.add(start == self.horizon).only_enforce_if(~literal) if op.kind is not Kind.O else None
        else:
            interval = self.cp.new_fixed_size_interval_var(start, time, op.name)
        self.lanes.setdefault(key, []).append(interval)
        self.cp.add(end <= self.horizon) if not optional else None
        return op

    def _lane(self, kind: Kind, device: int) -> tuple[int, Lane, int]:
        if kind not in (Kind.O, Kind.L):
            return device, Lane.COMPUTE, 0
        costs = self.problem.costs
        shared = next((min(g) for g in costs.link_groups if device in g), device)
        return shared, Lane.D2H if kind is Kind.O or costs.host_link == "half-duplex" else Lane.H2D, 0

    def _between(self, start: Any, end: Any, *, when: Any = None, unless: Iterable[Any] = ()) -> Any:
        """The interval between two moments, there if `when` and none of `unless` hold."""
        excluded = list(unless)
        length = self.cp.new_int_var(0, self.horizon, "")
        if when is None and not excluded:
            return self.cp.new_interval_var(start, length, end, "")
        literal = when
        if literal is None:
            literal = ~excluded[0] if len(excluded) == 1 else self._none_of(excluded)
        return self.cp.new_optional_interval_var(start, length, end, literal, "")

    def _none_of(self, literals: list[Any]) -> Any:
        none = self.cp.new_bool_var("")
        self.cp.add_bool_or([none, *literals])
        for literal in literals:
            self.cp.add_implication(none, ~literal)
        return none

    def _messages(self) -> None:
        """Data between stages; an exclusive link carries one message at a time."""
        problem, costs, device_of = self.problem, self.problem.costs, self.problem.placement.device_of
        backward = Kind.I if problem.split else Kind.B
        for s in range(problem.stages - 1):
            here, there = device_of[s], device_of[s + 1]
            for j in range(problem.micro_batches):
                scaled = 0 if here == there else costs.communication[s] * costs.scale_of(j)
                time = math.floor(scaled / self.unit + 1e-9)
                up, down = Op(Kind.F, s, j), Op(backward, s + 1, j)
                for op, then, link in (
                    (up, Op(Kind.F, s + 1, j), (here, there)),
                    (down, Op(backward, s, j), (there, here)),
                ):
                    if costs.communication_model == "latency" or not time:
                        self.cp.add(self.starts[then] >= self.ends[op] + time)
                        continue
                    sent = self.cp.new_int_var(0, self.horizon, "")
                    self.cp.add(sent >= self.ends[op])
                    self.cp.add(self.starts[then] >= sent + time)
                    interval = self.cp.new_fixed_size_interval_var(sent, time, "")
                    self.lanes.setdefault((link[0], Lane.SEND, link[1]), []).append(interval)

    def _keep_order(self) -> None:
        """Micro-batches that are alike pass each kind of each stage in their order."""
        problem = self.problem
        for op, start in self.starts.items():
            following = Op(op.kind, op.stage, op.micro_batch + 1)
            if op.kind in (Kind.F, Kind.I, Kind.B, Kind.W) and following in self.starts:
                counts = problem.placement.device_of[op.stage] in self.exact
                self.cp.add(self.starts[following] >= (self.ends[op] if counts else start))

    def _objective(self) -> Any:
        value = self.cp.new_int_var(0, self.horizon, "objective")
        last = Kind.W if self.problem.split else Kind.B
        if self.problem.objective == "makespan":
            for op, end in self.ends.items():
                if op.kind is last:
                    self.cp.add(value >= end)
        else:
            for device, held in enumerate(self.problem.placement.stages_of):
                first = self.starts[Op(Kind.F, held[0], 0)]
                for op, end in self.ends.items():
                    if op.kind is last and op.stage in held and device in self.exact:
                        self.cp.add(value >= end - first)
        self.cp.minimize(value)
        return value

    def _time(self, op: Op, recomputed: bool) -> Number:
        if op.kind in (Kind.O, Kind.L) and self.problem.costs.offload is None:
            return 0
        if op.kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.G, Kind.D, Kind.S, Kind.P):
            return 0
        return duration(self.template[recomputed], self.problem.costs, op, Lane.COMPUTE)

    def _size(self, op: Op, which: int, *, recomputed: bool = False) -> int:
        """Bytes that an operation allocates (which = 0) or frees (1), in steps of the grid."""
        size = change(self.template[recomputed], self.problem.costs, op)[which]
        return math.floor(size / self.size_unit + 1e-9)


def grid(values: Iterable[Number]) -> Number:
    """The largest step of which all values are whole multiples, or a fine one if there are floats among them."""
    present = [v for v in values if v]
    if not present:
        return 1
    if all(isinstance(v, int | Fraction) or v.is_integer() for v in present):
        exact = [Fraction(v) for v in present]
        denominator = math.lcm(*(v.denominator for v in exact))
        step = Fraction(math.gcd(*(int(v * denominator) for v in exact)), denominator)
        return int(step) if step.denominator == 1 else step
    return max(present) / GRID


def schedule_of(model: Model, value: Any) -> Schedule:
    """The schedule of a solution; `value(variable)` reads it.

    Operations stand in the order of their starts, offloads in that of their ends: what comes after an offload in the
    list can count on the memory that it freed, and nothing has to wait for one that was still in flight.
    """
    problem = model.problem
    orders: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(problem.devices)]
    for op, start in model.starts.items():
        if op in model.present and not value(model.present[op]):
            continue
        moment, rank = (value(model.ends[op]), 0) if op.kind is Kind.O else (value(start), 1)
        if op.kind is not Kind.O and op.kind is not Kind.L:
            rank = 2
        orders[problem.placement.device_of[op.stage]].append((moment, rank, value(model.ends[op]), op))
    lists = tuple(tuple(op for *_, op in sorted(order, key=lambda e: (e[:3], e[3].stage, e[3].micro_batch)))
                  for order in orders)  # fmt: skip
    return problem.schedule("searched", lists)
