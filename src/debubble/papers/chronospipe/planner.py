"""ChronosPipe ALL: Chronos-Pipe, with as much of the rest as the memory limit asks for.

Source: Lin et al., ChronosPipe; the paper combines the parts by hand and names no planner, so the search is ours.

It chooses the number of chunks, what recomputes, whose optimizer states live on the host, whose activations go there,
and how many micro-batches reduce their gradients together.  What recomputes follows the paper's principle in general
form: first what takes the least time per byte and time that the byte would live, so shallow chunks before deep ones,
and cheap operators before whole layers.  For each combination, how much of that order is needed is found by bisection
on a short run, which has the same steady phase; those that promise to be fastest are then simulated whole, with their
backwards whole, as in the paper, and split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from debubble.costs.host_memory import check_host_memory
from debubble.errors import HostMemoryError
from debubble.ir import CutOffError, DebubbleError, InfeasibleError, Number
from debubble.ir.lowering.admission import check_memory
from debubble.ir.lowering.op_costs import OpCosts
from debubble.papers.chronospipe.combinations import ChunkIncrement, Combination, CombinationBuilder
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import HostEstimate, planner
from debubble.search.effort import MEMORY_CHECK_PRICE, SIMULATION_PRICE
from debubble.simulator import simulate

MAX_TRIALS = 12
"""Combinations that a quick plan tries; it is the first of them that fits."""
FINALISTS = 6
"""Combinations that are simulated whole, once one of them fits."""
SEARCH = 0.7
"""Share of the effort after which no further combination is tried."""


@dataclass(frozen=True)
class _Fit:
    """A combination with the recomputation that it needs, and the step time that a whole run may take."""

    combination: Combination
    increments: Sequence[ChunkIncrement]
    expected: Number


def estimated_step(problem: Problem) -> float:
    """Seconds that a step may take with the combination that promises most; infinite if nothing seems to fit."""
    builder = CombinationBuilder.of(problem)
    return builder.promise(builder.combinations()[0])


def quick_step(problem: Problem, spend: Callable[[float], None]) -> float:
    """Seconds of a step of the first combination that fits, of those that promise most.

    `spend` is told the seconds of the reference machine that it takes.  Raises InfeasibleError if none fits.
    """
    promising = CombinationBuilder.of(problem).combinations()[:MAX_TRIALS]
    search = ChronosSearch(replace(problem, effort=0.0), promising)
    try:
        return search.expected()
    finally:
        spend(search.effort.spent)


@planner(
    "chronos",
    paper="ChronosPipe",
    searches=True,
    host_estimate=HostEstimate(estimated_step=estimated_step, quick_step=quick_step),
)
def chronos(problem: Problem) -> Solution:
    """The fastest ChronosPipe that fits: chunks, recomputation, offloaded states and activations, and groups."""
    return ChronosSearch(problem).solution()


class ChronosSearch:
    """One search: the combinations that fit, then the most promising of them in full.

    Args:
        problem: What to plan.
        combinations: The only ones to try; all by default.
    """

    def __init__(self, problem: Problem, combinations: Sequence[Combination] | None = None) -> None:
        self.problem, self.effort = problem, problem.begun()
        self.builder = CombinationBuilder.of(problem)
        self.combinations = self.builder.combinations() if combinations is None else combinations
        self.reason: DebubbleError | None = None

    def expected(self) -> float:
        """Seconds that a step may take with the first combination that fits.  Raises InfeasibleError if none does."""
        fits = self._fits()
        if not fits:
            raise self._refusal()
        return float(fits[0].expected)

    def solution(self) -> Solution:
        """The fastest of all.  Raises InfeasibleError if none fits, CutOffError if none was found in time."""
        best: tuple[Number, Solution] | None = None
        for rank, fit in enumerate(sorted(self._fits(), key=lambda fit: fit.expected)):
            if best is not None and (rank >= FINALISTS or self.effort.over):
                break
            increments = self._needed_increments(fit)
            whole = self.builder.build(fit.combination, increments, micro_batches=self.problem.micro_batches)
            for solution in (whole, replace(whole, schedule=whole.schedule.with_split_backwards())):
                self.effort.spend(SIMULATION_PRICE * solution.schedule.stages * self.problem.micro_batches)
                try:
                    timeline = simulate(solution.schedule, solution.costs)
                    if solution.partition is not None:
                        check_host_memory(self.problem.units, solution.partition, timeline)
                except InfeasibleError as error:
                    self._note(error)
                    continue
                time = self.problem.step_time(timeline)
                if best is None or time < best[0]:
                    best = time, solution
        if best is None:
            if self.effort.cut_off:
                raise CutOffError("No combination of ChronosPipe's parts had been found to fit at the deadline.")
            raise self._refusal()
        return replace(best[1], cut_off=self.effort.cut_off)

    def _note(self, error: DebubbleError) -> None:
        """Keep the last reason why a combination does not fit; one of the host's memory is kept."""
        if not isinstance(self.reason, HostMemoryError) or isinstance(error, HostMemoryError):
            self.reason = error

    def _refusal(self) -> InfeasibleError:
        """The error that says why nothing fits."""
        if isinstance(self.reason, HostMemoryError):
            return self.reason
        return InfeasibleError(f"ChronosPipe fits in no form: {self.reason}")

    def _fits(self) -> list[_Fit]:
        """The combinations that fit, in the order in which they were tried."""
        fits: list[_Fit] = []
        for combination in self.combinations:
            if self.effort.deadline.passed or (fits and self.effort.spent > SEARCH * self.problem.effort):
                break
            if any(not fit.increments and fit.combination.saves_no_more_than(combination) for fit in fits):
                continue
            try:
                fits.append(self._least_recomputation(combination))
            except InfeasibleError as error:
                self._note(error)
        return fits

    def _least_recomputation(self, combination: Combination) -> _Fit:
        """Raises InfeasibleError if not even full recomputation fits."""
        increments: Sequence[ChunkIncrement] = ()
        try:
            solution = self._short_run(combination, increments)
        except InfeasibleError:
            order = self.builder.increments(combination)
            increments, solution = order, self._short_run(combination, order)
            low, high = 0, len(order)
            while low + 1 < high:
                middle = (low + high) // 2
                try:
                    solution = self._short_run(combination, order[:middle])
                    increments, high = order[:middle], middle
                except InfeasibleError:
                    low = middle
        timeline = simulate(solution.schedule, solution.costs)
        short = solution.schedule.micro_batches
        self.effort.spend(SIMULATION_PRICE * solution.schedule.stages * short)
        further = (self.problem.micro_batches - short) * max(timeline.busy) / short
        return _Fit(combination, increments, self.problem.step_time(timeline) + further)

    def _needed_increments(self, fit: _Fit) -> Sequence[ChunkIncrement]:
        """The fit's increments without those that the dearer ones after them have made superfluous."""
        needed = list(fit.increments)
        # In the order of the list, and so the same in every process, where prices are equal.
        for increment in sorted(dict.fromkeys(needed), key=lambda i: -i.price):
            while increment in needed:
                fewer = needed.copy()
                fewer.remove(increment)
                try:
                    self._short_run(fit.combination, fewer)
                except InfeasibleError:
                    break
                needed = fewer
        return needed

    def _short_run(self, combination: Combination, increments: Sequence[ChunkIncrement]) -> Solution:
        """A run just long enough for the steady phase.  Raises InfeasibleError if it does not fit."""
        short = min(self.problem.micro_batches, (2 * self.problem.devices + 4) * combination.group)
        self.effort.spend(MEMORY_CHECK_PRICE * self.problem.devices * combination.chunks * short)
        solution = self.builder.build(combination, increments, micro_batches=short)
        if solution.costs.memory_limit is not None:
            # What lowering would check, without its cost.
            tables = OpCosts.of(solution.schedule, solution.costs).tables()
            for device in range(self.problem.devices):
                check_memory(solution.schedule, solution.costs, device, tables)
        return solution
