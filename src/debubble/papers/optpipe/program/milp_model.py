"""OptPipe's mixed-integer program, as it must read to be right: rows and variables.

Source: OptPipe, section 3 and appendix C.  i is our stage (one per device), j our micro-batch; c = F, B, W are our F,
I, W; E are end times, O and R starts of offload and reload, W_j is `away` here; P, K (order of offloads), L (order of
reloads), H, M, N as there.  Corrected are:

* equations 7 and 10-16 exempt "j' != j, c' != c"; every pair of different operations counts;
* equation 14 has T_comm where the operation's own time is meant;
* missing: an offload starts after its forward, a reload ends before its backward, and starts after its own offload;
* H_yx = 1 - H_xy is false: H_xy says "offload x before reload y", and both directions hold in ordinary schedules;
* equation 9 takes an operation's own Delta, which under-counts while B or W run, and looks only at compute operations:
  memory rises at starts of F and of reloads, and is counted exactly there (events), everything that ended before off;
* equations 18 and 19 have no big-M and compare only the same operation: transfers of a link group share a lane here.

`Reductions` switches what the paper does to make it smaller, so that the effect can be measured.
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
"""A forward whose activation is moved, the variable of the transfer's start, and its time."""


@dataclass(frozen=True, kw_only=True)
class Reductions:
    """Switches of what makes the program smaller or tighter (section 4.1 of the paper)."""

    fixed_order: bool = True
    """Micro-batches keep their order within each kind.  Without offload this loses nothing; with it the paper's
    reduction can: the micro-batch on the host may come back last, and 31 becomes 32 in `test_milp.py`."""
    one_direction: bool = True
    """One variable per pair of operations; the other direction is its complement."""
    transitive: bool = True
    """No variable where the order follows: j <= j' and c <= c' in F < B < W."""
    triangles: Literal["none", "lazy", "eager"] = "none"
    """P_ac >= P_ab + P_bc - 1 for triples: all as rows, or only those that the relaxation violates."""


