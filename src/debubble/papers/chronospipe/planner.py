"""ChronosPipe ALL: Chronos-Pipe with as much recomputation and offloading as the memory limit requires.

Source: Lin et al., ChronosPipe; the paper combines the parts by hand and names no planner, so the search is ours.

The search chooses the number of chunks, the recomputed units, the chunks whose optimizer states or activations are
offloaded, and the number of micro-batches whose gradients are reduced together.  Recomputation generalizes the paper's
"recompute shallow layer first": units with the least recompute time per byte and lifespan come first, so shallow chunks
before deep ones and cheap operators before full layers.  Per combination, bisection finds how much of that order is
needed, on a run that is just long enough for the steady phase.  The combinations with the best estimates are then
simulated in full, with fused backwards, as in the paper, and with split ones.
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
"""Combinations that `quick_step` tries until one fits."""
MAX_FINALISTS = 6
"""Combinations that are simulated in full, once one of them fits."""
TRIAL_EFFORT_SHARE = 0.7
"""Fraction of the effort after which no further combination is tried."""


@dataclass(frozen=True)
class _Fit:
    """A combination, the recomputation it needs to fit, and its estimated step time."""

    combination: Combination
    increments: Sequence[ChunkIncrement]
    estimated_time: Number


def estimated_step(problem: Problem) -> float:
    """Estimated seconds of a step with the best combination; infinite if none is estimated to fit."""
    builder = CombinationBuilder.for_problem(problem)
    return builder.estimated_time(builder.combinations()[0])


def quick_step(problem: Problem, spend: Callable[[float], None]) -> float:
    """Step time of the first combination that fits, in the order of their estimates.

    `spend` is called with the search's cost in seconds of the reference machine.  Raises InfeasibleError if none of
    the first MAX_TRIALS fits.
    """
    promising = CombinationBuilder.for_problem(problem).combinations()[:MAX_TRIALS]
    search = ChronosSearch(replace(problem, effort=0.0), promising)
    try:
        return search.estimated_time()
    finally:
        spend(search.effort.spent)


@planner(
    "chronos",
    paper="ChronosPipe",
    searches=True,
    host_estimate=HostEstimate(estimated_step=estimated_step, quick_step=quick_step),
)
def chronos(problem: Problem) -> Solution:
    """Find the fastest ChronosPipe combination that fits."""
    return ChronosSearch(problem).solution()


class ChronosSearch:
    """One search: finds the combinations that fit, then simulates the best of them in full.

    Args:
        problem: The problem to plan.
        combinations: The combinations to try; all by default.
    """

    def __init__(self, problem: Problem, combinations: Sequence[Combination] | None = None) -> None:
        self.problem, self.effort = problem, problem.begun()
        self.builder = CombinationBuilder.for_problem(problem)
        self.combinations = self.builder.combinations() if combinations is None else combinations
        self.reason: DebubbleError | None = None

    def estimated_time(self) -> float:
        """Estimated seconds of a step of the first combination that fits.  Raises InfeasibleError if none does."""
        fits = self._fitting_combinations()
        if not fits:
            raise self._infeasible_error()
        return float(fits[0].estimated_time)

    def solution(self) -> Solution:
        """The fastest solution.  Raises InfeasibleError if none fits, CutOffError if the deadline came first."""
        best: tuple[Number, Solution] | None = None
        for rank, fit in enumerate(sorted(self._fitting_combinations(), key=lambda fit: fit.estimated_time)):
            if best is not None and (rank >= MAX_FINALISTS or self.effort.over):
                break
            increments = self._needed_increments(fit)
            unsplit = self.builder.build(fit.combination, increments, micro_batches=self.problem.micro_batches)
            for solution in (unsplit, replace(unsplit, schedule=unsplit.schedule.with_split_backwards())):
                self.effort.spend(SIMULATION_PRICE * solution.schedule.stages * self.problem.micro_batches)
                try:
                    timeline = simulate(solution.schedule, solution.costs)
                    if solution.partition is not None:
                        check_host_memory(self.problem.units, solution.partition, timeline)
                except InfeasibleError as error:
                    self._record_reason(error)
                    continue
                time = self.problem.step_time(timeline)
                if best is None or time < best[0]:
                    best = time, solution
        if best is None:
            if self.effort.cut_off:
                raise CutOffError("No combination of ChronosPipe's parts had been found to fit at the deadline.")
            raise self._infeasible_error()
        return replace(best[1], cut_off=self.effort.cut_off)

    def _record_reason(self, error: DebubbleError) -> None:
        """Record the last reason why a combination does not fit; host memory takes precedence."""
        if not isinstance(self.reason, HostMemoryError) or isinstance(error, HostMemoryError):
            self.reason = error

    def _infeasible_error(self) -> InfeasibleError:
        """The error that says why nothing fits."""
        if isinstance(self.reason, HostMemoryError):
            return self.reason
        return InfeasibleError(f"ChronosPipe fits in no form: {self.reason}")

    def _fitting_combinations(self) -> list[_Fit]:
        """The combinations that fit, in the order in which they were tried."""
        fits: list[_Fit] = []
        for combination in self.combinations:
            if self.effort.deadline.passed or (fits and self.effort.spent > TRIAL_EFFORT_SHARE * self.problem.effort):
                break
            if any(not fit.increments and fit.combination.is_subset_of(combination) for fit in fits):
                continue
            try:
                fits.append(self._minimal_recomputation(combination))
            except InfeasibleError as error:
                self._record_reason(error)
        return fits

    def _minimal_recomputation(self, combination: Combination) -> _Fit:
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
        """The fit's increments without the superfluous ones, removed in order of falling price."""
        needed = list(fit.increments)
        # Equal prices keep the order of the list, so that every process removes the same.
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
        """Build a run just long enough for the steady phase.  Raises InfeasibleError if it does not fit."""
        short = min(self.problem.micro_batches, (2 * self.problem.devices + 4) * combination.group)
        self.effort.spend(MEMORY_CHECK_PRICE * self.problem.devices * combination.chunks * short)
        solution = self.builder.build(combination, increments, micro_batches=short)
        if solution.costs.memory_limit is not None:
            # The memory check of lowering, without the rest of lowering.
            tables = OpCosts.from_schedule(solution.schedule, solution.costs).tables()
            for device in range(self.problem.devices):
                check_memory(solution.schedule, solution.costs, device, tables)
        return solution
