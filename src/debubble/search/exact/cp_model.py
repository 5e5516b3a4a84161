"""The exact model: constraint programming with interval variables (CP-SAT).

Per (stage, micro-batch): F, the backward (I and W, or B), and as options O with L, and R.  Every lane is a no-overlap,
and every device's memory is limited (cp_memory.py).  Micro-batches that are alike keep their order: that of their first
forwards, and within each kind of a stage too where nothing is moved or recomputed.  There the names can be given anew
in the order of the starts; an O, L or R belongs to one forward and one backward, and the best order may turn two round.

Times and sizes are whole numbers of a grid, rounded in favour of the schedule, so that the bound always holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from debubble.ir import Kind, Lane, Number, Op, Schedule
from debubble.search.exact.cp_memory import Pair, Variables, limit_memory
from debubble.search.problem import OrderProblem

LAST = (Kind.W, Kind.B)
"""Kinds that end a micro-batch on its stage."""
LEADING = (Kind.O, Kind.I, Kind.B, Kind.R)
"""Kinds that may start before the end of what they stream with."""
GRID = 2**20
"""Steps that the longest time or the largest size is divided into where numbers are no fractions."""


def build(
    problem: OrderProblem,
    *,
    horizon: Number,
    weights: Collection[int] | None = None,
    whole: Collection[Pair] = (),
    ordered: bool = True,
    steps: int = GRID,
) -> ScheduleModel:
    """Build the model of all schedules that take at most `horizon`, of some of them, or of a relaxation.

    Args:
        problem: The operations to order.
        horizon: Latest end, in the costs' unit of time.
        weights: The devices where a W takes the lane, by default all; elsewhere it runs next to others, and for the
            memory it ends together with its I.
        whole: The (stage, micro-batch) pairs whose backward stays one operation; where backwards may be split, all
            others have an I and a W.
        ordered: Micro-batches that are equal keep their order, as far as that loses nothing.
        steps: Steps of the grid of times that are no fractions.
    """
    from ortools.sat.python import cp_model

    costs = problem.costs
    if not problem.split:
        whole = [(s, j) for s in range(problem.stages) for j in range(problem.micro_batches)]
    times = [
        _time(problem, Op(k, s, j), r)
        for s in range(problem.stages) for k in Kind for j in range(problem.slices) for r in (False, True)
    ]  # fmt: skip
    leads = [problem.longest_lead(Op(k, s, 0)) for s in range(problem.stages) for k in LEADING]
    unit = grid([*times, *leads, *costs.communication], steps)
    model = ScheduleModel(
        problem=problem,
        cp=cp_model.CpModel(),
        unit=unit,
        size_unit=grid([*costs.activation, *costs.activation_after_input, *costs.activation_recomputed]),
        horizon=math.ceil(horizon / unit),
        whole=frozenset(whole),
        weights=range(problem.devices) if weights is None else weights,
    )
    model.fill(ordered=ordered and problem.alike)
    return model


@dataclass(kw_only=True)
class ScheduleModel(Variables):
    """A CP-SAT model of a problem, with its variables by operation.

    Attributes:
        unit: Time of one step of the grid.
        weights: The devices where a W takes the lane.
        lanes: The intervals that exclude each other, by device, lane and peer.
        joined: Per (stage, micro-batch), whether its I and W are one B.
        objective: The variable that is minimised.
    """

    unit: Number
    weights: Collection[int]
    lanes: dict[tuple[int, Lane, int], list[Any]] = field(default_factory=dict)
    joined: dict[Pair, Any] = field(default_factory=dict)
    objective: Any = None

    def fill(self, *, ordered: bool) -> None:
        """Add all variables and constraints; `ordered` keeps the order of micro-batches."""
        problem = self.problem
        for stage in range(problem.stages):
            for j in range(problem.micro_batches):
                self._micro_batch(stage, j)
        self._messages()
        if ordered and problem.frees_memory:
            self._keep_order_of([lambda s, j: Op(Kind.F, s, j)], stages=1)
        elif ordered:
            self._keep_order_of([lambda s, j: Op(Kind.F, s, j), self.backward, self.weight], stages=problem.stages)
        if problem.slices > 1:
            self._keep_slices()
        for intervals in self.lanes.values():
            self.cp.add_no_overlap(intervals)
        for device in range(problem.devices):
            limit_memory(self, device, weights=device in self.weights, ordered=ordered)
        self.objective = self._objective()

    def _micro_batch(self, stage: int, j: int) -> None:
        problem = self.problem
        forward, backward = Op(Kind.F, stage, j), self.backward(stage, j)
        self._operation(forward)
        self._operation(backward)
        self.cp.add(self.starts[backward] >= self.ends[forward])
        weight = self.weight(stage, j)
        if weight != backward:
            self._operation(weight)
            self.cp.add(self.starts[weight] >= self.ends[backward])
        if problem.offload and self.size(Op(Kind.O, stage, j), 1):
            self._offload(forward, backward)
        if problem.recompute:
            self._recompute(forward, backward)

    def _offload(self, forward: Op, backward: Op) -> None:
        """O and L as options; with an R they take less time."""
        out, back = forward._replace(kind=Kind.O), forward._replace(kind=Kind.L)
        self._operation(out, optional=True)
        away = self.present[back] = self.present[out]
        self._operation(back, optional=True)
        whole = backward._replace(kind=Kind.B)
        early, late, latest = (self._steps(self.problem.longest_lead(op)) for op in (out, backward, whole))
        self.cp.add(self.starts[out] >= self.ends[forward] - early)
        self.cp.add(self.starts[back] >= self.ends[out]).only_enforce_if(away)
        self.cp.add(self.starts[backward] >= self.ends[back] - max(late, latest)).only_enforce_if(away)
        # Rounding gives away a step of the grid, but not the order of the starts.
        self.cp.add(self.starts[out] >= self.starts[forward])
        self.cp.add(self.starts[backward] >= self.starts[back]).only_enforce_if(away)
        if latest > late:
            # An I whose W follows at once may be a B, which may begin earlier.
            pair = forward[1:]
            joined = self.joined[pair] = self.cp.new_bool_var("")
            self.cp.add(self.starts[self.weight(*pair)] == self.ends[backward]).only_enforce_if(joined)
            self.cp.add(self.starts[backward] >= self.ends[back] - late).only_enforce_if(away, ~joined)

    def _recompute(self, forward: Op, backward: Op) -> None:
        """R as an option, after a reload if there is one."""
        again, back = forward._replace(kind=Kind.R), forward._replace(kind=Kind.L)
        self._operation(again, recomputed=True, optional=True)
        self.cp.add(self.starts[again] >= self.ends[forward])
        self.cp.add(self.starts[backward] >= self.ends[again]).only_enforce_if(self.present[again])
        if back in self.present:
            both = self.present[back], self.present[again]
            lead = self._steps(self.problem.longest_lead(again))
            self.cp.add(self.starts[again] >= self.ends[back] - lead).only_enforce_if(both)
            self.cp.add(self.starts[again] >= self.starts[back]).only_enforce_if(both)

    def _steps(self, lead: Number) -> int:
        """A lead in whole steps of the grid, rounded in favour of the schedule."""
        return math.ceil(lead / self.unit - 1e-9)

    def _operation(self, op: Op, *, recomputed: bool = False, optional: bool = False) -> None:
        """Start, end and (on a lane that counts) interval of an operation."""
        time = self._grid_time(op, recomputed=recomputed)
        start = self.starts[op] = self.cp.new_int_var(0, self.horizon, op.name)
        end = self.ends[op] = start + time
        device = self.problem.placement.device_of[op.stage]
        if op.kind is Kind.W and device not in self.weights:
            return
        key = self._lane(op.kind, device)
        if optional:
            literal = self._literal(op)
            saved = time - self._grid_time(op, recomputed=True) if self.problem.recompute else 0
            if op.kind in (Kind.O, Kind.L) and saved:
                end = self.ends[op] = self.cp.new_int_var(0, self.horizon, f"{op.name} ends")
                time -= saved * self._literal(op._replace(kind=Kind.R))
            interval = self.cp.new_optional_interval_var(start, time, end, literal, op.name)
            if op.kind is not Kind.O:
                # An absent operation has no start worth deciding.
                self.cp.add(start == self.horizon).only_enforce_if(~literal)
        else:
            interval = self.cp.new_fixed_size_interval_var(start, time, op.name)
            self.cp.add(end <= self.horizon)
        self.lanes.setdefault(key, []).append(interval)

    def _grid_time(self, op: Op, *, recomputed: bool) -> int:
        """The time of an operation in whole steps of the grid, rounded in favour of the schedule."""
        return math.floor(_time(self.problem, op, recomputed) / self.unit + 1e-9)

    def _literal(self, op: Op) -> Any:
        """The presence literal of an optional operation."""
        return self.present.setdefault(op, self.cp.new_bool_var(f"{op.name} there"))

    def _lane(self, kind: Kind, device: int) -> tuple[int, Lane, int]:
        if kind not in (Kind.O, Kind.L):
            return device, Lane.COMPUTE, 0
        costs = self.problem.costs
        shared = next((min(g) for g in costs.link_groups if device in g), device)
        return shared, Lane.D2H if kind is Kind.O or costs.host_link == "half-duplex" else Lane.H2D, 0

    def _messages(self) -> None:
        """Data between stages; an exclusive link carries one message at a time."""
        problem, costs, device_of = self.problem, self.problem.costs, self.problem.placement.device_of
        for s, j in itertools.product(range(problem.stages - 1), range(problem.micro_batches)):
            here, there = device_of[s], device_of[s + 1]
            scaled = 0 if here == there else costs.communication[s] * costs.scale_of(j)
            time = math.floor(scaled / self.unit + 1e-9)
            up = Op(Kind.F, s, j), Op(Kind.F, s + 1, j), (here, Lane.SEND, there)
            down = self.backward(s + 1, j), self.backward(s, j), (there, Lane.SEND, here)
            for op, then, link in (up, down):
                if costs.communication_model == "latency" or s in problem.asynchronous or not time:
                    self._sent_at(op, self.starts[then] - time)
                    continue
                sent = self.cp.new_int_var(0, self.horizon, "")
                self._sent_at(op, sent)
                self.cp.add(self.starts[then] >= sent + time)
                interval = self.cp.new_fixed_size_interval_var(sent, time, "")
                self.lanes.setdefault(link, []).append(interval)

    def _sent_at(self, op: Op, sent: Any) -> None:
        """A message is sent after its operation, which is all of a B where I and W are one."""
        self.cp.add(sent >= self.ends[op])
        joined = self.joined.get(op[1:]) if op.kind is Kind.I else None
        if joined is not None:
            self.cp.add(sent >= self.ends[op._replace(kind=Kind.W)]).only_enforce_if(joined)

    def _keep_order_of(self, kinds: Iterable[Callable[[int, int], Op]], *, stages: int) -> None:
        """Micro-batches that are alike pass these kinds of the first stages in their order."""
        for kind, stage, j in itertools.product(kinds, range(stages), range(self.problem.micro_batches - 1)):
            self.cp.add(self.starts[kind(stage, j + 1)] >= self.ends[kind(stage, j)])

    def _keep_slices(self) -> None:
        """The slices of a sequence go forwards in their order, and backwards in the opposite one."""
        for stage, j in itertools.product(range(self.problem.stages), range(self.problem.micro_batches)):
            if j % self.problem.slices:
                forwards = Op(Kind.F, stage, j - 1), Op(Kind.F, stage, j)
                backwards = self.backward(stage, j), self.backward(stage, j - 1)
                for before, after in (forwards, backwards):
                    self.cp.add(self.starts[after] >= self.ends[before])

    def _objective(self) -> Any:
        value = self.cp.new_int_var(0, self.horizon, "objective")
        if self.problem.objective == "makespan":
            for op, end in self.ends.items():
                if op.kind in LAST:
                    self.cp.add(value >= end)
        else:
            for device_stages in self.problem.placement.stages_of:
                first = self.starts[Op(Kind.F, device_stages[0], 0)]
                for op, end in self.ends.items():
                    if op.kind in LAST and op.stage in device_stages:
                        self.cp.add(value >= end - first)
        self.cp.minimize(value)
        return value


def _time(problem: OrderProblem, op: Op, recomputed: bool) -> Number:
    if op.kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.G, Kind.D, Kind.S, Kind.P):
        return 0
    return problem.op_costs.time(op, explicit=recomputed)


def grid(values: Iterable[Number], steps: int = GRID) -> Number:
    """The largest step of which all values are whole multiples, or a fine one if there are floats among them."""
    present = [v for v in values if v]
    if not present:
        return 1
    if all(isinstance(v, int | Fraction) or v.is_integer() for v in present):
        exact = [Fraction(v) for v in present]
        denominator = math.lcm(*(v.denominator for v in exact))
        step = Fraction(math.gcd(*(int(v * denominator) for v in exact)), denominator)
        return int(step) if step.denominator == 1 else step
    return max(present) / steps


def schedule_of(model: ScheduleModel, value: Any) -> Schedule:
    """The schedule of a solution; `value(variable)` reads it.

    Operations stand in the order of their starts, offloads in that of their ends: what comes after an offload in the
    list can count on the memory that it freed, and nothing has to wait for one that was still in flight.
    """
    problem = model.problem
    orders: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(problem.devices)]
    for variable, start in model.starts.items():
        op, end = variable, value(model.ends[variable])
        if op in model.present and not value(model.present[op]):
            continue
        if op[1:] in model.joined and value(model.joined[op[1:]]):
            if op.kind is Kind.W:
                continue
            op = op._replace(kind=Kind.B) if op.kind is Kind.I else op
        moment, rank = (end, 0) if op.kind is Kind.O else (value(start), 1 if op.kind is Kind.L else 2)
        orders[problem.placement.device_of[op.stage]].append((moment, rank, end, op))
    lists = (sorted(order, key=lambda e: (e[:3], e[3].stage, e[3].micro_batch)) for order in orders)
    schedule = problem.schedule([op for *_, op in order] for order in lists)
    return problem.with_link_orders(schedule, {op: value(start) for op, start in model.starts.items()})