@dataclass
class MilpModel:
    """The rows and variables.  Times and sizes are the problem's own numbers as floats.

    Raises:
        InputError: The program does not model the problem: several stages per device, fused backwards, recomputation,
            exclusive links, micro-batches that differ.
    """

    problem: OrderProblem
    reductions: Reductions = Reductions()
    before: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """P: the first operation comes before the second (variables, or 0 and 1 where known)."""
    away: dict[Op, Any] = field(default_factory=dict)
    """W: this forward's activation is offloaded."""
    out: dict[Op, Any] = field(default_factory=dict)
    """O, by forward."""
    back: dict[Op, Any] = field(default_factory=dict)
    """R, by forward."""
    offload_first: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """H: the first one's offload has ended before the second one's reload starts."""
    counted: dict[tuple[Op, Op], Any] = field(default_factory=dict)
    """N: the first one's reload is counted when the second, a forward, starts."""
    events: list[tuple[Any, Op, Op]] = field(default_factory=list)
    """Other binary variables: the first operation has ended when the second starts."""
    begun: list[tuple[Any, Op, Op]] = field(default_factory=list)
    """And: the first operation starts before the second, a transfer or a forward."""

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
            self._lane(i)
            if problem.offload:
                self._transfers(i)
            self._memory(i)
        self._data()
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
        """The schedule's times and orders as values of the variables; times of transfers that it lacks stay open."""
        timeline = simulate(schedule, self.problem.costs)
        times = {o.op: (float(o.start), float(o.end)) for o in timeline.operations}
        values: dict[Any, float] = {self.span: float(self.problem.value(schedule))}
        values.update({variable: times[op][1] for op, variable in self.end.items()})
        orders = [(before, a, b) for (a, b), before in self.before.items() if isinstance(before, mathopt.Variable)]
        for forward, away in self.away.items():
            out, back = forward._replace(kind=Kind.O), forward._replace(kind=Kind.L)
            values[away] = float(out in times)
            if out in times:
                values[self.out[forward]], values[self.back[forward]] = times[out][0], times[back][0]
        ends = [(v, x._replace(kind=Kind.O), y._replace(kind=Kind.L)) for (x, y), v in self.offload_first.items()]
        for variable, a, b in (*orders, *self.events, *ends):
            values[variable] = float(a in times and b in times and times[a][1] <= times[b][0] + 1e-9)
        for variable, a, b in self.begun:
            # Of a forward and a reload that start together the forward counts as the first.
            tie = 1e-9 if a.kind is Kind.F else -1e-9
            values[variable] = float(a in times and b in times and times[a][0] < times[b][0] + tie)
        return mathopt.SolutionHint(variable_values=values)

    def schedule(self, values: Any) -> Schedule:
        """The schedule of a solution, offloads in the order of their ends (see cp_model.schedule_of)."""
        orders: list[list[tuple[float, int, Op]]] = [[] for _ in self.stages]
        for op, end in self.end.items():
            orders[op.stage].append((round(values[end] - float(self.time[op.kind][op.stage]), 6), 2, op))
        for forward, away in self.away.items():
            if values[away] > 0.5:
                i, j = forward.stage, forward.micro_batch
                out = values[self.out[forward]] + self._transfer(i)[0]
                orders[i].append((round(out, 6), 0, Op(Kind.O, i, j)))
                orders[i].append((round(values[self.back[forward]], 6), 1, Op(Kind.L, i, j)))
        lists = (sorted(order, key=lambda e: (e[0], e[1], e[2].micro_batch)) for order in orders)
        schedule = self.problem.schedule([op for *_, op in order] for order in lists)
        starts = {
            forward._replace(kind=kind): round(values[start[forward]], 6)
            for kind, start in ((Kind.O, self.out), (Kind.L, self.back))
            for forward in self.away
        }
        return self.problem.with_link_orders(schedule, starts)

    def _horizon(self) -> Number:
        """Big-M: everything one after the other."""
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

    def _lane(self, i: int) -> None:
        """Equations 7 and 8: one operation at a time, F before B before W."""
        ops = [Op(c, i, j) for j in self.jobs for c in COMPUTE]
        for a, b in itertools.combinations(ops, 2):
            known = self._known(a, b)
            if known is not None:
                self.before[a, b], self.before[b, a] = known, 1 - known
                first, then = (a, b) if known else (b, a)
                if then.micro_batch - first.micro_batch + COMPUTE.index(then.kind) - COMPUTE.index(first.kind) == 1:
                    self._add(self._start(then) >= self.end[first])
                continue
            forth = self.before[a, b] = self._binary()
            back = self.before[b, a] = 1 - forth if self.reductions.one_direction else self._binary()
            if not self.reductions.one_direction:
                self._add(forth + back == 1)
            self._add(self._start(b) >= self.end[a] - self.big * (1 - forth))
            self._add(self._start(a) >= self.end[b] - self.big * (1 - back))
        if self.reductions.triangles == "eager":
            for triple in itertools.permutations(ops, 3):
                self._triangle(*triple)

    def _known(self, a: Op, b: Op) -> int | None:
        """Tell whether a comes before b, where that follows; else None."""
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
        """P_ac >= P_ab + P_bc - 1, unless it holds anyway; says whether there is such a row."""
        rows = self.before[a, c], self.before[a, b], self.before[b, c]
        if all(isinstance(p, int) for p in rows):
            return False
        self._add(rows[0] >= rows[1] + rows[2] - 1)
        return True

    def relaxation(self) -> float:
        """The bound of the linear relaxation, to which the triangles that it violates are added if they are lazy.

        Infinite if the relaxation has no solution.
        """
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
        """Add the triangles that a solution violates; says how many."""
        added = 0
        for stage in self.stages:
            operations = [Op(kind, stage, j) for j in self.jobs for kind in COMPUTE]
            before = np.zeros((len(operations), len(operations)))
            for (row, a), (column, b) in itertools.permutations(enumerate(operations), 2):
                before[row, column] = mathopt.evaluate_expression(self.before[a, b], solution)
            violated = before[:, :, None] + before[None, :, :] - 1 - before[:, None, :] > 1e-6
            added += sum(
                self._triangle(*(operations[at] for at in triple))
                for triple in np.argwhere(violated)
                if len(set(triple)) == 3
            )
        return added

    def _transfers(self, i: int) -> None:
        """Equations 10 to 13 and what they lack: both directions of the host link, in the order of micro-batches."""
        there, back = self._transfer(i)
        forwards = [Op(Kind.F, i, j) for j in self.jobs]
        for x in forwards:
            away = self.away[x] = self._binary()
            self.out[x] = self.model.add_variable(lb=0, ub=self.big)
            self.back[x] = self.model.add_variable(lb=0, ub=self.big)
            backward = Op(Kind.I, i, x.micro_batch)
            early, late = map(float, (self.problem.max_lead(x._replace(kind=Kind.O)), self.problem.backward_lead(i)))
            self._add(self.out[x] >= self.end[x] - early - self.big * (1 - away))
            self._add(self.back[x] >= self.out[x] + there - self.big * (1 - away))
            self._add(self._start(backward) >= self.back[x] + back - late - self.big * (1 - away))
        for x, y in itertools.combinations(forwards, 2):
            free = self.big * (2 - self.away[x] - self.away[y])
            self._add(self.out[y] >= self.out[x] + there - free)
            self._add(self.back[y] >= self.back[x] + back - free)
        for x, y in itertools.permutations(forwards, 2):
            first = self.offload_first[x, y] = self._binary()
            self._add(first <= self.away[x])
            self._add(self.back[y] >= self.out[x] + there - self.big * (1 - first))
            if self.problem.costs.host_link == "half-duplex":
                free = self.big * (2 - self.away[x] - self.away[y] + first)
                self._add(self.out[x] >= self.back[y] + back - free)

    def _memory(self, i: int) -> None:
        """Equation 9 by events: at every start of F, and of a reload, what is resident fits."""
        costs = self.problem.costs
        free = costs.capacity_of(self.problem.placement.device_of[i])
        if free is None:
            return
        capacity = float(free)
        size, rest = float(costs.activation[i]), float(costs.activation_after_input[i])
        freed = {Kind.I: size - rest, Kind.W: rest}
        forwards = [Op(Kind.F, i, j) for j in self.jobs]
        for x in forwards:
            resident = mathopt.LinearExpression() + size + sum(size * self.before[y, x] for y in forwards if y != x)
            resident -= sum(
                freed[c] * self.before[Op(c, i, y.micro_batch), x] for y in forwards if y != x for c in (Kind.I, Kind.W)
            )
            if self.problem.offload:
                resident += sum(size * (self._reloaded(y, x) - self._offloaded(y, x)) for y in forwards if y != x)
            self._add(resident <= capacity)
        if self.problem.offload:
            for x in forwards:
                self._at_reload(x, forwards, capacity, size, freed)

    def _offloaded(self, y: Op, x: Op) -> Any:
        """M: y's offload has ended when F of x starts."""
        done = self._binary()
        self._add(done <= self.away[y])
        self._add(self.out[y] + self._transfer(y.stage)[0] <= self._start(x) + self.big * (1 - done))
        self.events.append((done, y._replace(kind=Kind.O), x))
        return done

    def _reloaded(self, y: Op, x: Op) -> Any:
        """N: y's reload counts when F of x starts; if not, it starts no earlier."""
        counts = self._binary()
        self._add(counts <= self.away[y])
        self._add(self.back[y] >= self._start(x) - self.big * (counts + 1 - self.away[y]))
        self.counted[y, x] = counts
        self.begun.append((counts, y._replace(kind=Kind.L), x))
        return counts

    def _at_reload(self, y: Op, forwards: list[Op], capacity: float, size: float, freed: dict[Kind, float]) -> None:
        """Limit memory at the start of y's reload, where its own offload and reload cancel."""
        resident = size
        for x in forwards:
            for c, amount in freed.items():
                ended = self._binary()
                self._add(self.end[Op(c, y.stage, x.micro_batch)] <= self.back[y] + self.big * (1 - ended))
                resident -= amount * ended
                self.events.append((ended, Op(c, y.stage, x.micro_batch), y._replace(kind=Kind.L)))
            if x == y:
                continue
            counts = self._binary()
            self._add(self._start(x) >= self.back[y] - self.big * (counts + 1 - self.away[y]))
            self._add(self.counted[y, x] + counts >= self.away[y])
            self.begun.append((counts, x, y._replace(kind=Kind.L)))
            resident += size * counts - size * self.offload_first[x, y]
            if x.micro_batch < y.micro_batch:
                resident += size * self.away[x]
        self._add(resident <= capacity + size * (2 * len(forwards) + 1) * (1 - self.away[y]))

    def _data(self) -> None:
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
        """Equations 18 and 19: transfers of a link group go one at a time; half duplex, whatever their direction."""
        half = self.problem.costs.host_link == "half-duplex"
        out, back = (self.out, 0), (self.back, 1)
        pairs = list(itertools.product((out, back), repeat=2)) if half else [(out, out), (back, back)]
        for group in self.problem.costs.link_groups:
            for a, b in itertools.combinations(group, 2):
                for x, y in itertools.product(self._forwards(a), self._forwards(b)):
                    for (start_x, which_x), (start_y, which_y) in pairs:
                        times = self._transfer(x.stage)[which_x], self._transfer(y.stage)[which_y]
                        self._one_at_a_time((x, start_x[x], times[0]), (y, start_y[y], times[1]))

    def _forwards(self, device: int) -> Iterator[Op]:
        return (op for op in self.away if op.stage == device)

    def _one_at_a_time(self, one: Transfer, other: Transfer) -> None:
        """Require that one of two transfers ends before the other starts, if both are offloaded."""
        (x, start_x, time_x), (y, start_y, time_y) = one, other
        first, free = self._binary(), self.big * (2 - self.away[x] - self.away[y])
        self._add(start_y >= start_x + time_x - self.big * (1 - first) - free)
        self._add(start_x >= start_y + time_y - self.big * first - free)
