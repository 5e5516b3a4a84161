"""The memory of a device in the CP-SAT model, in integer steps of a grid, rounded in favor of the schedule.

Without offload and recomputation, memory limits are precedences.  Equal micro-batches may keep their order within every
kind (an exchange argument: rename them in the order of their starts).  When its forward j starts, a device with one
stage then holds j + 1 activations less what its first `a` I and its first `b` W have freed, b <= a <= j: the forward
waits for one of a few minimal pairs (a, b), the corners of a staircase.  If W frees everything, the only corner is
b = j + 1 - limit; if I does, it is a = j + 1 - limit.  CP-SAT is far better at such disjunctions of precedences than
at areas under a limit: p = 8, m = 32 without offload is proven in seconds.

In all other cases memory is a cumulative constraint over the intervals in which something is resident.
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
    *, capacity: Number, retained: Number, input_frees: Number, weight_frees: Number, forwards: int
) -> list[Pairs]:
    """The minimal (a, b) of each forward, which retains `retained` bytes; no pairs if it never fits."""
    return [_corners(retained * (j + 1) - capacity, input_frees, weight_frees, j) for j in range(forwards)]


Pairs = list[tuple[int, int]]


def _corners(excess: Number, input_frees: Number, weight_frees: Number, finished: int) -> Pairs:
    """The minimal (a, b), b <= a <= finished, that free `excess` bytes."""
    corners: Pairs = []
    for a in range(finished + 1):
        b = _count_needed(excess - a * input_frees, weight_frees)
        if b <= a and (not corners or b < corners[-1][1]):
            corners.append((a, int(b)))
        if b == 0:
            break
    return corners


def _count_needed(excess: Number, size: Number) -> float:
    """How often `size` must be freed."""
    if excess <= 0:
        return 0
    return math.ceil(excess / size - 1e-9) if size else math.inf


Pair = tuple[int, int]
"""A stage and a micro-batch."""
MEMORY_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
"""Kinds that change a device's memory."""


@dataclass(kw_only=True)
class Variables:
    """A CP-SAT model with its variables by operation."""

    problem: OrderProblem
    cp: Any
    starts: dict[Op, Any] = field(default_factory=dict)
    ends: dict[Op, Any] = field(default_factory=dict)
    present: dict[Op, Any] = field(default_factory=dict)
    """Presence literals of optional operations."""
    fused: frozenset[Pair]
    """Pairs whose backward is a B."""
    horizon: int
    size_unit: Number

    def backward(self, stage: int, j: int) -> Op:
        """The operation that computes the gradient of the input: B or I."""
        return Op(Kind.B if (stage, j) in self.fused else Kind.I, stage, j)

    def weight(self, stage: int, j: int) -> Op:
        """The operation that computes the gradients of the weights: B or W."""
        return Op(Kind.B if (stage, j) in self.fused else Kind.W, stage, j)

    def size(self, op: Op, freed: int, *, recomputed: bool = False) -> int:
        """Grid steps that an operation allocates, or frees if `freed`."""
        costs = self.problem.op_costs
        size = (costs.frees if freed else costs.allocates)(op, explicit=recomputed)
        return math.floor(size / self.size_unit + 1e-9)


def limit_memory(variables: Variables, device: int, *, weights: bool = True, ordered: bool = True) -> None:
    """Constrain a device to its memory limit.  Without `weights`, each W ends together with its I.

    `ordered`: micro-batches keep their order within each kind.
    """
    problem = variables.problem
    free = problem.costs.capacity_of(device)
    if free is None:
        return
    capacity = math.floor(free / variables.size_unit + 1e-9) + _slack(variables, device)
    if ordered and _staircase_suffices(variables, device):
        _limit_by_staircase(variables, problem.placement.stages_of[device][0], capacity, weights=weights)
        return
    resident = _Resident(variables)
    for stage in problem.placement.stages_of[device]:
        for j in range(problem.micro_batches):
            resident.add(stage, j)
    variables.cp.add_cumulative(resident.intervals, resident.sizes, capacity)


def _staircase_suffices(variables: Variables, device: int) -> bool:
    """Tell whether the staircase models a device's memory: one stage, equal micro-batches, only F allocates."""
    problem = variables.problem
    device_stages = problem.placement.stages_of[device]
    is_simple = not problem.offload and not problem.recompute and problem.is_uniform
    backwards = {variables.backward(device_stages[0], j)._replace(micro_batch=0) for j in range(problem.micro_batches)}
    allocates = any(problem.op_costs.allocates(backward) for backward in backwards)
    return is_simple and len(device_stages) == 1 and not allocates


def _slack(variables: Variables, device: int) -> int:
    """Grid steps added to a device's limit, because freed sizes are rounded down too."""
    problem = variables.problem
    device_stages = problem.placement.stages_of[device]
    sizes: list[Number] = []
    for stage, kind, explicit in itertools.product(device_stages, MEMORY_KINDS, (False, True)):
        if kind not in (Kind.O, Kind.L) or problem.offload:
            op, costs = Op(kind, stage, 0), problem.op_costs
            changes = costs.allocates(op, explicit=explicit), costs.frees(op, explicit=explicit)
            sizes += [size / variables.size_unit for size in changes]
    if problem.is_uniform and all(abs(float(size) - round(size)) < 1e-9 for size in sizes):
        return 0
    return 4 * len(device_stages) * problem.micro_batches


