"""The memory of a device in the CP-SAT model, in whole steps of a grid that are rounded in favour of the schedule.

Where nothing is moved or recomputed, memory is precedence.  Equal micro-batches may keep their order within every kind
(an exchange argument: give the names anew in the order of the starts).  What a device with one stage holds when its
forward j starts is then j + 1 activations less what its first `a` backwards for inputs and its first `b` ones for
weights have freed, b <= a <= j: the forward waits for one of a few minimal pairs (a, b), the corners of a staircase.
Where W frees everything there is one corner, b = j + 1 - limit, and where I does there is one, a = j + 1 - limit.  A
solver reasons far better with "after this backward or after that one" than with areas under a limit: p = 8, m = 32
without offload is proven in seconds.

Elsewhere memory is a cumulative constraint over the intervals in which something is resident.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from debubble.ir import Kind, Number, Op
from debubble.search.problem import OrderProblem


def staircase(
    *, capacity: Number, kept: Number, input_frees: Number, weight_frees: Number, forwards: int
) -> list[Pairs]:
    """Compute the minimal (a, b) of each forward, which adds `kept` bytes; no pairs if it never fits."""
    return [_corners(kept * (j + 1) - capacity, input_frees, weight_frees, j) for j in range(forwards)]


Pairs = list[tuple[int, int]]


def _corners(excess: Number, input_frees: Number, weight_frees: Number, finished: int) -> Pairs:
    """The minimal (a, b), b <= a <= finished, that free `excess` bytes."""
    corners: Pairs = []
    for a in range(finished + 1):
        b = _least(excess - a * input_frees, weight_frees)
        if b <= a and (not corners or b < corners[-1][1]):
            corners.append((a, int(b)))
        if b == 0:
            break
    return corners


def _least(excess: Number, size: Number) -> float:
    """Count how often `size` must be freed."""
    if excess <= 0:
        return 0
    return math.ceil(excess / size - 1e-9) if size else math.inf


Pair = tuple[int, int]
"""A stage and a micro-batch."""
SIZED = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
"""Kinds that change a device's memory."""


@dataclass(kw_only=True)
class Variables:
    """A CP-SAT model with its variables by operation."""

    problem: OrderProblem
    cp: Any
    starts: dict[Op, Any] = field(default_factory=dict)
    ends: dict[Op, Any] = field(default_factory=dict)
    present: dict[Op, Any] = field(default_factory=dict)
    """Presence literals of the optional operations."""
    whole: frozenset[Pair]
    """Pairs whose backward is one operation."""
    horizon: int
    size_unit: Number

    def backward(self, stage: int, j: int) -> Op:
        """The operation that sends the gradient on: B, or I."""
        return Op(Kind.B if (stage, j) in self.whole else Kind.I, stage, j)

    def weight(self, stage: int, j: int) -> Op:
        """The operation that computes the gradients of the weights: B, or W."""
        return Op(Kind.B if (stage, j) in self.whole else Kind.W, stage, j)

    def size(self, op: Op, which: int, *, recomputed: bool = False) -> int:
        """Steps of the grid that an operation allocates (which = 0) or frees (1)."""
        costs = self.problem.op_costs
        size = (costs.frees if which else costs.allocates)(op, explicit=recomputed)
        return math.floor(size / self.size_unit + 1e-9)


def limit_memory(variables: Variables, device: int, *, weights: bool = True, ordered: bool = True) -> None:
    """Keep a device under its limit.  Without `weights`, a W is thought to end together with its I.

    `ordered`: micro-batches keep their order within each kind.
    """
    problem = variables.problem
    free = problem.costs.capacity_of(device)
    if free is None:
        return
    capacity = math.floor(free / variables.size_unit + 1e-9) + _slack(variables, device)
    if ordered and _only_computes(variables, device):
        _limit_by_staircase(variables, problem.placement.stages_of[device][0], capacity, weights=weights)
        return
    resident = _Resident(variables)
    for stage in problem.placement.stages_of[device]:
        for j in range(problem.micro_batches):
            resident.add(stage, j)
    variables.cp.add_cumulative(resident.intervals, resident.sizes, capacity)


def _only_computes(variables: Variables, device: int) -> bool:
    """Tell whether the staircase says all of a device's memory: one stage, equal micro-batches, only F takes memory."""
    problem = variables.problem
    device_stages = problem.placement.stages_of[device]
    free = not problem.offload and not problem.recompute and problem.alike
    backwards = {variables.backward(device_stages[0], j)._replace(micro_batch=0) for j in range(problem.micro_batches)}
    takes = any(problem.op_costs.allocates(backward) for backward in backwards)
    return free and len(device_stages) == 1 and not takes


