"""Degree search: memory and bounds prune the choices, quick plans rank them, and the planners work on the best few.

1. Legal choices (`space`) that cannot fit according to the memory estimate are dropped (`memory.too_large`).
2. Quick plans of the others are made (`estimate`) in the order of their lower bounds, until the next bound exceeds the
   fifth best step: no further choice can be among the five best.  Choices with equal steps count as one.
3. `adapipe` plans the best choice and those of the five best that are close to it; then `joint` plans choices that
   quick plans may underrate, by successive halving.  `auto` plans the fastest, and up to two more that may become the
   answer.  If a planner was asked for, it plans all five instead.
4. The simplest plan within the job's tolerance of the fastest is the answer (`simplest`).

The effort is counted in work, so that the same call gives the same plan on every machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice

from debubble.ir import CutOffError, DebubbleError, InfeasibleError
from debubble.ir.degrees import QUICK_PLAN, RECOMPUTATION, Degrees
from debubble.planners.auto import fastest_of, planners_for, without_levers
from debubble.planners.degrees.answer import MAX_SHOWN, CandidatePlans, Recommendation
from debubble.planners.degrees.choice_plans import LARGE_JOB_PAIRS, MIN_SECONDS_LEFT, PLANNERS_OF_LARGE_JOBS, thorough
from debubble.planners.degrees.estimate import (
    estimated_step,
    estimated_uneven_step,
    quick_bound,
    quick_host_step,
    quick_step,
    step_bound,
)
from debubble.planners.degrees.memory import too_large
from debubble.planners.degrees.ranking import NEGLIGIBLE_DIFFERENCE, Ranking, rank
from debubble.planners.degrees.simplest import PlannedChoice
from debubble.planners.degrees.space import (
    ZERO_LEVELS,
    Job,
    in_most_slices,
    ordinary_choices,
    smallest_batches,
    without_batch_size,
)
from debubble.planners.degrees.usual import usual_choices
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.process_pool import Task, ask_concurrently, by_completion
from debubble.planners.progress import Progress
from debubble.planners.registry import Result, planners, tell_improvement, verify
from debubble.search.effort import Effort

RANKING_SHARE, THOROUGH_SHARE, FINAL_SHARE = 0.6, 0.1, 0.5
"""Fractions of the effort: for ranking, for a thorough plan, and for each planner of `auto` on the fastest choices.  A
choice with a gap above `WIDE_GAP` gets the full effort instead of the last."""
RANKING_TOLERANCE = 1.1
"""Factor of the best step up to which usual choices, and with short memory those with host offload, are planned."""
FINAL_TOLERANCE = 1.05
"""Factor of the fastest step up to which `auto` plans the fastest usual choice."""
MAX_FINALISTS, FINALIST_TOLERANCE = 3, 1.02
"""Number of choices that `auto` plans at most, and the factor of the fastest step up to which it does: drafts that are
this close swap ranks with more effort."""
HOST_CHOICES = 4
"""Number of choices that are planned with host offload, by the ranking with offload."""
UNEVEN_CHOICES = 2
"""Number of choices that are planned with uneven stages although no quick plan of them fits."""
MIN_SPEEDUP = 1.02
"""Estimated speedup over the best plan that the choices of the two constants above need."""

DRAFTS: Sequence[tuple[int, float]] = ((16, 0.03), (6, 0.1), (3, 0.25))
"""Rounds of `joint` drafts: number of choices, and the fraction of the effort for each.  The first round shows in about
two seconds which degrees are fastest if memory is short or uneven stages are better.  In 5 of 10 jobs drafts made the
plan 2 to 10% faster (llama3-8b on 16 L40S with slow links 4.55 -> 4.11 s), in one 0.6% slower."""
MIN_DRAFT_GAP, MAX_DRAFT_PAIRS = 0.04, 2048
"""Least gap of drafted choices, and their maximum number of (pipeline device, micro-batch) pairs."""
WIDE_GAP = 0.1
"""Gap above which `auto` plans a choice with the full effort."""

UNSHARDED_WEIGHT_LEVELS = (1, 2)
"""ZeRO levels that do not shard weights."""
ORDINARY_PLANS, MAX_ORDINARY = 3, 40
"""Number of ordinary choices to make quick plans of before all choices are listed, and the number to try for that."""


def search_degrees(
    job: Job, *, planner: str = "auto", progress: Callable[[Progress], None] = lambda _: None
) -> Recommendation:
    """The simplest plan within the job's tolerance of the fastest over all choices of degrees, and the five best ones.

    Ctrl-C returns the best plan so far; before any plan fits, the KeyboardInterrupt is raised.

    Args:
        job: The model, the devices, the batch, and fixed degrees.
        planner: The planner of the best choices.
        progress: Called after every choice.

    Raises:
        InputError: if no choice of degrees is legal.
        InfeasibleError: if nothing fits.
    """
    start = time.perf_counter()
    if job.options.quantize and job.zero_levels == ZERO_LEVELS and "zero" not in job.fixed:
        # No runtime shards quantized weights: such plans are only answers if no other fits.
        with suppress(InfeasibleError):
            return search_degrees(replace(job, zero_levels=UNSHARDED_WEIGHT_LEVELS), planner=planner, progress=progress)
        if job.deadline is not None:
            job = replace(job, deadline=max(MIN_SECONDS_LEFT, job.deadline - (time.perf_counter() - start)))
    search = _DegreesSearch(job, planner, progress)
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.ranking.steps and not search.results:
            raise
        search.interrupted = True
    best = search.best()
    return replace(best, result=replace(best.result, solve_seconds=time.perf_counter() - start))


def quickest(job: Job) -> Recommendation:
    """The fastest quick plan of all choices of degrees; the errors are those of `search_degrees`."""
    search = _DegreesSearch(job, "auto", lambda _: None)
    search.rank()
    return search.best()


class _DegreesSearch(CandidatePlans):
    """A degree search; `run` lists its phases."""

    def __init__(self, job: Job, planner: str, progress: Callable[[Progress], None]) -> None:
        super().__init__(job, planner)
        self.progress = progress
        planners[planner]  # raises InputError for an unknown name
        self.planned_by_auto: set[Degrees] = set()
        """Choices that `auto` has planned."""

    def run(self) -> None:
        """Rank the choices and plan the best; results are stored as they come, so that an interrupt keeps them."""
        self.plan_ordinary()
        self.rank()
        self._plan_usual()
        if self.planner == "auto":
            near = RANKING_TOLERANCE * min(self.ranking.steps.values(), default=0.0)
            usual = [d for d in self.usual.values() if isinstance(d, Degrees) and self.ranking.steps[d] <= near]
            best, shortlist = self.ranking.best(1), dict.fromkeys((*self.ranking.best(MAX_SHOWN), *usual))
            self._plan_concurrently(best, thorough, share=THOROUGH_SHARE)
            close = [degrees for degrees in shortlist if degrees not in best and self._is_close(degrees)]
            self._plan_concurrently(close, thorough, share=THOROUGH_SHARE)
            self._plan_further()
            self._plan_usual_with_offload()
            self._draft()
            self._finish()
        else:
            self._plan_concurrently(self.ranking.best(MAX_SHOWN), self.planner, share=1.0)
            self._plan_further()

    def plan_ordinary(self) -> None:
        """Make quick plans of a few ordinary choices, so that a plan exists before all choices are listed."""
        for degrees in islice(ordinary_choices(self.job), MAX_ORDINARY):
            if len(self.quick) == ORDINARY_PLANS or self.cut_off:
                return
            problem = self.job.problem(degrees)
            if degrees in self.problems or too_large(problem) is not None:
                continue
            with suppress(DebubbleError):
                self.ranking.steps[degrees], self.quick[degrees] = quick_step(problem)
                self.problems[degrees] = problem
                tell_improvement(QUICK_PLAN, problem, self.quick[degrees])

    def rank(self) -> None:
        """Rule out choices by memory, and rank the rest by quick plans."""
        clock = Effort.starting(0.0, self.deadline).deadline
        ruled_out: dict[Degrees, str] = {}
        for index, degrees in enumerate(self.legal):
            if self.ranking.steps and clock.passed:
                self.ranking.remaining = len(self.legal) - index
                return
            if self.expired:
                raise self.deadline_error()
            if degrees in self.problems:
                continue
            # Larger micro-batches need more activation memory: they are ruled out with the smallest.
            smaller = without_batch_size(degrees)
            reason = ruled_out.get(smaller)
            if reason is None:
                problem = self.job.problem(degrees)
                reason = too_large(problem)
            if reason is None:
                self.problems[degrees] = problem
            else:
                self.too_large[degrees] = ruled_out[smaller] = reason
            self._report("Ruling out by memory")
        effort = Effort.starting(RANKING_SHARE * self.job.effort, self.deadline)

        def step(degrees: Degrees) -> float:
            try:
                seconds, self.quick[degrees] = quick_step(self.problems[degrees], spend=effort.spend)
            finally:
                self._report("Ranking")
            return seconds

        def quick_plan_bound(degrees: Degrees) -> float:
            self.quick_bounds[degrees] = max(self._bound(degrees), quick_bound(self.problems[degrees]))
            return self.quick_bounds[degrees]

        bounds = [self._bound, quick_plan_bound]
        rank(
            list(self.problems), bounds=bounds, step=step, count=MAX_SHOWN, ranking=self.ranking,
            effort_spent=lambda: effort.over, expired=lambda: self.expired,
        )  # fmt: skip
        if self.expired:
            raise self.deadline_error()

    @cached_property
    def _legal_choices(self) -> frozenset[Degrees]:
        """All legal choices; more slices may be planned if none of these fits."""
        return frozenset(self.legal)

    def _bound(self, degrees: Degrees) -> float:
        """Lower bound in seconds on the step of any plan of a choice."""
        if degrees not in self.step_bounds:
            self.step_bounds[degrees] = step_bound(self.problems[degrees])
        return self.step_bounds[degrees]

    def _plan_usual(self) -> None:
        """Make quick plans of the usual choices, and keep the fastest micro-batch size of each."""
        for name, choices in usual_choices(self.legal).items():
            reasons = [self.too_large.get(choices[0], "")]
            for degrees in choices:
                if degrees in self.ranking.steps or degrees not in self.problems or self.cut_off:
                    continue
                best = min((self.ranking.steps.get(choice, math.inf) for choice in choices), default=math.inf)
                try:
                    if quick_bound(self.problems[degrees]) < best:
                        self.ranking.steps[degrees], self.quick[degrees] = quick_step(self.problems[degrees])
                        # The ranking had counted it as pruned.
                        self.ranking.slower.discard(degrees)
                except DebubbleError as refusal:
                    reasons.append(str(refusal))
            fit = [degrees for degrees in choices if degrees in self.ranking.steps]
            if fit:
                self.usual[name] = min(fit, key=lambda choice: self.ranking.steps[choice])
            elif reason := next(filter(None, reasons), None):
                self.usual[name] = reason

    def _plan_usual_with_offload(self) -> None:
        """Plan usual choices whose quick plans recompute, if offload instead may make them the fastest."""
        known = self.steps()
        best = min(known.values(), default=math.inf)

        def is_promising(degrees: Degrees) -> bool:
            plan = PlannedChoice(degrees=degrees, solution=self.quick[degrees], step=known[degrees])
            return RECOMPUTATION in plan.levers and self._bound(degrees) < best

        usual = [choice for choice in self.usual.values() if isinstance(choice, Degrees)]
        find = partial(thorough, names=("adapipe", "portfolio"))
        self._plan_concurrently(filter(is_promising, usual), find, share=THOROUGH_SHARE)

    def _is_close(self, degrees: Degrees) -> bool:
        """Whether a choice's quick plan, without its recomputation, would be close to the fastest plan."""
        schedule, costs = self.quick[degrees].schedule, self.quick[degrees].costs
        recomputing = [
            sum(costs.recompute[s] for s in stages if s in schedule.fused_recompute)
            for stages in schedule.placement.stages_of
        ]
        spared = float(schedule.micro_batches * max(recomputing))
        return self.ranking.steps[degrees] - spared <= FINAL_TOLERANCE * min(self.steps().values())

    def _plan_concurrently(
        self, choices: Iterable[Degrees], find: str | Callable[[Problem], Solution], *, share: float
    ) -> None:
        """Plan these choices, in worker processes if earlier choices took long."""
        taken = max((result.solve_seconds for result in self.results.values()), default=0.0)
        effort = share * self.job.effort
        tasks: dict[Degrees, Task] = {
            degrees: (find, replace(self.problems[degrees], effort=effort, deadline=self.deadline))
            for degrees in choices
        }
        with ask_concurrently(tasks, seconds=taken) as answers:
            for degrees in by_completion(answers):
                if self.cut_off:
                    return
                try:
                    solution, seconds = answers[degrees].result()
                    name = solution.candidates[0].planner if callable(find) else find
                    answer = verify(name, self.problems[degrees], replace(solution, remark=None), seconds)
                except DebubbleError as refusal:
                    self._refuse(degrees, refusal)
                else:
                    self._keep(degrees, answer)
                    solution.raise_if_interrupted()
                self._report()

    def _plan_further(self) -> None:
        """Plan choices that may beat the best plan with host offload or uneven stages, with small micro-batches.

        If no plan fits so far, all planners (or the one that was asked for) work on one choice after another until one
        fits.
        """
        if self.cut_off:
            return
        host_ranking = self._rank_with_hosts()
        best = min([*self.steps().values(), *host_ranking.steps.values()], default=math.inf)
        unplanned = self.ranking.infeasible.keys() - host_ranking.steps.keys()
        infeasible = [degrees for degrees in smallest_batches(self.job) if degrees in unplanned]
        uneven = {degrees: estimated_uneven_step(self.problems[degrees]) for degrees in infeasible}
        promising = [
            *host_ranking.best(HOST_CHOICES),
            *sorted((d for d in infeasible if uneven[d] * MIN_SPEEDUP < best), key=uneven.__getitem__)[:UNEVEN_CHOICES],
        ]
        if best == math.inf:
            by_estimate = sorted(host_ranking.infeasible, key=lambda degrees: estimated_step(self.problems[degrees]))
            promising += by_estimate[:HOST_CHOICES]
            more_slices = {in_most_slices(self.job, degrees): None for degrees in infeasible}
            sliced = [degrees for degrees in (*infeasible, *more_slices) if degrees is not None and degrees.slices > 1]
            self.problems |= {degrees: self.job.problem(degrees) for degrees in sliced}
            promising += sorted(dict.fromkeys(sliced), key=self._bound)[: 2 * HOST_CHOICES]
        if self.planner != "auto":
            self._plan_concurrently(promising, self.planner, share=1.0)
            return
        self._plan_concurrently(promising, partial(thorough, names=("adapipe", "chronos")), share=THOROUGH_SHARE)
        for degrees in promising:
            if self.steps():
                break
            self._plan_with_auto(degrees)

    def _rank_with_hosts(self) -> Ranking[Degrees]:
        """The ranking of quick plans with host offload that may beat the best plan.

        Choices with the smallest micro-batches are ranked first, then larger micro-batches of the best of them.
        """
        ranking = self.host_ranking
        known = self.steps()
        # With short memory the planners' plans with host offload are up to a fifth faster than these quick plans.
        factor = RANKING_TOLERANCE if self._lacks_memory(known) else 1 / MIN_SPEEDUP
        max_seconds = factor * min(known.values(), default=math.inf)

        def add(choices: Iterable[Degrees], stage: str) -> None:
            effort = Effort.starting(RANKING_SHARE * self.job.effort, self.deadline)

            def step(degrees: Degrees) -> float:
                try:
                    return quick_host_step(self.problems[degrees], spend=effort.spend)
                finally:
                    done = len(ranking.steps) + len(ranking.infeasible) + 1
                    self._tell(stage, done, done + ranking.remaining - 1, {**known, **ranking.steps})

            bounds = [self._bound, lambda degrees: estimated_step(self.problems[degrees])]
            rank(
                [degrees for degrees in choices if degrees in self.problems and degrees.slices == 1],
                bounds=bounds, step=step, count=HOST_CHOICES, ranking=ranking, effort_spent=lambda: effort.over,
                max_seconds=max_seconds,
            )  # fmt: skip

        smallest = dict.fromkeys(smallest_batches(self.job))
        add(smallest, "Ranking with hosts")
        best = {without_batch_size(degrees) for degrees in ranking.best(HOST_CHOICES)}
        larger = (choice for choice in self.legal if choice not in smallest and without_batch_size(choice) in best)
        add(larger, "Ranking larger micro-batches")
        return ranking

    def _lacks_memory(self, known: Mapping[Degrees, float]) -> bool:
        """Whether the fastest plan shards its weights or recomputes."""
        if not known:
            return True
        best = min(known, key=known.__getitem__)
        solution = self.results[best].solution if best in self.results else self.quick[best]
        return best.zero == 3 or bool(solution.schedule.fused_recompute)

    def _draft(self) -> None:
        """Plan choices that may be much faster than their quick plans with `joint`, by successive halving.

        These are the choices whose geometric mean of bound and step is below the fastest step: with short memory, quick
        plans are far above their bounds, and `joint` ends between the two.
        """
        if not self.results or self.cut_off:
            return
        drafts = self._draft_choices()
        for count, share in DRAFTS:
            steps = self.steps()
            best = min(steps.values())
            middle = {
                degrees: math.sqrt(bound * min(estimate, steps.get(degrees, math.inf)))
                for degrees, (bound, estimate) in drafts.items()
            }
            promising = sorted((choice for choice in middle if middle[choice] < best), key=middle.__getitem__)
            self._plan_concurrently(promising[:count], "joint", share=share)

    def _draft_choices(self) -> dict[Degrees, tuple[float, float]]:
        """Choices with a bound below the fastest step and far below their own step -> the bound and the estimated step.

        Choices that only divide their tokens differently have equal bounds; the first represents all.
        """
        steps = self.steps()
        best = min(steps.values())
        drafts: dict[str, tuple[Degrees, tuple[float, float]]] = {}
        for degrees in dict.fromkeys((*self.results, *self.problems)):
            problem, bound = self.problems[degrees], self._bound(degrees)
            if bound * MIN_SPEEDUP >= best or f"{bound:.9g}" in drafts or self._pairs(degrees) > MAX_DRAFT_PAIRS:
                continue
            estimate = min(estimated_step(problem), steps.get(degrees, math.inf))
            if bound < estimate * (1 - MIN_DRAFT_GAP) and "joint" in planners_for(problem):
                drafts[f"{bound:.9g}"] = degrees, (bound, estimate)
        return dict(drafts.values())

    def _fastest(self) -> Degrees:
        """The fastest planned choice."""
        return min(self.results, key=lambda degrees: self.results[degrees].time)

    def _pairs(self, degrees: Degrees) -> int:
        """Number of (pipeline device, micro-batch) pairs."""
        problem = self.problems[degrees]
        return problem.devices * problem.micro_batches

    def _finish(self) -> None:
        """Plan the fastest choices, and the fastest usual one if it is close, with `auto`.

        Choices whose gap is within the tolerance are skipped, as a faster plan would not be recommended over them.
        """
        if not self.results or self.cut_off:
            return
        times = {degrees: result.time for degrees, result in self.results.items()}
        ranked = sorted(times, key=lambda degrees: times[degrees])
        improvable = [choice for choice in ranked if self.results[choice].gap > self.job.tolerance]
        # Choices that only divide their tokens differently have equal times; the first represents all.
        distinct = [*{f"{times[choice]:.9g}": choice for choice in reversed(improvable)}.values()][::-1]
        fastest = times[ranked[0]]
        close = [choice for choice in distinct[:MAX_FINALISTS] if times[choice] <= FINALIST_TOLERANCE * fastest]
        usual = [choice for choice in improvable if choice in self.usual.values()][:1]
        simple = [choice for choice in usual if times[choice] <= FINAL_TOLERANCE * fastest]
        gain = 1.0
        for degrees in dict.fromkeys((*close, *simple)):
            if degrees not in self.planned_by_auto and not self.cut_off and self._may_be_answer(degrees, gain):
                self._plan_with_auto(degrees)
                gain = min(gain, float(self.results[degrees].time / times[degrees]))

    def _may_be_answer(self, degrees: Degrees, gain: float) -> bool:
        """Whether a choice, sped up by `gain`, would be the fastest, or be simpler and within the tolerance."""
        fastest, estimate = self._planned(self._fastest()), gain * float(self.results[degrees].time)
        if estimate <= fastest.step:
            return True
        simpler = len(self._planned(degrees).levers) < len(fastest.levers)
        return simpler and estimate <= (1 + self.job.tolerance) * fastest.step

    def _refuse(self, degrees: Degrees, refusal: DebubbleError) -> None:
        """Record why a choice does not fit; of several errors, the one closest to fitting."""
        self.unanswered = self.unanswered or isinstance(refusal, CutOffError)
        known = self.ranking.infeasible.get(degrees)
        self.ranking.infeasible[degrees] = refusal if known is None else closest([known, refusal])

    def _plan_with_auto(self, degrees: Degrees) -> None:
        """Plan a choice with `auto`; a plan of one device that keeps all activations only needs plainer variants."""
        self.planned_by_auto.add(degrees)
        simpler = self.job.tolerance > 0
        known = self.results.get(degrees)
        share = 1.0 if known is not None and known.gap > WIDE_GAP else FINAL_SHARE
        keeps_all = simpler and known is not None and known.plain
        problem = replace(self.problems[degrees], effort=share * self.job.effort, deadline=self.deadline, plain=simpler)
        large = self._pairs(degrees) >= LARGE_JOB_PAIRS and problem.slices == 1
        names = [name for name in planners_for(problem) if not large or name in PLANNERS_OF_LARGE_JOBS]
        try:
            if known is not None and keeps_all and problem.devices == 1:
                *_, solution = known.solution, *without_levers(problem, known.solution)
                answer = verify(known.planner, problem, solution, 0.0)
            else:
                *_, solution = fastest_of(problem, names)
                answer = verify("auto", problem, solution, 0.0)
        except DebubbleError as refusal:
            self._refuse(degrees, refusal)
        else:
            self._keep(degrees, answer)
            if answer is not self.results[degrees]:
                self.simpler[degrees] = answer
            solution.raise_if_interrupted()
        self._report()

    def _keep(self, degrees: Degrees, answer: Result) -> None:
        known = self.results.get(degrees)
        if known is None or answer.time < known.time * (1 - NEGLIGIBLE_DIFFERENCE):
            self.results[degrees] = answer

    def _report(self, stage: str = "Planning the best") -> None:
        # A planner may fail on a choice of which a quick plan fits, or which cannot be faster.
        ranked = self.ranking.steps.keys() | self.ranking.infeasible.keys() | self.ranking.slower
        legal = self._legal_choices
        self._tell(stage, len(self.too_large) + len(ranked & legal), len(legal), self.steps())

    def _tell(self, stage: str, done: int, total: int, steps: Mapping[Degrees, float]) -> None:
        best = min(steps, key=lambda degrees: steps[degrees], default=None)
        step = None if best is None else steps[best]
        self.progress(Progress(stage=stage, done=done, total=total, best=best, step_time=step))
