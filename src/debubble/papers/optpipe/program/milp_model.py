"""Variables and constraints of OptPipe's MILP, with the paper's errors corrected.

Source: OptPipe, section 3 and appendix C.  i is our stage (one per device), j our micro-batch; c = F, B, W are our F,
I, W.  Variables: E is `end`, O `offload_start`, R `reload_start`, W `offloaded`, P `precedes`, H `offload_first`, N
`counted`, C `span`; M is among `end_events`; K and L (orders of offloads and reloads) follow micro-batches.  Corrected:

* equations 7 and 10-16 exempt "j' != j, c' != c"; here every pair of different operations is constrained;
* equation 14 has T_comm in place of the operation's own time;
* missing: an offload starts after its forward, a reload ends before its backward, and starts after its own offload;
* H_yx = 1 - H_xy is false: H_xy says "offload x before reload y", and both directions hold in ordinary schedules;
* equation 9 uses an operation's own Delta, which undercounts while B or W run, and considers compute operations only;
  memory rises at starts of F and of reloads, so it is counted exactly at these events;
* equations 18 and 19 have no big-M and compare only the same operation; here a link group has one transfer at a time.

`Reductions` enables the paper's reductions separately, so that their effects can be measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from ortools.math_opt.python import mathopt

from debubble.interrupts import solve_interruptibly
from debubble.ir import InputError, Kind, Number, Op, Schedule
from debubble.search.problem import OrderProblem
from debubble.simulator import simulate

COMPUTE = (Kind.F, Kind.I, Kind.W)
Transfer = tuple[Op, Any, float]
"""The forward whose activation is transferred, the variable of the transfer's start, and its duration."""


@dataclass(frozen=True, kw_only=True)
class Reductions:
    """Switches for the paper's redundancy elimination and cuts (section 4.1)."""

    fixed_order: bool = True
    """Fixed micro-batch order within each kind.  It is exact without offload; with offload the optimum can be lost,
    because an offloaded micro-batch may best be reloaded last (31 becomes 32 in `test_milp.py`)."""
    one_direction: bool = True
    """One variable per pair of operations; the other direction is its complement (equation 1)."""
    transitive: bool = True
    """No variable where the order follows by transitivity: j <= j' and c <= c' in F < B < W."""
    triangles: Literal["none", "lazy", "eager"] = "none"
    """Triangle inequality cuts P_ac >= P_ab + P_bc - 1: none, those that the relaxation violates, or all."""