def _slack(variables: Variables, device: int) -> int:
    """Steps of the grid that rounding may cost a device: what is freed is rounded down too."""
    problem = variables.problem
    device_stages = problem.placement.stages_of[device]
    sizes: list[Number] = []
    for stage, kind, again in itertools.product(device_stages, SIZED, (False, True)):
        if kind not in (Kind.O, Kind.L) or problem.offload:
            op, costs = Op(kind, stage, 0), problem.op_costs
            changes = costs.allocates(op, explicit=again), costs.frees(op, explicit=again)
            sizes += [size / variables.size_unit for size in changes]
    if problem.alike and all(abs(float(size) - round(size)) < 1e-9 for size in sizes):
        return 0
    return 4 * len(device_stages) * problem.micro_batches


def _limit_by_staircase(v: Variables, stage: int, capacity: int, *, weights: bool) -> None:
    """Let every forward of a stage wait for the backwards of one of its corners."""
    # What a whole backward frees comes at the end of both halves.
    by_input, by_weight = (v.size(Op(kind, stage, 0), 1) for kind in (Kind.I, Kind.W))
    stairs = staircase(
        capacity=capacity,
        kept=v.size(Op(Kind.F, stage, 0), 0),
        input_frees=by_input if weights else by_input + by_weight,
        weight_frees=by_weight if weights else 0,
        forwards=v.problem.micro_batches,
    )

    def wait(j: int, half: Callable[[int, int], Op], count: int, *when: Any) -> None:
        """Forward j comes after the first `count` of a half of the backward."""
        if count:
            waits = v.cp.add(v.starts[Op(Kind.F, stage, j)] >= v.ends[half(stage, count - 1)])
            waits.only_enforce_if(list(when))

    for j, corners in enumerate(stairs):
        chosen = [v.cp.new_bool_var("") for _ in corners]
        v.cp.add_bool_or(chosen)
        for which, half in enumerate((v.backward, v.weight)):
            least = min((corner[which] for corner in corners), default=0)
            wait(j, half, least)
            for literal, corner in zip(chosen, corners, strict=True):
                if corner[which] > least:
                    wait(j, half, corner[which], literal)


class _Resident:
    """A device's memory as interval variables and their sizes, for a cumulative constraint."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.intervals: list[Any] = []
        self.sizes: list[int] = []

    def add(self, stage: int, j: int) -> None:
        """Everything of a micro-batch on a stage."""
        v, problem = self.variables, self.variables.problem
        forward, backward, weight = Op(Kind.F, stage, j), v.backward(stage, j), v.weight(stage, j)
        out, recompute = Op(Kind.O, stage, j), Op(Kind.R, stage, j)
        if weight != backward:
            self._lies(v.ends[backward], v.ends[weight], v.size(weight, 1))
        self._lies(v.starts[backward], v.ends[backward], v.size(backward, 0))
        begin, end = v.starts[forward], v.ends[backward]
        kept, at_least = v.size(forward, 0), v.size(forward, 0, recomputed=True)
        away = [v.present[out]] if out in v.present else []
        again = [v.present[recompute]] if problem.recompute else []
        if not away:
            self._lies(begin, end, at_least if again else kept)
        else:
            self._moved(stage, j, kept, v.size(out, 1), unless=again)
        if again:
            if away:
                self._moved(stage, j, at_least, v.size(out, 1, recomputed=True), when=again)
            else:
                self._lies(begin, end, kept - at_least, unless=again)
            self._lies(v.starts[recompute], end, kept - at_least, when=again)

    def _moved(
        self, stage: int, j: int, kept: int, moved: int, *, when: Iterable[Any] = (), unless: Iterable[Any] = ()
    ) -> None:
        """Memory that a forward keeps, of which `moved` may be on the host between O and L."""
        v = self.variables
        out, back = Op(Kind.O, stage, j), Op(Kind.L, stage, j)
        away = v.present[out]
        begin, end = v.starts[Op(Kind.F, stage, j)], v.ends[v.backward(stage, j)]
        self._lies(begin, end, kept - moved, when=when, unless=unless)
        self._lies(begin, end, moved, when=when, unless=[*unless, away])
        self._lies(begin, v.ends[out], moved, when=[*when, away], unless=unless)
        self._lies(v.starts[back], end, moved, when=[*when, away], unless=unless)

    def _lies(self, begin: Any, end: Any, size: int, *, when: Iterable[Any] = (), unless: Iterable[Any] = ()) -> None:
        """Add `size` bytes from one moment to another, if all of `when` and none of `unless` hold."""
        if not size:
            return
        literals = [*when, *(~literal for literal in unless)]
        length = self.variables.cp.new_int_var(0, self.variables.horizon, "")
        new = self.variables.cp.new_optional_interval_var
        self.intervals.append(new(begin, length, end, self._all(literals), ""))
        self.sizes.append(size)

    def _all(self, literals: list[Any]) -> Any:
        """A literal that is true where all of these are."""
        if len(literals) <= 1:
            return literals[0] if literals else True
        every = self.variables.cp.new_bool_var("")
        self.variables.cp.add_bool_and(literals).only_enforce_if(every)
        self.variables.cp.add_bool_or([every, *(~literal for literal in literals)])
        return every
