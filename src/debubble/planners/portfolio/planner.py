"""Every schedule of the library and list schedules x partition x recomputation, chosen by simulation.

Not from a paper: the plain search that a person would do by hand, and the yardstick for the published planners.  For
each order, number of chunks and split it takes the least recomputation that fits, ranks them, and then moves units
between neighbouring stages for the best few, re-choosing the recomputation after every move.

Where the states of a split by work do not fit, units are divided by their states too, which count as little as fits.

As long as no order fits, hosts step the optimizers of the last chunks, of as few as that takes.

A step of many micro-batches is ranked and searched by a short one, to which the busiest device's time is added for
each micro-batch that it lacks; only the best are built and simulated in full.

In small steps no schedule of the library is faster than the answer: there all are tried as they are, whatever the
effort, which takes up to a second or two.
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
    TRIES,
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
"""Orders whose partition is searched."""

RANKING = 0.5
"""Share of the effort after which no further order is tried, once one fits; until then, all of it."""
LONG, SHORT = 4, 3
"""Micro-batches per device above which a step is ranked by a short one, and those that this has."""
SMALL_STEP_PAIRS = 32
"""Pairs of a device and a micro-batch up to which a step is small."""
TRIAL_SECONDS = 0.01
"""Seconds of the reference machine to build an order of a scaled-down problem and to fit it."""


@dataclass(frozen=True)
class Candidate:
    """A trial as it was fitted to the short step.

    Attributes:
        order: Its order.
        priced: The schedule with its costs, which may have been improved.
        time: About what the whole step takes with it, with what follows the pipeline.
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
    """One search: the problem, the short step that stands for it, and the effort."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem, self.effort = problem, effort
        self._cuts: dict[tuple[str, Placement], tuple[tuple[int, ...], StageCosts]] = {}
        self._of_plugins = {name: "not tried" for name, entry in schedules.items() if not is_own(entry.build)}
        """Outcomes of the schedules of other packages, in words."""
        p, m = problem.devices, problem.micro_batches
        self.small = p * m <= SMALL_STEP_PAIRS
        # What divides m by p divides the short step too: some schedules group micro-batches by p.
        self.short = (
            replace(problem, micro_batches=SHORT * p + m % p)
            if problem.equally_long and m > LONG * p and not self.small
            else problem
        )

    def ranking(self) -> list[Candidate]:
        """The trials that fit, fastest first."""
        candidates: list[Candidate] = []
        reasons: list[DebubbleError] = []
        unlimited: set[Trial] = set()
        # Whoever adds a schedule wants to know what it is worth.
        listed = self._shortlist(trials_of(self.short))
        for trial in sorted(listed, key=lambda each: each.order.schedule not in self._of_plugins):
            spare = (RANKING if candidates else 1.0) * self.problem.effort - self.effort.spent
            if self.effort.deadline.passed or (spare < 0 and (candidates or reasons)):
                break
            best = min((candidate.time for candidate in candidates), default=math.inf)
            price = trial.price(self.short.micro_batches)
            # What has room for everything has no use for the memory limit.
            if trial.without_limit in unlimited or self._work(trial) >= best or (candidates and price > spare):
                continue
            self.effort.spend(price)
            try:
                found = _as_run(self.short, self._fit(trial, hosts=not candidates))
            except DebubbleError as error:
                self._note(trial.order, str(error))
                reasons.append(error)
                continue
            candidates.append(self.candidate(trial.order, found))
            self._note(trial.order, f"a step of about {candidates[-1].time:.4g}")
            if not found.schedule.fused_recompute and not found.schedule.host_steps:
                unlimited.add(trial)
        if self.small:
            self._add_library(candidates)
        if not candidates:
            if self.effort.cut_off:
                raise CutOffError("No schedule had been fitted at the deadline.")
            raise closest(reasons)
        return sorted(candidates, key=lambda candidate: candidate.time)

    def _note(self, order: Order, words: str) -> None:
        """Note what came of an order, if another package has it."""
        if order.schedule in self._of_plugins:
            self._of_plugins[order.schedule] = words

    def remark_on_plugins(self) -> str | None:
        """Outcomes of the schedules of other packages; None if there are none."""
        return "; ".join(f"{name}: {words}" for name, words in self._of_plugins.items()) or None

    def _add_library(self, candidates: list[Candidate]) -> None:
        """Add the schedules of the library as they are, those that fit and may be faster than the candidates."""
        for order in orders_of_library(self.problem):
            best = min((candidate.time for candidate in candidates), default=math.inf)
            if self._work(Trial(order, "even")) < best and not self.effort.deadline.passed:
                try:
                    found = _as_run(self.problem, as_published(self.problem, order))
                except DebubbleError as error:
                    self._note(order, str(error))
                else:
                    candidates.append(self.candidate(order, found))

    def _shortlist(self, trials: list[Trial]) -> list[Trial]:
        """All trials; where there is not the effort for all, those first that promise the shortest step.

        That is the busiest device's work, stretched as much as the order stretches it on a scaled-down problem.
        """
        total = sum(trial.price(self.short.micro_batches) for trial in trials)
        if total <= RANKING * self.effort.remaining:
            return trials
        stretch = {order: self._stretch(order) for order in dict.fromkeys(trial.order for trial in trials)}
        return sorted(trials, key=lambda trial: stretch[trial.order] * self._work(trial))

    def _stretch(self, order: Order) -> float:
        """Time of a scaled-down problem over its work; infinite if it does not fit, 1 if there is none."""
        chunks = order.placement.chunks
        scaled = scaled_problem(self.problem, chunks)
        if scaled is None:
            return 1.0
        small, costs = scaled
        self.effort.spend(TRIAL_SECONDS)
        try:
            schedule = order.like(small.devices).build(small, costs, tries=TRIES)
            time = priced_stages(small, Repricer(schedule), costs).time
        except DebubbleError:
            return math.inf
        return time / (small.micro_batches * chunks * float(costs.work(0)))

    def _work(self, trial: Trial) -> float:
        """Time that the busiest device works in a step, without recomputation."""
        return float(self.problem.whole_micro_batches) * max(loads(self._cut(trial)[1], trial.order.placement))

    def _cut(self, trial: Trial) -> tuple[tuple[int, ...], StageCosts]:
        """Units per stage of a trial, and the stages' costs without recomputation."""
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

    def _fit(self, trial: Trial, *, hosts: bool) -> PricedSchedule:
        """The trial on the short step with the least recomputation that fits, `hosts` stepping optimizers if they must.

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

        return with_fewest_host_steps(self.problem, placement, fit) if hosts else fit(frozenset())

    def candidate(self, order: Order, found: PricedSchedule) -> Candidate:
        """Price a schedule of the short step for the whole one."""
        lacking = self.problem.micro_batches - self.short.micro_batches
        each = max(loads(found.costs, found.schedule.placement, found.schedule.fused_recompute))
        return Candidate(order, found, step_time(self.problem, found) + lacking * each)

    def fastest(self, candidates: list[Candidate]) -> PricedSchedule:
        """The fastest of the best candidates in full; of the others the first that fits, if none of those does."""
        candidates = sorted(candidates, key=lambda candidate: candidate.time)
        if self.short is self.problem:
            return candidates[0].priced
        whole: list[PricedSchedule] = []
        reasons: list[DebubbleError] = []
        for rank, candidate in enumerate(candidates):
            price = self.price_in_full(candidate)
            if whole and (rank >= FINALISTS or price > self.effort.remaining):
                break
            self.effort.spend(price)
            try:
                whole.append(_as_run(self.problem, self._in_full(candidate)))
            except DebubbleError as error:
                reasons.append(error)
        if not whole:
            raise closest(reasons)
        return min(whole, key=lambda point: step_time(self.problem, point))

    def price_in_full(self, candidate: Candidate) -> float:
        """Effort of building and fitting a candidate with all micro-batches; 0 where the short step has them all."""
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


def _as_run(problem: Problem, found: PricedSchedule) -> PricedSchedule:
    """A schedule as the problem's target runs it; raises DebubbleError if it does not."""
    if problem.levers is None:
        return found
    solution = as_run(problem, found.solution)
    time = float(problem.time_of(solution.simulate()))
    return PricedSchedule(time, solution.schedule, solution.costs, solution.partition)
