"""Small random problems of units, and an exact CP-SAT model of their plans that shares no code with the search.

The model is solved for every cut on every placement of up to two stages per device.  Per micro-batch and stage, an R
may recompute an activation or the host may take it; a unit has one strategy in all micro-batches.
"""

import random
from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product
from math import inf
from typing import Any

from ortools.sat.python import cp_model

from debubble.costs import Strategy, Unit, Units
from debubble.costs.partition import Partition
from debubble.ir import DebubbleError, Kind, Op, Placement, Schedule
from debubble.planners.problem import ModelUnits, Problem
from debubble.simulator import simulate

NO_DEADLINE = 1e6
"""Seconds on the clock, more than any search takes."""
MODEL_SECONDS = 3.0
"""Deterministic seconds of CP-SAT for the plans of one cut."""


def random_problem(seed: int, *, effort: float = 1.0) -> Problem:
    """A problem of units on two or three devices, with links, and sometimes frozen weights or mixed devices.

    The memory limit is 0.9 to 3 times the states and the activations of one micro-batch, divided by the devices.
    """
    chance = random.Random(seed)
    devices = chance.choice((2, 2, 3))
    count, max_micro_batches = chance.randint(devices, 5 if devices == 2 else 4), 4 if devices == 2 else 3
    micro_batches = chance.randint(2, max_micro_batches)
    is_frozen = chance.random() < 0.15
    units = tuple(_unit(chance, n, is_frozen=is_frozen) for n in range(count))
    paces = [1] * devices if chance.random() < 0.85 else [chance.choice((1, 2)) for _ in range(devices)]
    share = sum(unit.static + unit.activation for unit in units) / devices
    return Problem(
        workload=ModelUnits(
            Units(
                units=tuple(_slower(unit, min(paces)) for unit in units),
                on_devices=tuple(tuple(_slower(unit, pace) for unit in units) for pace in paces)
                if len(set(paces)) > 1
                else (),
                communication=chance.choice((0, 0, 1, 2)),
                offload_bandwidth=chance.choice((None, 1, 2)),
                memory_limit=(round(share * chance.uniform(0.9, 3)),),
                streams=False,
            )
        ),
        devices=devices,
        micro_batches=micro_batches,
        effort=effort,
        deadline=NO_DEADLINE,
    )


