"""AdaPipe: recomputation chosen per stage, and a partition that balances stage times with recomputation.

Source: Sun et al., AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning, ASPLOS 2024.

Two dynamic programs for 1F1B, where stage s has min(m, p - s) micro-batches in flight:

* the inner one is a knapsack per run of units: the least recompute time with which its activations fit (a Pareto front
  solves it for all capacities at once; equal runs share it);
* the outer one partitions the model from the back: for stages s ... p - 1 on the units from i on, the Pareto-optimal
  pairs of (slowest stage, sum of stages); a step takes sum + (m - 1) slowest, which is exact for equal stages.

The best few partitions are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Number
from debubble.planners.partitioning.fixed_partition import Stages, UnitStages
from debubble.planners.partitioning.pareto import Front, StageRecomputation, blocks, front
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner
from debubble.schedules.one_f_one_b import one_f_one_b

FINALISTS = 5
"""Number of partitions that are simulated."""
MAX_STAGE_RATIO = 2
"""Upper limit on the work of a stage, as a multiple of the mean."""


@planner("adapipe", paper="AdaPipe, ASPLOS 2024", plain=True)
def adapipe(problem: Problem) -> Solution:
    """1F1B with the least recomputation per stage, and the partition that balances it."""
    schedule = one_f_one_b(devices=problem.devices, micro_batches=problem.micro_batches)
    stages = Stages.even(problem)
    if not isinstance(stages, UnitStages):
        return stages.solution(schedule, [_required(choice, s) for s, choice in enumerate(stages.on_demand)])
    programs = DynamicPrograms(problem, stages.units)
    solutions: list[tuple[Number, Solution]] = []
    for lengths in programs.lengths()[:FINALISTS]:
        solution = replace(stages, lengths=lengths).solution(schedule, programs.choices(lengths))
        solutions.append((problem.time_of(solution.simulate()), solution))
    return min(solutions, key=lambda pair: pair[0])[1]


_Run = tuple[bool, tuple[int, ...]]
"""Whether a run of units begins inside a block, and its number of units per kind: equal runs have equal costs."""


@dataclass(frozen=True)
class _Suffix:
    """A partition of the units from i on into stages s ... p - 1, of which stage s ends at `end`."""

    slowest: float
    total: float
    end: int
    rest: _Suffix | None


class DynamicPrograms:
    """Both dynamic programs for one problem."""

    def __init__(self, problem: Problem, units: Units) -> None:
        self.problem, self.units = problem, units
        self.in_flight = [min(problem.micro_batches, problem.devices - s) for s in range(problem.devices)]
        self._fronts: dict[tuple[int, _Run], Front] = {}
        self._times: dict[tuple[int, _Run], float | None] = {}

    def lengths(self) -> list[tuple[int, ...]]:
        """Units per stage of the Pareto-optimal partitions, fastest first.  Raises InfeasibleError if none fits."""
        n, p = len(self.units.units), self.problem.devices
        cuts: list[list[_Suffix]] = [[] for _ in range(n)] + [[_Suffix(0.0, 0.0, n, None)]]
        for s in reversed(range(p)):
            begins = range(n - p + s + 1) if s else range(1)
            cuts = [_efficient(self._extend(s, i, cuts)) if i in begins else [] for i in range(n)] + [[]]
        if not cuts[0]:
            raise InfeasibleError(f"No partition fits on {p} devices, whatever its stages recompute.")
        passes = self.problem.micro_batches - 1
        return [_lengths(cut) for cut in sorted(cuts[0], key=lambda c: c.total + passes * c.slowest)]

    def choices(self, lengths: tuple[int, ...]) -> list[StageRecomputation]:
        """The recomputation of every stage of a partition."""
        chosen = []
        for s, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
            budget = self._budget(s, begin, end)
            best = front(self.units.on(s)[begin:end]).cheapest(in_flight=self.in_flight[s], budget=budget)
            chosen.append(_required(best, s))
        return chosen

    def _extend(self, s: int, begin: int, cuts: list[list[_Suffix]]) -> Iterator[_Suffix]:
        """The partitions with stage s from `begin` to every end from which the later stages fit."""
        work = self._work[s]
        max_work = MAX_STAGE_RATIO * sum(totals[-1] for totals in self._work) / self.problem.devices**2
        for end in range(begin + 1, len(cuts)):
            if end > begin + 1 and work[end] - work[begin] > max_work:
                return
            time = self._time(s, begin, end) if cuts[end] else None
            if time is not None:
                for rest in cuts[end]:
                    yield _Suffix(max(time, rest.slowest), time + rest.total, end, rest)

    def _time(self, s: int, begin: int, end: int) -> float | None:
        """Time of one micro-batch on stage s with these units; None if they do not fit."""
        key = self._run(begin, end)
        if (s, key) not in self._times:
            recompute = self._recompute(s, begin, end, key)
            work = self._work[s]
            self._times[s, key] = None if recompute is None else work[end] - work[begin] + recompute
        return self._times[s, key]

    def _recompute(self, s: int, begin: int, end: int, key: _Run) -> float | None:
        """The least recompute time with which these units fit stage s; None if there is none."""
        units, activations, budget = self.units.on(s), self._activations[s], self._budget(s, begin, end)
        if self.in_flight[s] * (activations[end] - activations[begin]) <= budget:
            return 0.0
        if (id(units), key) not in self._fronts:
            self._fronts[id(units), key] = front(units[begin:end])
        best = self._fronts[id(units), key].cheapest(in_flight=self.in_flight[s], budget=budget)
        return None if best is None else best.recompute

    def _run(self, begin: int, end: int) -> _Run:
        counts = tuple(b - a for a, b in zip(self._kinds[begin], self._kinds[end], strict=True))
        return begin in self._inside, counts

    def _budget(self, s: int, begin: int, end: int) -> float:
        units = self.units.units[begin:end]
        static = self.units.static + self.units.buffers((s,), self.problem.devices)
        static += sum(u.static + u.gathered for u in units) + max(u.workspace for u in units)
        return self.problem.limits[s] - float(static)

    @cached_property
    def _work(self) -> list[list[float]]:
        """Per device, prefix sums of the units' work."""
        return self._prefix_sums(lambda unit: float(unit.work))

    @cached_property
    def _activations(self) -> list[list[float]]:
        """Per device, prefix sums of the units' activation bytes without recomputation."""
        return self._prefix_sums(lambda unit: float(unit.activation))

    def _prefix_sums(self, number: Callable[[Unit], float]) -> list[list[float]]:
        tables = [self.units.on(device) for device in range(self.problem.devices)]
        sums = {id(table): [*accumulate(map(number, table), initial=0.0)] for table in tables}
        return [sums[id(table)] for table in tables]

    @cached_property
    def _inside(self) -> frozenset[int]:
        """The units that are not the first of their block: a stage that begins with one splits the block."""
        ends = set(accumulate(map(len, blocks(self.units.units)), initial=0))
        return frozenset(range(len(self.units.units))) - ends

    @cached_property
    def _kinds(self) -> list[tuple[int, ...]]:
        """Prefix sums of the number of units per kind; units of unequal blocks are of different kinds."""
        signatures = [
            [(u.type, u.work, u.static, u.workspace, u.activation) for u in b] for b in blocks(self.units.units)
        ]
        kinds = [(kind, *block) for block in signatures for kind in block]
        distinct = list(dict.fromkeys(kinds))
        rows = [(0,) * len(distinct)]
        for kind in kinds:
            rows.append(tuple(count + (kind == other) for count, other in zip(rows[-1], distinct, strict=True)))
        return rows


def _required(choice: StageRecomputation | None, stage: int) -> StageRecomputation:
    if choice is None:
        raise InfeasibleError(f"Stage {stage} does not fit even if it recomputes everything.")
    return choice


def _efficient(cuts: Iterator[_Suffix]) -> list[_Suffix]:
    """The Pareto-optimal partitions in slowest stage and sum of stages."""
    best: list[_Suffix] = []
    for cut in sorted(cuts, key=lambda c: (c.slowest, c.total)):
        if not best or cut.total < best[-1].total - 1e-12 * cut.total:
            best.append(cut)
    return best


def _lengths(cut: _Suffix) -> tuple[int, ...]:
    ends = [0]
    while cut.rest is not None:
        ends.append(cut.end)
        cut = cut.rest
    return tuple(end - begin for begin, end in pairwise(ends))
