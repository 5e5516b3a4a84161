"""Portfolio: library schedules and list schedules x partition x recomputation, ranked by simulation.

This is the search that a person would do by hand, not a published method, and the baseline for published planners.  For
every order, number of chunks and split it takes the least recomputation that fits; for the best few, it then moves
units between stages, with new recomputation after every move.

If the states of a split by work do not fit, a split that also weighs states is tried.  As long as no order fits, CPU
optimizer steps are used for the last chunks, as few as possible.

Steps with many micro-batches are ranked and searched as a shorter step, plus the busiest device's time per missing
micro-batch; only the best candidates are built and simulated in full.

For small steps, all library schedules are also tried with their defaults, regardless of effort, so that none of them is
faster than the answer.  This takes up to a second or two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from debubble.costs.partition import Partition
from debubble.ir import CutOffError, DebubbleError, Placement, StageCosts
from debubble.planners.partitioning.local_search import (
    PartitionSearch,
    PricedSchedule,
    improve,
    loads,
    priced_stages,
    step_time,
    with_fewest_host_steps,
    with_least_recomputation,
)
from debubble.planners.portfolio.published import as_published
from debubble.planners.portfolio.trials import (
    SCALED_TRIES,
    Order,
    Trial,
    lengths_of,
    orders_of_library,
    scaled_problem,
    trials_of,
)
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution, closest
from debubble.planners.registry import planner
from debubble.planners.restriction import as_run
from debubble.registry import is_own
from debubble.schedules import schedules
from debubble.search.effort import Effort
from debubble.simulator import Repricer

FINALISTS = 3
"""Number of candidates whose partition is searched."""
RANKING_SHARE = 0.5
"""Fraction of the effort for ranking once an order fits; until then, ranking may use all of it."""
LONG_STEP, SHORT_STEP = 4, 3
"""Above the first number of micro-batches per device, steps are ranked by one with the second number."""
SMALL_STEP_PAIRS = 32
"""Maximum number of (device, micro-batch) pairs of a small step."""
SCALED_TRIAL_SECONDS = 0.01
"""Effort to build and fit an order of a scaled-down problem, in seconds of the reference machine."""


@dataclass(frozen=True)
class Candidate:
    """A trial that fits the short step.

    Attributes:
        order: Its order.
        priced: The schedule of the short step with its costs.
        time: Estimated time of the full step, with the work after the pipeline.
    """

    order: Order
    priced: PricedSchedule
    time: float


@planner("portfolio", paper="debubble's own", searches=True, plain=True)
def portfolio(problem: Problem) -> Solution:
    """Try every schedule with every number of chunks, partition and recompute to fit."""
    search = _Portfolio(problem, problem.begun())
    candidates = search.ranking()
    spare = search.effort.split_off(search.effort.remaining - search.price_in_full(candidates[0]))
    for rank, candidate in enumerate(candidates[:FINALISTS]):
        share = spare.split_off(spare.remaining / (min(FINALISTS, len(candidates)) - rank))
        improved = _as_run(search.short, improve(search.short, candidate.priced, effort=share))
        candidates[rank] = search.candidate(candidate.order, improved)
    solution = search.fastest(candidates).solution
    return replace(solution, cut_off=search.effort.cut_off, remark=search.remark_on_plugins())


class _Portfolio:
    """One search, with its problem, the short step that represents it, and its effort."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem, self.effort = problem, effort
        self._cuts: dict[tuple[str, Placement], tuple[tuple[int, ...], StageCosts]] = {}
        self._plugin_outcomes = {name: "not tried" for name, entry in schedules.items() if not is_own(entry.build)}
        """Schedule of another package -> the outcome of its trials, in words."""
        p, m = problem.devices, problem.micro_batches
        self.small = p * m <= SMALL_STEP_PAIRS
        # The short step has the same remainder modulo p, as some schedules group micro-batches by p.
        self.short = (
            replace(problem, micro_batches=SHORT_STEP * p + m % p)
            if problem.equally_long and m > LONG_STEP * p and not self.small
            else problem
        )

    def ranking(self) -> list[Candidate]:
        """The trials that fit, fastest first."""
        candidates: list[Candidate] = []
        reasons: list[DebubbleError] = []
        unlimited: set[Trial] = set()
        # Schedules of other packages come first, as their users want to know the outcome.
        trials = self._shortlist(trials_of(self.short))
        for trial in sorted(trials, key=lambda trial: trial.order.schedule not in self._plugin_outcomes):
            spare = (RANKING_SHARE if candidates else 1.0) * self.problem.effort - self.effort.spent
            if self.effort.deadline.passed or (spare < 0 and (candidates or reasons)):
                break
            best = min((candidate.time for candidate in candidates), default=math.inf)
            price = trial.price(self.short.micro_batches)
            # An order that fits without recomputation needs no variant that takes the memory limit into account.
            if trial.without_limit in unlimited or self._work(trial) >= best or (candidates and price > spare):
                continue
            self.effort.spend(price)
            try:
                priced = _as_run(self.short, self._fit(trial, cpu_optimizer=not candidates))
            except DebubbleError as error:
                self._note(trial.order, str(error))
                reasons.append(error)
                continue
            candidates.append(self.candidate(trial.order, priced))
            self._note(trial.order, f"a step of about {candidates[-1].time:.4g}")
            if not priced.schedule.fused_recompute and not priced.schedule.host_steps:
                unlimited.add(trial)
        if self.small:
            self._add_library(candidates)
        if not candidates:
            if self.effort.cut_off:
                raise CutOffError("No schedule had been fitted at the deadline.")
            raise closest(reasons)
        return sorted(candidates, key=lambda candidate: candidate.time)

    def _note(self, order: Order, words: str) -> None:
        """Record the outcome of an order if its schedule is from another package."""
        if order.schedule in self._plugin_outcomes:
            self._plugin_outcomes[order.schedule] = words

    def remark_on_plugins(self) -> str | None:
        """The outcomes of schedules of other packages; None if there are none."""
        return "; ".join(f"{name}: {words}" for name, words in self._plugin_outcomes.items()) or None

    def _add_library(self, candidates: list[Candidate]) -> None:
        """Add the library schedules with their defaults that fit and may be faster than the candidates."""
        for order in orders_of_library(self.problem):
            best = min((candidate.time for candidate in candidates), default=math.inf)
            if self._work(Trial(order, "even")) < best and not self.effort.deadline.passed:
                try:
                    priced = _as_run(self.problem, as_published(self.problem, order))
                except DebubbleError as error:
                    self._note(order, str(error))
                else:
                    candidates.append(self.candidate(order, priced))

    def _shortlist(self, trials: list[Trial]) -> list[Trial]:
        """All trials; sorted by their estimated step if the effort does not suffice for all.

        The estimate is the busiest device's work times the ratio of step to work on a scaled-down problem.
        """
        total = sum(trial.price(self.short.micro_batches) for trial in trials)
        if total <= RANKING_SHARE * self.effort.remaining:
            return trials
        stretch = {order: self._stretch(order) for order in dict.fromkeys(trial.order for trial in trials)}
        return sorted(trials, key=lambda trial: stretch[trial.order] * self._work(trial))

    def _stretch(self, order: Order) -> float:
        """Ratio of step to work on a scaled-down problem; infinite if it does not fit, 1 without such a problem."""
        chunks = order.placement.chunks
        scaled = scaled_problem(self.problem, chunks)
        if scaled is None:
            return 1.0
        small, costs = scaled
        self.effort.spend(SCALED_TRIAL_SECONDS)
        try:
            schedule = order.on_devices(small.devices).build(small, costs, tries=SCALED_TRIES)
            time = priced_stages(small, Repricer(schedule), costs).time
        except DebubbleError:
            return math.inf
        return time / (small.micro_batches * chunks * float(costs.work(0)))

    def _work(self, trial: Trial) -> float:
        """Work of the busiest device in a step, without recomputation."""
        return float(self.problem.whole_micro_batches) * max(loads(self._cut(trial)[1], trial.order.placement))

    def _cut(self, trial: Trial) -> tuple[tuple[int, ...], StageCosts]:
        """The units per stage of a trial, and the stages' costs without recomputation."""
        match self.problem.workload:
            case FixedStages(costs):
                return (), costs
            case ModelUnits(units):
                key = trial.split, trial.order.placement
                if key not in self._cuts:
                    lengths = tuple(lengths_of(self.problem, units, trial))
                    costs = units.stage_costs(Partition.cut(units, lengths), trial.order.placement)
                    self._cuts[key] = lengths, costs
                return self._cuts[key]

    def _fit(self, trial: Trial, *, cpu_optimizer: bool) -> PricedSchedule:
        """The trial on the short step with the least recomputation that fits, and CPU optimizer steps if needed.

        Raises DebubbleError if it does not fit.
        """
        lengths, on_devices = self._cut(trial)
        placement = trial.order.placement

        def fit(hosted: frozenset[int]) -> PricedSchedule:
            costs = on_devices
            if hosted:
                self.effort.spend(trial.price(self.short.micro_batches))
                units = self.problem.units
                costs = units.stage_costs(Partition.cut(units, lengths), placement, on_host=hosted)
            schedule = trial.order.build(self.short, costs).with_host_steps(hosted)
            return with_least_recomputation(self.short, schedule, [lengths], self.effort)

        return with_fewest_host_steps(self.problem, placement, fit) if cpu_optimizer else fit(frozenset())

    def candidate(self, order: Order, priced: PricedSchedule) -> Candidate:
        """Estimate the full step of a schedule of the short step."""
        missing = self.problem.micro_batches - self.short.micro_batches
        load = max(loads(priced.costs, priced.schedule.placement, priced.schedule.fused_recompute))
        return Candidate(order, priced, step_time(self.problem, priced) + missing * load)

    def fastest(self, candidates: list[Candidate]) -> PricedSchedule:
        """The fastest full step of the finalists; if none of them fits, that of the first other candidate that does."""
        candidates = sorted(candidates, key=lambda candidate: candidate.time)
        if self.short is self.problem:
            return candidates[0].priced
        full: list[PricedSchedule] = []
        reasons: list[DebubbleError] = []
        for rank, candidate in enumerate(candidates):
            price = self.price_in_full(candidate)
            if full and (rank >= FINALISTS or price > self.effort.remaining):
                break
            self.effort.spend(price)
            try:
                full.append(_as_run(self.problem, self._in_full(candidate)))
            except DebubbleError as error:
                reasons.append(error)
        if not full:
            raise closest(reasons)
        return min(full, key=lambda point: step_time(self.problem, point))

    def price_in_full(self, candidate: Candidate) -> float:
        """Effort to build and fit a candidate with all micro-batches; 0 if the short step has them all."""
        if self.short is self.problem:
            return 0.0
        return Trial(candidate.order, "even").price(self.problem.micro_batches)

    def _in_full(self, candidate: Candidate) -> PricedSchedule:
        """The candidate with all micro-batches; raises DebubbleError if that does not fit."""
        priced, problem = candidate.priced, self.problem
        schedule = candidate.order.build(problem, priced.costs).with_host_steps(priced.schedule.host_steps)
        repricer = Repricer(schedule)
        match problem.workload:
            case FixedStages(costs):
                return priced_stages(problem, repricer, costs)
            case ModelUnits(units):
                search = PartitionSearch(problem, units, repricer)
                assert priced.partition is not None
                if max(search.excesses(priced.partition)) <= 0:
                    return search.priced(priced.partition)
                return search.fitted(priced.partition.lengths)


def _as_run(problem: Problem, priced: PricedSchedule) -> PricedSchedule:
    """The schedule as the problem's target runs it; raises DebubbleError if it does not."""
    if problem.levers is None:
        return priced
    solution = as_run(problem, priced.solution)
    time = float(problem.time_of(solution.simulate()))
    return PricedSchedule(time, solution.schedule, solution.costs, solution.partition)