def _unit(chance: random.Random, number: int, *, is_frozen: bool) -> Unit:
    activation = 2 * chance.randint(1, 4)
    strategies = {"none": Strategy(activation)}
    if chance.random() < 0.75:
        strategies["full"] = Strategy(2 * chance.randint(0, activation // 2 - 1), chance.randint(1, 4))
    return Unit(
        type=f"u{number}", layer=None, forward=chance.randint(1, 4), backward_input=chance.randint(1, 6),
        backward_weight=0 if is_frozen else chance.randint(1, 4), static=chance.randint(0, 3), strategies=strategies,
        activation_after_input=0 if is_frozen else chance.randint(0, 3) if activation > 2 else chance.randint(0, 2),
    )  # fmt: skip


def _slower(unit: Unit, pace: int) -> Unit:
    strategies = {name: Strategy(s.activation, pace * s.recompute) for name, s in unit.strategies.items()}
    return Unit(
        type=unit.type, layer=None, forward=pace * unit.forward, backward_input=pace * unit.backward_input,
        backward_weight=pace * unit.backward_weight, static=unit.static, strategies=strategies,
        activation_after_input=unit.activation_after_input,
    )  # fmt: skip


def best_time(problem: Problem, *, below: float = inf) -> float:
    """The makespan of the fastest plan; `below` if no plan is faster than that."""
    for placement in _placements(problem):
        count, stages = len(problem.units.units), placement.stages
        for cuts in combinations(range(1, count), stages - 1):
            lengths = [b - a for a, b in zip((0, *cuts), (*cuts, count), strict=True)]
            below = min(below, _Model(problem, placement, lengths, below).solve())
    return below


def _placements(problem: Problem) -> Iterator[Placement]:
    devices, max_stages = problem.devices, min(len(problem.units.units), 4)
    equal_devices = not problem.units.on_devices
    for stages in range(devices, max_stages + 1):
        for device_of in product(range(devices), repeat=stages):
            names = list(dict.fromkeys(device_of))
            if len(names) < devices or (equal_devices and names != sorted(names)):
                continue
            if all(a != b for a, b in pairwise(device_of)) or device_of == (0, 1, 1, 0):
                yield Placement.of(device_of)


class _Model:
    """The plans of one cut; operations are (kind, stage, micro-batch)."""

    def __init__(self, problem: Problem, placement: Placement, lengths: list[int], below: float) -> None:
        self.problem, self.placement, self.cp = problem, placement, cp_model.CpModel()
        ends = [*accumulate(lengths)]
        self.stages = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.tables = [problem.units.on(device) for device in range(problem.devices)]
        self.bandwidth = problem.units.offload_bandwidth
        self.ticks = int(self.bandwidth or 1)
        """Ticks of the model's clock per unit of time."""
        work = sum(unit.work + sum(s.recompute for s in unit.strategies.values()) for t in self.tables for unit in t)
        capacity = sum(unit.activation for unit in self.tables[0])
        self.horizon = int(self.ticks * problem.micro_batches * (work + 4 * capacity + 8 * problem.units.communication))
        if below < inf:
            self.horizon = round(self.ticks * below) - 1
        self.full = {u: self.cp.new_bool_var("") for u, unit in enumerate(self.tables[0]) if "full" in unit.strategies}
        self.starts: dict[Op, Any] = {}
        self.ends: dict[Op, Any] = {}
        self.chosen: dict[Op, Any] = {}
        self.lanes: dict[tuple[int, str], list[Any]] = {}
        self.residents: dict[int, list[tuple[Any, Any]]] = {device: [] for device in range(problem.devices)}

    def solve(self) -> float:
        """The makespan of the best plan, by the simulator; infinite if there is none."""
        for stage, j in product(range(len(self.stages)), range(self.problem.micro_batches)):
            self._micro_batch(stage, j)
        for lane in self.lanes.values():
            self.cp.add_no_overlap(lane)
        for device, residents in self.residents.items():
            states = sum(
                self.tables[device][u].static for s in self.placement.stages_of[device] for u in self.stages[s]
            )
            capacity = int(self.problem.limits[device]) - int(states)
            if capacity < 0:
                return inf
            self.cp.add_cumulative([time for time, _ in residents], [size for _, size in residents], capacity)
        makespan = self.cp.new_int_var(0, self.horizon, "")
        for op, end in self.ends.items():
            if op.kind is Kind.W:
                self.cp.add(makespan >= end)
        self.cp.minimize(makespan)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers, solver.parameters.max_deterministic_time = 1, MODEL_SECONDS
        is_solved = solver.status_name(solver.solve(self.cp)) in ("OPTIMAL", "FEASIBLE")
        return self._simulated(solver) if is_solved else inf

    def _add(self, op: Op, time: Any, chosen: Any = None, lane: str = "compute") -> None:
        start, end = (self.cp.new_int_var(0, self.horizon, "") for _ in range(2))
        interval = (
            self.cp.new_interval_var(start, time, end, "")
            if chosen is None
            else self.cp.new_optional_interval_var(start, time, end, chosen, "")
        )
        self.starts[op], self.ends[op] = start, end
        if chosen is not None:
            self.chosen[op] = chosen
        self.lanes.setdefault((self.placement.device_of[op.stage], lane), []).append(interval)

    def _add_resident(self, device: int, size: int, begin: Any, end: Any, when: tuple[Any, ...] = ()) -> None:
        """Count `size` bytes from `begin` to `end` if all literals of `when` are true."""
        if size:
            condition = self._conjunction(when)
            length = self.cp.new_int_var(0, self.horizon, "")
            self.residents[device].append((self.cp.new_optional_interval_var(begin, length, end, condition, ""), size))

    def _conjunction(self, literals: tuple[Any, ...]) -> Any:
        if len(literals) < 2:
            return literals[0] if literals else True
        conjunction = self.cp.new_bool_var("")
        self.cp.add_bool_and(literals).only_enforce_if(conjunction)
        self.cp.add_bool_or([conjunction, *(~literal for literal in literals)])
        return conjunction

    def _micro_batch(self, stage: int, j: int) -> None:
        device = self.placement.device_of[stage]
        table, cp = self.tables[device], self.cp
        forward, backward, weight, recompute, out, back = (
            Op(kind, stage, j) for kind in (Kind.F, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
        )
        units = [(u, table[u]) for u in self.stages[stage]]
        for op, name in ((forward, "forward"), (backward, "backward_input"), (weight, "backward_weight")):
            self._add(op, self.ticks * int(sum(getattr(unit, name) for _, unit in units)))
        recomputed, moved = cp.new_bool_var(""), cp.new_bool_var("")
        recompute_time = cp.new_int_var(0, self.horizon, "")
        cp.add(recompute_time == self._recompute_time(units))
        self._add(recompute, recompute_time, recomputed)
        cp.add(self.starts[recompute] >= self.ends[forward])
        cp.add(self.starts[backward] >= self.ends[recompute]).only_enforce_if(recomputed)
        cp.add(self.starts[backward] >= self.ends[forward])
        cp.add(self.starts[weight] >= self.ends[backward])
        if self.bandwidth is None:
            cp.add(moved == 0)
        # `dropped` are the bytes that recomputation restores; the host may take the rest of a stage.
        rest = int(sum(unit.activation for _, unit in units))
        dropped: list[tuple[Any, int]] = []
        for u, unit in units:
            if u in self.full:
                size = int(unit.activation - unit.strategies["full"].activation)
                dropped.append((self._conjunction((recomputed, self.full[u])), size))
        transfer = (rest - sum(size * literal for literal, size in dropped)) * self.ticks
        length = cp.new_int_var(0, self.horizon, "")
        cp.add(int(self.bandwidth or 1) * length == transfer)
        self._add(out, length, moved, "out")
        self._add(back, length, moved, "back")
        cp.add(self.starts[out] >= self.ends[forward])
        cp.add(self.starts[back] >= self.ends[out])
        for op, literals in ((backward, (moved,)), (recompute, (moved, recomputed))):
            cp.add(self.starts[op] >= self.ends[back]).only_enforce_if(literals)
        self._memory(device, stage, j, rest, dropped, recomputed, moved)
        self._messages(stage, j)

    def _recompute_time(self, units: list[tuple[int, Unit]]) -> Any:
        return sum(
            self.ticks * int(unit.strategies["full"].recompute) * self.full[u] for u, unit in units if u in self.full
        )

    def _memory(
        self, device: int, stage: int, j: int, rest: int, dropped: list[tuple[Any, int]], recomputed: Any, moved: Any
    ) -> None:
        forward, backward, weight, recompute, out, back = (
            Op(kind, stage, j) for kind in (Kind.F, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
        )
        begin, end = self.starts[forward], self.ends[backward]
        portions = [((), rest - sum(size for _, size in dropped)), *(((~literal,), size) for literal, size in dropped)]
        for when, size in portions:
            self._add_resident(device, size, begin, end, (*when, ~moved))
            self._add_resident(device, size, begin, self.ends[out], (*when, moved))
            self._add_resident(device, size, self.starts[back], end, (*when, moved))
        for literal, size in dropped:
            self._add_resident(device, size, self.starts[recompute], end, (literal,))
        after = sum(
            unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
            for unit in (self.tables[device][u] for u in self.stages[stage])
        )
        self._add_resident(device, int(after), end, self.ends[weight])

    def _messages(self, stage: int, j: int) -> None:
        if stage == 0:
            return
        sender, receiver = self.placement.device_of[stage - 1 : stage + 1]
        time = 0 if receiver == sender else self.ticks * int(self.problem.units.message(sender, receiver))
        self.cp.add(self.starts[Op(Kind.F, stage, j)] >= self.ends[Op(Kind.F, stage - 1, j)] + time)
        self.cp.add(self.starts[Op(Kind.I, stage - 1, j)] >= self.ends[Op(Kind.I, stage, j)] + time)

    def _simulated(self, solver: cp_model.CpSolver) -> float:
        partition = Partition(
            [(u, "full" if u in self.full and solver.value(self.full[u]) else "none") for u in stage]
            for stage in self.stages
        )
        orders: list[list[tuple[float, int, int, Op]]] = [[] for _ in range(self.problem.devices)]
        for op in self.starts:
            if op in self.chosen and not solver.value(self.chosen[op]):
                continue
            start, end = solver.value(self.starts[op]), solver.value(self.ends[op])
            moment = (end, 0) if op.kind is Kind.O else (start, 1 if op.kind is Kind.L else 2)
            orders[self.placement.device_of[op.stage]].append((*moment, end, op))
        schedule = Schedule(
            name="exact", placement=self.placement, micro_batches=self.problem.micro_batches,
            orders=tuple(tuple(op for *_, op in sorted(order)) for order in orders),
        )  # fmt: skip
        try:
            return float(simulate(schedule, self.problem.units.stage_costs(partition, self.placement)).makespan)
        except DebubbleError:
            return inf