def _limit_by_staircase(v: Variables, stage: int, capacity: int, *, weights: bool) -> None:
    """Make every forward of a stage wait for the backwards of one of its corners."""
    # A fused backward frees memory at its end, which is the end of both halves.
    by_input, by_weight = (v.size(Op(kind, stage, 0), 1) for kind in (Kind.I, Kind.W))
    stairs = staircase(
        capacity=capacity,
        retained=v.size(Op(Kind.F, stage, 0), 0),
        input_frees=by_input if weights else by_input + by_weight,
        weight_frees=by_weight if weights else 0,
        forwards=v.problem.micro_batches,
    )

    def wait(j: int, half: Callable[[int, int], Op], count: int, *when: Any) -> None:
        """Forward j starts after the first `count` operations of a half of the backward."""
        if count:
            waits = v.cp.add(v.starts[Op(Kind.F, stage, j)] >= v.ends[half(stage, count - 1)])
            waits.only_enforce_if(list(when))

    for j, corners in enumerate(stairs):
        chosen = [v.cp.new_bool_var("") for _ in corners]
        v.cp.add_bool_or(chosen)
        for which, half in enumerate((v.backward, v.weight)):
            minimum = min((corner[which] for corner in corners), default=0)
            wait(j, half, minimum)
            for literal, corner in zip(chosen, corners, strict=True):
                if corner[which] > minimum:
                    wait(j, half, corner[which], literal)


class _Resident:
    """A device's memory as interval variables and their sizes, for a cumulative constraint."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.intervals: list[Any] = []
        self.sizes: list[int] = []

    def add(self, stage: int, j: int) -> None:
        """Add the memory of a micro-batch on a stage."""
        v, problem = self.variables, self.variables.problem
        forward, backward, weight = Op(Kind.F, stage, j), v.backward(stage, j), v.weight(stage, j)
        out, recompute = Op(Kind.O, stage, j), Op(Kind.R, stage, j)
        if weight != backward:
            self._add(v.ends[backward], v.ends[weight], v.size(weight, 1))
        self._add(v.starts[backward], v.ends[backward], v.size(backward, 0))
        begin, end = v.starts[forward], v.ends[backward]
        retained, min_retained = v.size(forward, 0), v.size(forward, 0, recomputed=True)
        offloaded = [v.present[out]] if out in v.present else []
        recomputed = [v.present[recompute]] if problem.recompute else []
        if not offloaded:
            self._add(begin, end, min_retained if recomputed else retained)
        else:
            self._add_offloadable(stage, j, retained, v.size(out, 1), unless=recomputed)
        if recomputed:
            if offloaded:
                self._add_offloadable(stage, j, min_retained, v.size(out, 1, recomputed=True), when=recomputed)
            else:
                self._add(begin, end, retained - min_retained, unless=recomputed)
            self._add(v.starts[recompute], end, retained - min_retained, when=recomputed)

    def _add_offloadable(
        self, stage: int, j: int, retained: int, moved: int, *, when: Iterable[Any] = (), unless: Iterable[Any] = ()
    ) -> None:
        """Add memory that a forward retains, of which `moved` is on the host between O and L if offloaded."""
        v = self.variables
        out, back = Op(Kind.O, stage, j), Op(Kind.L, stage, j)
        offloaded = v.present[out]
        begin, end = v.starts[Op(Kind.F, stage, j)], v.ends[v.backward(stage, j)]
        self._add(begin, end, retained - moved, when=when, unless=unless)
        self._add(begin, end, moved, when=when, unless=[*unless, offloaded])
        self._add(begin, v.ends[out], moved, when=[*when, offloaded], unless=unless)
        self._add(v.starts[back], end, moved, when=[*when, offloaded], unless=unless)

    def _add(self, begin: Any, end: Any, size: int, *, when: Iterable[Any] = (), unless: Iterable[Any] = ()) -> None:
        """Add `size` from `begin` to `end`, if all of `when` and none of `unless` hold."""
        if not size:
            return
        literals = [*when, *(~literal for literal in unless)]
        length = self.variables.cp.new_int_var(0, self.variables.horizon, "")
        new = self.variables.cp.new_optional_interval_var
        self.intervals.append(new(begin, length, end, self._conjunction(literals), ""))
        self.sizes.append(size)

    def _conjunction(self, literals: list[Any]) -> Any:
        """A literal equivalent to the conjunction of literals."""
        if len(literals) <= 1:
            return literals[0] if literals else True
        every = self.variables.cp.new_bool_var("")
        self.variables.cp.add_bool_and(literals).only_enforce_if(every)
        self.variables.cp.add_bool_or([every, *(~literal for literal in literals)])
        return every