@dataclass
class MilpModel:
    """The MILP as a MathOpt model.  Times and sizes are the problem's numbers as floats.

    Raises:
        InputError: If the MILP cannot model the problem: several stages per device, fused backwards, recomputation,
            exclusive links, unequal micro-batches.
    """

    problem: OrderProblem
    reductions: Reductions = Reductions()
    precedes: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """P: the first operation precedes the second (a variable, or 0 or 1 where known)."""
    offloaded: dict[Op, Any] = field(default_factory=dict)
    """W: this forward's activation is offloaded."""
    offload_start: dict[Op, Any] = field(default_factory=dict)
    """O, per forward."""
    reload_start: dict[Op, Any] = field(default_factory=dict)
    """R, per forward."""
    offload_first: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """H: the first one's offload has ended before the second one's reload starts."""
    counted: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """N: the first one's reload is counted when the second, a forward, starts."""
    end_events: list[tuple[Any, Op, Op]] = field(default_factory=list)
    """Binary variables, M among them: the first operation has ended when the second starts."""
    start_events: list[tuple[Any, Op, Op]] = field(default_factory=list)
    """Binary variables: the first operation starts before the second, a transfer or a forward."""

    def __post_init__(self) -> None:
        self._check()
        self.model = mathopt.Model()
        self._add, self._binary = self.model.add_linear_constraint, self.model.add_binary_variable
        problem, costs = self.problem, self.problem.costs
        self.stages, self.jobs = range(problem.stages), range(problem.micro_batches)
        self.time = {Kind.F: costs.forward, Kind.I: costs.backward_input, Kind.W: costs.backward_weight}
        self.big = float(self._horizon())
        self.end = {
            Op(c, i, j): self.model.add_variable(lb=float(self.time[c][i]), ub=self.big)
            for i in self.stages for j in self.jobs for c in COMPUTE
        }  # fmt: skip
        self.span = self.model.add_variable(lb=0, ub=self.big)
        for i in self.stages:
            self._resource_exclusivity(i)
            if problem.offload:
                self._offload_and_reload(i)
            self._memory_capacity(i)
        self._data_dependencies()
        self._objective()
        if problem.offload:
            self._shared_links()

    def _check(self) -> None:
        problem, costs = self.problem, self.problem.costs
        if problem.placement.chunks > 1 or not problem.split or problem.recompute or problem.fused_recompute:
            raise InputError("The MILP has one stage per device, split backwards and no recomputation.")
        if costs.communication_model != "latency" or not problem.is_uniform or problem.offload_fraction:
            raise InputError("The MILP has asynchronous messages, alike micro-batches and whole offloads.")
        if any(rest > size for rest, size in zip(costs.activation_after_input, costs.activation, strict=True)):
            raise InputError("The MILP needs activations that do not grow between I and W.")

    @property
    def binaries(self) -> int:
        """The number of binary variables."""
        return sum(variable.integer for variable in self.model.variables())

    @property
    def rows(self) -> int:
        """The number of constraints."""
        return int(self.model.get_num_linear_constraints())

    def hint(self, schedule: Schedule) -> Any:
        """The variables' values for a schedule; times of transfers that it lacks have no value."""
        timeline = simulate(schedule, self.problem.costs)
        times = {o.op: (float(o.start), float(o.end)) for o in timeline.operations}
        values: dict[Any, float] = {self.span: float(self.problem.value(schedule))}
        values.update({variable: times[op][1] for op, variable in self.end.items()})
        orders = [(var, a, b) for (a, b), var in self.precedes.items() if isinstance(var, mathopt.Variable)]
        for forward, offloaded in self.offloaded.items():
            offload, reload = forward._replace(kind=Kind.O), forward._replace(kind=Kind.L)
            values[offloaded] = float(offload in times)
            if offload in times:
                values[self.offload_start[forward]] = times[offload][0]
                values[self.reload_start[forward]] = times[reload][0]
        ends = [(v, x._replace(kind=Kind.O), y._replace(kind=Kind.L)) for (x, y), v in self.offload_first.items()]
        for variable, a, b in (*orders, *self.end_events, *ends):
            values[variable] = float(a in times and b in times and times[a][1] <= times[b][0] + 1e-9)
        for variable, a, b in self.start_events:
            # If a forward and a reload start together, the forward counts as first.
            tie = 1e-9 if a.kind is Kind.F else -1e-9
            values[variable] = float(a in times and b in times and times[a][0] < times[b][0] + tie)
        return mathopt.SolutionHint(variable_values=values)

    def schedule(self, values: Any) -> Schedule:
        """The schedule of a solution, with offloads in the order of their ends (see cp_model.schedule_of)."""
        orders: list[list[tuple[float, int, Op]]] = [[] for _ in self.stages]
        for op, end in self.end.items():
            orders[op.stage].append((round(values[end] - float(self.time[op.kind][op.stage]), 6), 2, op))
        for forward, offloaded in self.offloaded.items():
            if values[offloaded] > 0.5:
                i, j = forward.stage, forward.micro_batch
                offload_end = values[self.offload_start[forward]] + self._transfer(i)[0]
                orders[i].append((round(offload_end, 6), 0, Op(Kind.O, i, j)))
                orders[i].append((round(values[self.reload_start[forward]], 6), 1, Op(Kind.L, i, j)))
        lists = (sorted(order, key=lambda e: (e[0], e[1], e[2].micro_batch)) for order in orders)
        schedule = self.problem.schedule([op for *_, op in order] for order in lists)
        starts = {
            forward._replace(kind=kind): round(values[start[forward]], 6)
            for kind, start in ((Kind.O, self.offload_start), (Kind.L, self.reload_start))
            for forward in self.offloaded
        }
        return self.problem.with_link_orders(schedule, starts)

    def _horizon(self) -> Number:
        """Big-M: the time of all operations in sequence."""
        costs, m = self.problem.costs, self.problem.micro_batches
        total = m * sum(costs.work(s) for s in range(costs.stages)) + 2 * m * sum(costs.communication)
        if self.problem.offload:
            total += m * sum(sum(self._transfer(s)) for s in range(costs.stages))
        return total

    def _transfer(self, stage: int) -> tuple[float, float]:
        transfers = self.problem.costs.transfers
        assert transfers is not None
        return float(transfers.offload[stage]), float(transfers.reload[stage])

    def _start(self, op: Op) -> Any:
        return self.end[op] - float(self.time[op.kind][op.stage])

    def _resource_exclusivity(self, i: int) -> None:
        """Equations 7 and 8: one compute operation at a time, F before B before W."""
        ops = [Op(c, i, j) for j in self.jobs for c in COMPUTE]
        for a, b in itertools.combinations(ops, 2):
            order = self._known_order(a, b)
            if order is not None:
                self.precedes[a, b], self.precedes[b, a] = order, 1 - order
                first, then = (a, b) if order else (b, a)
                if then.micro_batch - first.micro_batch + COMPUTE.index(then.kind) - COMPUTE.index(first.kind) == 1:
                    self._add(self._start(then) >= self.end[first])
                continue
            a_first = self.precedes[a, b] = self._binary()
            b_first = self.precedes[b, a] = 1 - a_first if self.reductions.one_direction else self._binary()
            if not self.reductions.one_direction:
                self._add(a_first + b_first == 1)
            self._add(self._start(b) >= self.end[a] - self.big * (1 - a_first))
            self._add(self._start(a) >= self.end[b] - self.big * (1 - b_first))
        if self.reductions.triangles == "eager":
            for triple in itertools.permutations(ops, 3):
                self._triangle(*triple)

    def _known_order(self, a: Op, b: Op) -> int | None:
        """P_ab where the reductions determine it; else None."""
        if a.micro_batch == b.micro_batch:
            return int(COMPUTE.index(a.kind) < COMPUTE.index(b.kind))
        if a.kind is b.kind:
            return int(a.micro_batch < b.micro_batch) if self.reductions.fixed_order else None
        if not (self.reductions.transitive and self.reductions.fixed_order):
            return None
        earlier, later = (a, b) if a.micro_batch < b.micro_batch else (b, a)
        if COMPUTE.index(earlier.kind) < COMPUTE.index(later.kind):
            return int(earlier is a)
        return None

    def _triangle(self, a: Op, b: Op, c: Op) -> bool:
        """Add the cut P_ac >= P_ab + P_bc - 1 unless all three are known; returns whether it was added."""
        rows = self.precedes[a, c], self.precedes[a, b], self.precedes[b, c]
        if all(isinstance(p, int) for p in rows):
            return False
        self._add(rows[0] >= rows[1] + rows[2] - 1)
        return True

    def relaxation(self) -> float:
        """The bound of the LP relaxation, infinite if that is infeasible; adds violated cuts if they are lazy."""
        variables = [variable for variable in self.model.variables() if variable.integer]
        for variable in variables:
            variable.integer = False
        bound = math.inf
        relaxed = partial(mathopt.solve, self.model, mathopt.SolverType.GLOP)
        while (result := solve_interruptibly(relaxed)).has_primal_feasible_solution():
            bound = float(result.objective_value())
            if self.reductions.triangles != "lazy" or not self._add_violated(result.variable_values()):
                break
        for variable in variables:
            variable.integer = True
        return bound

    def _add_violated(self, solution: Any) -> int:
        """Add the triangle inequality cuts that a solution violates; returns their number."""
        added = 0
        for stage in self.stages:
            operations = [Op(kind, stage, j) for j in self.jobs for kind in COMPUTE]
            precedence = np.zeros((len(operations), len(operations)))
            for (row, a), (column, b) in itertools.permutations(enumerate(operations), 2):
                precedence[row, column] = mathopt.evaluate_expression(self.precedes[a, b], solution)
            violated = precedence[:, :, None] + precedence[None, :, :] - 1 - precedence[:, None, :] > 1e-6
            added += sum(
                self._triangle(*(operations[index] for index in triple))
                for triple in np.argwhere(violated)
                if len(set(triple)) == 3
            )
        return added

    def _offload_and_reload(self, i: int) -> None:
        """Equations 10 to 17, corrected: exclusivity of the host link and its synchronization with compute."""
        offload_time, reload_time = self._transfer(i)
        forwards = [Op(Kind.F, i, j) for j in self.jobs]
        for x in forwards:
            offloaded = self.offloaded[x] = self._binary()
            self.offload_start[x] = self.model.add_variable(lb=0, ub=self.big)
            self.reload_start[x] = self.model.add_variable(lb=0, ub=self.big)
            backward = Op(Kind.I, i, x.micro_batch)
            early, late = map(float, (self.problem.max_lead(x._replace(kind=Kind.O)), self.problem.backward_lead(i)))
            self._add(self.offload_start[x] >= self.end[x] - early - self.big * (1 - offloaded))
            self._add(self.reload_start[x] >= self.offload_start[x] + offload_time - self.big * (1 - offloaded))
            self._add(self._start(backward) >= self.reload_start[x] + reload_time - late - self.big * (1 - offloaded))
        for x, y in itertools.combinations(forwards, 2):
            free = self.big * (2 - self.offloaded[x] - self.offloaded[y])
            self._add(self.offload_start[y] >= self.offload_start[x] + offload_time - free)
            self._add(self.reload_start[y] >= self.reload_start[x] + reload_time - free)
        for x, y in itertools.permutations(forwards, 2):
            first = self.offload_first[x, y] = self._binary()
            self._add(first <= self.offloaded[x])
            self._add(self.reload_start[y] >= self.offload_start[x] + offload_time - self.big * (1 - first))
            if self.problem.costs.host_link == "half-duplex":
                free = self.big * (2 - self.offloaded[x] - self.offloaded[y] + first)
                self._add(self.offload_start[x] >= self.reload_start[y] + reload_time - free)

    def _memory_capacity(self, i: int) -> None:
        """Equation 9 by events: resident memory fits at every start of an F and of a reload."""
        costs = self.problem.costs
        free = costs.capacity_of(self.problem.placement.device_of[i])
        if free is None:
            return
        capacity = float(free)
        size, rest = float(costs.activation[i]), float(costs.activation_after_input[i])
        freed = {Kind.I: size - rest, Kind.W: rest}
        forwards = [Op(Kind.F, i, j) for j in self.jobs]
        for x in forwards:
            resident = mathopt.LinearExpression() + size + sum(size * self.precedes[y, x] for y in forwards if y != x)
            resident -= sum(
                amount * self.precedes[Op(c, i, y.micro_batch), x]
                for y in forwards
                if y != x
                for c, amount in freed.items()
            )
            if self.problem.offload:
                resident += sum(size * (self._reloaded(y, x) - self._evicted(y, x)) for y in forwards if y != x)
            self._add(resident <= capacity)
        if self.problem.offload:
            for x in forwards:
                self._at_reload(x, forwards, capacity, size, freed)

    def _evicted(self, y: Op, x: Op) -> Any:
        """M: y's offload has ended when F of x starts."""
        ended = self._binary()
        self._add(ended <= self.offloaded[y])
        self._add(self.offload_start[y] + self._transfer(y.stage)[0] <= self._start(x) + self.big * (1 - ended))
        self.end_events.append((ended, y._replace(kind=Kind.O), x))
        return ended

    def _reloaded(self, y: Op, x: Op) -> Any:
        """N: y's reload is resident when F of x starts; otherwise it starts no earlier."""
        counts = self._binary()
        self._add(counts <= self.offloaded[y])
        self._add(self.reload_start[y] >= self._start(x) - self.big * (counts + 1 - self.offloaded[y]))
        self.counted[y, x] = counts
        self.start_events.append((counts, y._replace(kind=Kind.L), x))
        return counts

    def _at_reload(self, y: Op, forwards: list[Op], capacity: float, size: float, freed: dict[Kind, float]) -> None:
        """Limit memory at the start of y's reload, where y's own offload and reload cancel."""
        resident = size
        for x in forwards:
            for c, amount in freed.items():
                ended = self._binary()
                self._add(self.end[Op(c, y.stage, x.micro_batch)] <= self.reload_start[y] + self.big * (1 - ended))
                resident -= amount * ended
                self.end_events.append((ended, Op(c, y.stage, x.micro_batch), y._replace(kind=Kind.L)))
            if x == y:
                continue
            counts = self._binary()
            self._add(self._start(x) >= self.reload_start[y] - self.big * (counts + 1 - self.offloaded[y]))
            self._add(self.counted[y, x] + counts >= self.offloaded[y])
            self.start_events.append((counts, x, y._replace(kind=Kind.L)))
            resident += size * counts - size * self.offload_first[x, y]
            if x.micro_batch < y.micro_batch:
                resident += size * self.offloaded[x]
        self._add(resident <= capacity + size * (2 * len(forwards) + 1) * (1 - self.offloaded[y]))

    def _data_dependencies(self) -> None:
        """Equations 5 and 6."""
        for i, j in itertools.product(range(self.problem.stages - 1), self.jobs):
            message = float(self.problem.costs.communication[i])
            self._add(self._start(Op(Kind.F, i + 1, j)) >= self.end[Op(Kind.F, i, j)] + message)
            self._add(self._start(Op(Kind.I, i, j)) >= self.end[Op(Kind.I, i + 1, j)] + message)

    def _objective(self) -> None:
        """Equations 3 and 4."""
        for op, end in self.end.items():
            if op.kind is not Kind.W:
                continue
            if self.problem.objective == "makespan":
                self._add(self.span >= end)
                continue
            for j in self.jobs if not self.reductions.fixed_order else (0,):
                self._add(self.span >= end - self._start(Op(Kind.F, op.stage, j)))
        self.model.minimize(self.span)

    def _shared_links(self) -> None:
        """Equations 18 and 19: one transfer at a time per link group and direction (half duplex: in total)."""
        half = self.problem.costs.host_link == "half-duplex"
        out, back = (self.offload_start, 0), (self.reload_start, 1)
        pairs = list(itertools.product((out, back), repeat=2)) if half else [(out, out), (back, back)]
        for group in self.problem.costs.link_groups:
            for a, b in itertools.combinations(group, 2):
                for x, y in itertools.product(self._forwards(a), self._forwards(b)):
                    for (start_x, which_x), (start_y, which_y) in pairs:
                        times = self._transfer(x.stage)[which_x], self._transfer(y.stage)[which_y]
                        self._one_at_a_time((x, start_x[x], times[0]), (y, start_y[y], times[1]))

    def _forwards(self, device: int) -> Iterator[Op]:
        return (op for op in self.offloaded if op.stage == device)

    def _one_at_a_time(self, one: Transfer, other: Transfer) -> None:
        """Require one of two transfers to end before the other starts, if both activations are offloaded."""
        (x, start_x, time_x), (y, start_y, time_y) = one, other
        first, free = self._binary(), self.big * (2 - self.offloaded[x] - self.offloaded[y])
        self._add(start_y >= start_x + time_x - self.big * (1 - first) - free)
        self._add(start_x >= start_y + time_y - self.big * first - free)
