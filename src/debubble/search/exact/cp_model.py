"""The exact model: constraint programming with interval variables (CP-SAT).

Per (stage, micro-batch) there are F, the backward (I and W, or B), and optionally O with L, and R.  Every lane is a
no-overlap constraint, and every device's memory is limited (cp_memory.py).  Equal micro-batches keep their order on the
first stage and, without offload and recomputation, within each kind of every stage: they can be renamed in the order of
their starts.  An O, L or R belongs to one forward and one backward, so there the best order may exchange micro-batches.

Times and sizes are integers of a grid, rounded in favor of the schedule, so that the bound always holds.
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

FINAL_KINDS = (Kind.W, Kind.B)
"""Kinds that can be the last one of a micro-batch on its stage."""
STREAMING_KINDS = (Kind.O, Kind.I, Kind.B, Kind.R)
"""Kinds that may start before the end of the operation they stream with."""
GRID_STEPS = 2**20
"""Grid steps of the longest time or largest size if values are not fractions."""


def build(
    problem: OrderProblem,
    *,
    horizon: Number,
    weights: Collection[int] | None = None,
    fused: Collection[Pair] = (),
    ordered: bool = True,
    steps: int = GRID_STEPS,
) -> ScheduleModel:
    """Build the model of the schedules that take at most `horizon`, of a subset of them, or of a relaxation.

    Args:
        problem: The operations to order.
        horizon: Latest end, in the costs' unit of time.
        weights: The devices on which W occupies the compute lane, by default all; on others it runs in parallel, and
            frees its memory at the end of its I.
        fused: The (stage, micro-batch) pairs whose backward is a B; if backwards may be split, all others are I and W.
        ordered: Whether equal micro-batches keep their order, where that excludes no optimum.
        steps: Grid steps of the longest time if times are not fractions.
    """
    from ortools.sat.python import cp_model

    costs = problem.costs
    if not problem.split:
        fused = [(s, j) for s in range(problem.stages) for j in range(problem.micro_batches)]
    times = [
        _time(problem, Op(k, s, j), r)
        for s in range(problem.stages) for k in Kind for j in range(problem.slices) for r in (False, True)
    ]  # fmt: skip
    leads = [problem.max_lead(Op(k, s, 0)) for s in range(problem.stages) for k in STREAMING_KINDS]
    unit = grid([*times, *leads, *costs.communication], steps)
    model = ScheduleModel(
        problem=problem,
        cp=cp_model.CpModel(),
        unit=unit,
        size_unit=grid([*costs.activation, *costs.activation_after_input, *costs.activation_recomputed]),
        horizon=math.ceil(horizon / unit),
        fused=frozenset(fused),
        weights=range(problem.devices) if weights is None else weights,
    )
    model.fill(ordered=ordered and problem.is_uniform)
    return model


@dataclass(kw_only=True)
class ScheduleModel(Variables):
    """A CP-SAT model of a problem, with its variables by operation.

    Attributes:
        unit: Time of one grid step.
        weights: The devices on which W occupies the compute lane.
        lanes: The intervals that must not overlap, by device, lane and peer.
        fused_literals: Per (stage, micro-batch), whether its I and W form a B.
        objective: The variable to minimize.
    """

    unit: Number
    weights: Collection[int]
    lanes: dict[tuple[int, Lane, int], list[Any]] = field(default_factory=dict)
    fused_literals: dict[Pair, Any] = field(default_factory=dict)
    objective: Any = None

    def fill(self, *, ordered: bool) -> None:
        """Add all variables and constraints; `ordered` keeps the order of micro-batches."""
        problem = self.problem
        for stage in range(problem.stages):
            for j in range(problem.micro_batches):
                self._add_micro_batch(stage, j)
        self._add_messages()
        if ordered and problem.frees_memory:
            self._order_micro_batches([lambda s, j: Op(Kind.F, s, j)], stages=1)
        elif ordered:
            kinds = [lambda s, j: Op(Kind.F, s, j), self.backward, self.weight]
            self._order_micro_batches(kinds, stages=problem.stages)
        if problem.slices > 1:
            self._order_slices()
        for intervals in self.lanes.values():
            self.cp.add_no_overlap(intervals)
        for device in range(problem.devices):
            limit_memory(self, device, weights=device in self.weights, ordered=ordered)
        self.objective = self._objective()

    def _add_micro_batch(self, stage: int, j: int) -> None:
        problem = self.problem
        forward, backward = Op(Kind.F, stage, j), self.backward(stage, j)
        self._add_operation(forward)
        self._add_operation(backward)
        self.cp.add(self.starts[backward] >= self.ends[forward])
        weight = self.weight(stage, j)
        if weight != backward:
            self._add_operation(weight)
            self.cp.add(self.starts[weight] >= self.ends[backward])
        if problem.offload and self.size(Op(Kind.O, stage, j), 1):
            self._add_offload(forward, backward)
        if problem.recompute:
            self._add_recompute(forward, backward)

    def _add_offload(self, forward: Op, backward: Op) -> None:
        """Add O and L as optional operations; with an R they take less time."""
        offload, reload = forward._replace(kind=Kind.O), forward._replace(kind=Kind.L)
        self._add_operation(offload, optional=True)
        offloaded = self.present[reload] = self.present[offload]
        self._add_operation(reload, optional=True)
        operations = offload, backward, backward._replace(kind=Kind.B)
        offload_lead, split_lead, fused_lead = (self._steps(self.problem.max_lead(op)) for op in operations)
        self.cp.add(self.starts[offload] >= self.ends[forward] - offload_lead)
        self.cp.add(self.starts[reload] >= self.ends[offload]).only_enforce_if(offloaded)
        self.cp.add(self.starts[backward] >= self.ends[reload] - max(split_lead, fused_lead)).only_enforce_if(offloaded)
        # Rounding relaxes leads by up to a grid step, but not the order of the starts.
        self.cp.add(self.starts[offload] >= self.starts[forward])
        self.cp.add(self.starts[backward] >= self.starts[reload]).only_enforce_if(offloaded)
        if fused_lead > split_lead:
            # An I directly followed by its W may be a B, which may start earlier.
            pair = forward[1:]
            fused = self.fused_literals[pair] = self.cp.new_bool_var("")
            self.cp.add(self.starts[self.weight(*pair)] == self.ends[backward]).only_enforce_if(fused)
            self.cp.add(self.starts[backward] >= self.ends[reload] - split_lead).only_enforce_if(offloaded, ~fused)

    def _add_recompute(self, forward: Op, backward: Op) -> None:
        """Add R as an optional operation, after a reload if there is one."""
        recompute, reload = forward._replace(kind=Kind.R), forward._replace(kind=Kind.L)
        self._add_operation(recompute, recomputed=True, optional=True)
        self.cp.add(self.starts[recompute] >= self.ends[forward])
        self.cp.add(self.starts[backward] >= self.ends[recompute]).only_enforce_if(self.present[recompute])
        if reload in self.present:
            both = self.present[reload], self.present[recompute]
            lead = self._steps(self.problem.max_lead(recompute))
            self.cp.add(self.starts[recompute] >= self.ends[reload] - lead).only_enforce_if(both)
            self.cp.add(self.starts[recompute] >= self.starts[reload]).only_enforce_if(both)

    def _steps(self, lead: Number) -> int:
        """A lead in grid steps, rounded in favor of the schedule."""
        return math.ceil(lead / self.unit - 1e-9)

    def _add_operation(self, op: Op, *, recomputed: bool = False, optional: bool = False) -> None:
        """Add the start, end and (on a modeled lane) interval of an operation."""
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
                # Fixes the start of an absent operation, which does not matter.
                self.cp.add(start == self.horizon).only_enforce_if(~literal)
        else:
            interval = self.cp.new_fixed_size_interval_var(start, time, op.name)
            self.cp.add(end <= self.horizon)
        self.lanes.setdefault(key, []).append(interval)

    def _grid_time(self, op: Op, *, recomputed: bool) -> int:
        """The time of an operation in grid steps, rounded in favor of the schedule."""
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

    def _add_messages(self) -> None:
        """Add messages between stages; an exclusive link transmits one message at a time."""
        problem, costs, device_of = self.problem, self.problem.costs, self.problem.placement.device_of
        for s, j in itertools.product(range(problem.stages - 1), range(problem.micro_batches)):
            here, there = device_of[s], device_of[s + 1]
            scaled = 0 if here == there else costs.communication[s] * costs.scale_of(j)
            time = math.floor(scaled / self.unit + 1e-9)
            up = Op(Kind.F, s, j), Op(Kind.F, s + 1, j), (here, Lane.SEND, there)
            down = self.backward(s + 1, j), self.backward(s, j), (there, Lane.SEND, here)
            for op, consumer, link in (up, down):
                if costs.communication_model == "latency" or s in problem.asynchronous or not time:
                    self._add_sent(op, self.starts[consumer] - time)
                    continue
                sent = self.cp.new_int_var(0, self.horizon, "")
                self._add_sent(op, sent)
                self.cp.add(self.starts[consumer] >= sent + time)
                interval = self.cp.new_fixed_size_interval_var(sent, time, "")
                self.lanes.setdefault(link, []).append(interval)

    def _add_sent(self, op: Op, sent: Any) -> None:
        """Constrain a message to be sent after its operation, or after the B if I and W form one."""
        self.cp.add(sent >= self.ends[op])
        fused = self.fused_literals.get(op[1:]) if op.kind is Kind.I else None
        if fused is not None:
            self.cp.add(sent >= self.ends[op._replace(kind=Kind.W)]).only_enforce_if(fused)

    def _order_micro_batches(self, kinds: Iterable[Callable[[int, int], Op]], *, stages: int) -> None:
        """Equal micro-batches run these kinds of the first `stages` stages in their order."""
        for kind, stage, j in itertools.product(kinds, range(stages), range(self.problem.micro_batches - 1)):
            self.cp.add(self.starts[kind(stage, j + 1)] >= self.ends[kind(stage, j)])

    def _order_slices(self) -> None:
        """The slices of a sequence run forwards in their order, and backwards in the reverse order."""
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
                if op.kind in FINAL_KINDS:
                    self.cp.add(value >= end)
        else:
            for device_stages in self.problem.placement.stages_of:
                first = self.starts[Op(Kind.F, device_stages[0], 0)]
                for op, end in self.ends.items():
                    if op.kind in FINAL_KINDS and op.stage in device_stages:
                        self.cp.add(value >= end - first)
        self.cp.minimize(value)
        return value


def _time(problem: OrderProblem, op: Op, recomputed: bool) -> Number:
    if op.kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.G, Kind.D, Kind.S, Kind.P):
        return 0
    return problem.op_costs.time(op, explicit=recomputed)


def grid(values: Iterable[Number], steps: int = GRID_STEPS) -> Number:
    """The largest step of which all values are integer multiples; a fine step if any is a non-integer float."""
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
    """The schedule of a solution, which `value(variable)` reads.

    Operations are in order of their starts, offloads in order of their ends: operations listed after an offload can use
    the memory it has freed, and nothing has to wait for an offload still in flight.
    """
    problem = model.problem
    orders: list[list[tuple[int, int, int, Op]]] = [[] for _ in range(problem.devices)]
    for variable, start in model.starts.items():
        op, end = variable, value(model.ends[variable])
        if op in model.present and not value(model.present[op]):
            continue
        if op[1:] in model.fused_literals and value(model.fused_literals[op[1:]]):
            if op.kind is Kind.W:
                continue
            op = op._replace(kind=Kind.B) if op.kind is Kind.I else op
        moment, rank = (end, 0) if op.kind is Kind.O else (value(start), 1 if op.kind is Kind.L else 2)
        orders[problem.placement.device_of[op.stage]].append((moment, rank, end, op))
    lists = (sorted(order, key=lambda e: (e[:3], e[3].stage, e[3].micro_batch)) for order in orders)
    schedule = problem.schedule([op for *_, op in order] for order in lists)
    return problem.with_link_orders(schedule, {op: value(start) for op, start in model.starts.items()})
