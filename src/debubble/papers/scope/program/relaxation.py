"""SCOPE's program with fractions of layers: a bound on it that takes no search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from debubble.papers.scope.program.ends import Ends, ends_of_long_runs
from debubble.papers.scope.program.instance import RESOLUTION, Instance
from debubble.papers.scope.program.loads import dealable
from debubble.papers.scope.program.subproblem import Open
from debubble.search.effort import LINEAR, Effort

LAYERS_PER_LINEAR = 100
"""Variables of a linear program that takes LINEAR."""
RESOLVED = 0.15
"""Share of that time for an optimum close to the last one."""
ROUNDING = 1e-6
"""Share of the optimum by which the solver's arithmetic may be wrong."""

WHOLE = 4.0
"""How much more it is worth to divide times where another layer fits on every device than somewhere else."""


@dataclass(frozen=True)
class Relaxation:
    """The optimum of the relaxation, in time units: a bound on weight x (max T) + sum T, and its part max T."""

    bound: int
    slowest: tuple[float, ...]
    """One time; by the per-chunk reading one of each chunk, of which max T is the sum."""


@dataclass(frozen=True)
class Box:
    """Times of the chunks: none shorter than the lowest, none longer than the highest, and the longest sum."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    total: int

    @property
    def widest(self) -> int:
        """The chunk whose times differ most."""
        return max(range(len(self.low)), key=self.width)

    @property
    def size(self) -> int:
        """The sum of its widths."""
        return sum(self.high) - sum(self.low)

    def width(self, chunk: int) -> int:
        """How much its times differ."""
        return self.high[chunk] - self.low[chunk]

    def clipped(self) -> Box:
        """Without times too long for the sum, however short the others are."""
        left = max(0, self.total - sum(self.low))
        return replace(self, high=tuple(min(b, a + left) for a, b in zip(self.low, self.high, strict=True)))

    def divided(self, grid: int, steps: Sequence[Sequence[tuple[int, float]]]) -> tuple[Box, Box]:
        """The longer and the shorter times of a chunk, divided where one more layer fits or in the middle.

        Args:
            grid: What the middle is a multiple of, if there is one.
            steps: Per chunk, the times of layers that it may hold, and the shares of the devices where it may.
        """
        chunk = self.widest
        middle = (self.low[chunk] + self.high[chunk]) // 2
        at = middle - middle % grid if middle - middle % grid > self.low[chunk] else middle
        lower, best = at, self.width(chunk) / 2
        for other, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            for step, share in steps[other]:
                for time in range(low - low % step + step, high + 1, step):
                    if (worth := WHOLE * share * min(time - low, high - time)) > best:
                        chunk, at, lower, best = other, time, time - 1, worth

        def with_time(times: tuple[int, ...], time: int) -> tuple[int, ...]:
            return (*times[:chunk], time, *times[chunk + 1 :])

        longer, shorter = replace(self, low=with_time(self.low, at)), replace(self, high=with_time(self.high, lower))
        return longer.clipped(), shorter.clipped()

    def rounded(self, grid: int, outer: Box) -> Box:
        """With times on a grid, which fewer are known for, as far as it stays within the outer box."""
        low = tuple(max(a, time - time % grid) for a, time in zip(outer.low, self.low, strict=True))
        high = tuple(min(b, time + -time % grid) for b, time in zip(outer.high, self.high, strict=True))
        return replace(self, low=low, high=high)


def relaxed(
    inst: Instance,
    effort: Effort,
    *,
    least: float = 0.0,
    opened: Sequence[Open] | None = None,
    per_chunk: bool = False,
) -> Relaxation | None:
    """Solve the program without integrality and without the order of runs: a relaxation of it.

    Args:
        inst: The instance; every row of memory counts, but not what recomputation brings back at a time.
        effort: Counter of the work.
        least: Time below which no device can be the slowest, in time units.
        opened: Per device and chunk, the runs that it may hold; None: those of some order.
        per_chunk: Chunks cannot make up for each other.

    Returns:
        None if not even fractions of layers fit.
    """
    if opened is None:
        runs = [tuple(r for r, window in enumerate(inst.windows) if s in window) for s in range(inst.stages)]
        opened = [tuple(runs[s] for s in device.stages) for device in inst.devices]
    return LinearRelaxation(inst, effort, opened, per_chunk=per_chunk, least=least).optimum()


class LinearRelaxation:
    """The linear program of `relaxed`, which may be asked again with other bounds on the times of the chunks."""

    def __init__(
        self, inst: Instance, effort: Effort, opened: Sequence[Open], *, per_chunk: bool, least: float = 0.0
    ) -> None:
        from ortools.linear_solver import pywraplp

        self._inst, self._effort = inst, effort
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        layers = [
            {(c, r, o): solver.NumVar(0, inst.counts[r], "") for c, some in enumerate(chunks) for r in some
             for o in range(len(inst.times[r]))}
            for chunks in opened
        ]  # fmt: skip
        self._price = LINEAR * sum(map(len, layers)) / LAYERS_PER_LINEAR
        effort.spend(self._price)

        def row(low: float, high: float, entries: Iterable[tuple[Any, float]]) -> Any:
            constraint = solver.Constraint(low, high)
            for variable, entry in entries:
                constraint.SetCoefficient(variable, entry)
            return constraint

        for run, count in enumerate(inst.counts):
            row(count, count, ((v, 1) for held in layers for (_, r, _), v in held.items() if r == run))
        self._slowest = [solver.NumVar(0, math.inf, "") for _ in range(inst.chunks if per_chunk else 1)]
        self._total = row(least / RESOLUTION, math.inf, ((time, 1) for time in self._slowest))
        for device, held in zip(inst.devices, layers, strict=True):
            for kept in device.kept:
                sizes = ((v, (kept[r][o][c] + device.static[r]) / RESOLUTION) for (c, r, o), v in held.items())
                row(-math.inf, device.room / RESOLUTION, sizes)
            for chunk in range(inst.chunks):
                row(1, math.inf, ((v, 1) for (c, _, _), v in held.items() if c == chunk))
            for at, time in enumerate(self._slowest):
                times = [
                    (v, -inst.times[r][o] / RESOLUTION) for (c, r, o), v in held.items() if c == at or not per_chunk
                ]
                row(0, math.inf, [(time, 1), *times])
        self._value = [(time, float(inst.weight)) for time in self._slowest]
        self._value += [(v, inst.times[r][o] / RESOLUTION) for held in layers for (_, r, o), v in held.items()]
        self._limit: Any = row(-math.inf, math.inf, self._value)

    def optimum(self) -> Relaxation | None:
        """The least value; None if not even fractions of layers fit."""
        value = self._least(self._value)
        if math.isinf(value):
            return None
        bound = value * RESOLUTION * (1 - ROUNDING)
        return Relaxation(math.floor(bound), tuple(time.solution_value() * RESOLUTION for time in self._slowest))

    def ranges(self, box: Box, value: float) -> Box | None:
        """The smallest box that holds every answer of this one whose value is no larger; None if there is none."""
        self._solver.SetSolverSpecificParametersAsString("use_preprocessing: false")  # so it starts from the last basis
        self._bound(box)
        self._limit.SetUb(value / RESOLUTION * (1 + ROUNDING))
        low, high = list(box.low), list(box.high)
        for chunk, time in enumerate(self._slowest):
            most, least = self._least([(time, -1.0)]), self._least([(time, 1.0)])
            if math.inf in (most, least):
                return None
            high[chunk] = min(high[chunk], math.ceil(-most * RESOLUTION * (1 + ROUNDING)))
            low[chunk] = max(low[chunk], math.floor(least * RESOLUTION * (1 - ROUNDING)))
        total = -self._least([(time, -1.0) for time in self._slowest])
        return Box(tuple(low), tuple(high), min(box.total, math.ceil(total * RESOLUTION * (1 + ROUNDING))))

    def value(self, box: Box) -> float:
        """A value that no answer in the box is below."""
        self._bound(box)
        self._limit.SetUb(math.inf)
        return self._least(self._value) * RESOLUTION * (1 - ROUNDING)

    def _bound(self, box: Box) -> None:
        for time, low, high in zip(self._slowest, box.low, box.high, strict=True):
            time.SetBounds(low / RESOLUTION, high / RESOLUTION)
        self._total.SetUb(box.total / RESOLUTION)

    def _least(self, costs: Sequence[tuple[Any, float]]) -> float:
        """The least cost; infinite if there is no solution, minus infinity if the solver does not tell."""
        self._effort.spend(RESOLVED * self._price)
        objective = self._solver.Objective()
        objective.Clear()
        for variable, cost in costs:
            objective.SetCoefficient(variable, cost)
        objective.SetMinimization()
        status = self._solver.Solve()
        if status == self._solver.INFEASIBLE:
            return math.inf
        return float(objective.Value()) if status == self._solver.OPTIMAL else -math.inf


def relaxations(inst: Instance, effort: Effort) -> list[tuple[Relaxation, Ends]]:
    """The relaxations of the per-chunk reading for every choice of ends of long runs, the best first."""
    if not dealable(inst):
        return []
    each = ((relaxed(inst, effort, opened=ends.opened(inst), per_chunk=True), ends) for ends in ends_of_long_runs(inst))
    found = [(relaxation, ends) for relaxation, ends in each if relaxation is not None]
    return sorted(found, key=lambda pair: pair[0].bound)
