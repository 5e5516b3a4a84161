"""Search of degrees: memory rules out, bounds prune, quick plans rank, and the planners work on the best few.

1. Every legal choice (`space`) for which the estimate of memory alone shows that no plan fits is dropped
   (`memory.too_large`).
2. Quick plans of the others are made (`estimate`) in the order of their lower bounds, until these are above the fifth
   best step: no other choice can be among the five best quick plans.  Choices that take the same step count as one.
3. The best of them, and those of the five best that are close to it, are planned by `adapipe`; then `joint` plans
   choices that quick plans may have passed over, by successive halving.  The fastest goes to `auto`, and up to two more
   that may become the answer (or all five go to the planner that was asked for).
4. Of all plans within the job's tolerance of the fastest, the simplest is the answer (`simplest`).

All of it is counted in work, so that the same call gives the same plan on every machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from debubble.ir import CutOffError, DebubbleError, InfeasibleError
from debubble.ir.degrees import (
    QUICK_PLAN,
    RECOMPUTATION,
    Degrees,
)
from debubble.planners.auto import fastest_of, planners_for, without_levers
from debubble.planners.degrees.answer import BEST, Best, FoundPlans
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
from debubble.planners.degrees.ranking import NEGLIGIBLE, Ranking, rank
from debubble.planners.degrees.simplest import PlannedChoice
from debubble.planners.degrees.space import (
    ZERO_LEVELS,
    Job,
    in_most_slices,
    of_one_size,
    ordinary_choices,
    smallest_batches,
)
from debubble.planners.degrees.usual import usual_choices
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.process_pool import Task, by_completion, side_by_side
from debubble.planners.progress import Progress
from debubble.planners.registry import Result, planners, tell_improvement, verify
from debubble.search.effort import Effort

RANKING, THOROUGH, FINAL = 0.6, 0.1, 0.5
"""Shares of the effort: for ranking, for each of the best, and for each searching planner on the best of all, which has
the whole effort where its gap is wide."""
RANKING_TOLERANCE = 1.1
"""Factor of the best step up to which the usual choices are planned thoroughly, too, and, where memory is short, those
with hosts."""
FINAL_TOLERANCE = 1.05
"""Factor of the fastest step up to which the fastest usual choice is given to `auto`, too."""
MOST_FINISHED, DRAFTS_DIFFER = 3, 1.02
"""The most choices that are given to `auto`, and the factor of the fastest draft's step within which theirs are: with
more effort drafts change places within it."""
WITH_HOSTS = 4
"""Choices that are planned with hosts."""
UNEVEN_CHOICES = 2
"""Choices that are planned for uneven stages, where no quick plan fits."""
MIN_SPEEDUP = 1.02
"""Factor by which such a choice must promise to be faster, where others fit."""

DRAFTS: Sequence[tuple[int, float]] = ((16, 0.03), (6, 0.1), (3, 0.25))
"""Choices that `joint` plans round after round, and the share of the effort that each has.  16 x 0.03 tell in about two
seconds which degrees are fastest where memory is short, or pipelines are better cut unevenly: in 5 of 10 jobs the plan
got 2 to 10% faster (llama3-8b on 16 L40S with slow links 4.55 -> 4.11 s), in one 0.6% slower."""
DRAFTED_GAP, DRAFTED_PAIRS = 0.04, 2048
"""The gap above which a choice is drafted, and the most pairs of a pipeline device and a micro-batch."""
WIDE_GAP = 0.1
"""The gap above which the fastest choice has the whole effort."""

UNDIVIDED_LEVELS = (1, 2)
"""ZeRO levels that leave weights whole."""
ORDINARY, MAX_LISTED = 3, 40
"""Ordinary choices that have a quick plan before all choices are listed, of how many that are looked at."""


def search_degrees(job: Job, *, planner: str = "auto", progress: Callable[[Progress], None] = lambda _: None) -> Best:
    """The simplest plan within the job's tolerance of the fastest, of all choices of degrees, and the five best ones.

    A Ctrl-C keeps the best so far; one that comes before anything fits goes through.

    Args:
        job: What to train on which devices, and which degrees are fixed.
        planner: The planner that works on the best choice.
        progress: Called after every choice.

    Raises:
        InputError: if no choice of degrees is legal.
        InfeasibleError: if nothing fits.
    """
    begun = time.perf_counter()
    if job.options.quantize and job.zero_levels == ZERO_LEVELS and "zero" not in job.fixed:
        # No runtime divides quantised weights: plans that do are answers where no other fits.
        with suppress(InfeasibleError):
            return search_degrees(replace(job, zero_levels=UNDIVIDED_LEVELS), planner=planner, progress=progress)
        if job.deadline is not None:
            job = replace(job, deadline=max(MIN_SECONDS_LEFT, job.deadline - (time.perf_counter() - begun)))
    search = _DegreesSearch(job, planner, progress)
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.ranking.steps and not search.results:
            raise
        search.interrupted = True
    best = search.best()
    return replace(best, result=replace(best.result, solve_seconds=time.perf_counter() - begun))


def quickest(job: Job) -> Best:
    """The fastest quick plan of all choices of degrees; the errors are those of `search_degrees`."""
    search = _DegreesSearch(job, "auto", lambda _: None)
    search.rank()
    return search.best()


class _DegreesSearch(FoundPlans):
    """A search of degrees; `run` has its order."""

    def __init__(self, job: Job, planner: str, progress: Callable[[Progress], None]) -> None:
        super().__init__(job, planner)
        self.progress = progress
        planners[planner]  # raises InputError for an unknown name
        self.asked: set[Degrees] = set()
        """Choices that `auto` has planned."""

    def run(self) -> None:
        """Rank the choices and plan the best; what is found stays when this is interrupted."""
        self.plan_ordinary()
        self.rank()
        self._plan_usual()
        if self.planner == "auto":
            near = RANKING_TOLERANCE * min(self.ranking.steps.values(), default=0.0)
            usual = [d for d in self.usual.values() if isinstance(d, Degrees) and self.ranking.steps[d] <= near]
            best, others = self.ranking.best(1), dict.fromkeys((*self.ranking.best(BEST), *usual))
            self._plan_side_by_side(best, thorough, share=THOROUGH)
            close = [each for each in others if each not in best and self._is_close(each)]
            self._plan_side_by_side(close, thorough, share=THOROUGH)
            self._plan_further()
            self._offload_usual()
            self._draft()
            self._finish()
        else:
            self._plan_side_by_side(self.ranking.best(BEST), self.planner, share=1.0)
            self._plan_further()

    def plan_ordinary(self) -> None:
        """Make quick plans of a few ordinary choices, so that there is a plan before all choices are listed."""
        for degrees in islice(ordinary_choices(self.job), MAX_LISTED):
            if len(self.quick) == ORDINARY or self.late:
                return
            problem = self.job.problem(degrees)
            if degrees in self.problems or too_large(problem) is not None:
                continue
            with suppress(DebubbleError):
                self.ranking.steps[degrees], self.quick[degrees] = quick_step(problem)
                self.problems[degrees] = problem
                tell_improvement(QUICK_PLAN, problem, self.quick[degrees])

    def rank(self) -> None:
        """Rule out choices by memory, and rank the others by quick plans."""
        clock = Effort.starting(0.0, self.deadline).deadline
        ruled_out: dict[Degrees, str] = {}
        for place, degrees in enumerate(self.legal):
            if self.ranking.steps and clock.passed:
                self.ranking.left = len(self.legal) - place
                return
            if self.hopeless:
                raise self.no_time()
            if degrees in self.problems:
                continue
            # Larger micro-batches keep more, next to the same states: what rules out small ones rules them out, too.
            smaller = of_one_size(degrees)
            reason = ruled_out.get(smaller)
            if reason is None:
                problem = self.job.problem(degrees)
                reason = too_large(problem)
            if reason is None:
                self.problems[degrees] = problem
            else:
                self.too_large[degrees] = ruled_out[smaller] = reason
            self._report("Ruling out by memory")
        effort = Effort.starting(RANKING * self.job.effort, self.deadline)

        def step(degrees: Degrees) -> float:
            try:
                seconds, self.quick[degrees] = quick_step(self.problems[degrees], spend=effort.spend)
            finally:
                self._report("Ranking")
            return seconds

        def of_quick_plans(degrees: Degrees) -> float:
            self.bounds[degrees] = max(self._bound(degrees), quick_bound(self.problems[degrees]))
            return self.bounds[degrees]

        bounds = [self._bound, of_quick_plans]
        rank(
            list(self.problems), bounds=bounds, step=step, count=BEST, ranking=self.ranking, over=lambda: effort.over,
            hopeless=lambda: self.hopeless,
        )  # fmt: skip
        if self.hopeless:
            raise self.no_time()

    def _bound(self, degrees: Degrees) -> float:
        """Seconds that every plan of a choice takes at least."""
        if degrees not in self.proven:
            self.proven[degrees] = step_bound(self.problems[degrees])
        return self.proven[degrees]

    def _plan_usual(self) -> None:
        """Make quick plans of the usual choices, the fastest micro-batches of each; larger ones if these are faster."""
        for name, choices in usual_choices(self.legal).items():
            reasons = [self.too_large.get(choices[0], "")]
            for degrees in choices:
                if degrees in self.ranking.steps or degrees not in self.problems or self.late:
                    continue
                best = min((self.ranking.steps.get(each, math.inf) for each in choices), default=math.inf)
                try:
                    if quick_bound(self.problems[degrees]) < best:
                        self.ranking.steps[degrees], self.quick[degrees] = quick_step(self.problems[degrees])
                        # The ranking had counted it among those that cannot be the best.
                        self.ranking.slower = max(0, self.ranking.slower - 1)
                except DebubbleError as refusal:
                    reasons.append(str(refusal))
            fit = [degrees for degrees in choices if degrees in self.ranking.steps]
            if fit:
                self.usual[name] = min(fit, key=lambda each: self.ranking.steps[each])
            elif reason := next(filter(None, reasons), None):
                self.usual[name] = reason

    def _offload_usual(self) -> None:
        """Plan usual choices whose quick plans recompute, where offload in its place may make them the fastest."""
        known = self.steps()
        best = min(known.values(), default=math.inf)

        def is_hopeful(degrees: Degrees) -> bool:
            plan = PlannedChoice(degrees=degrees, solution=self.quick[degrees], step=known[degrees])
            return RECOMPUTATION in plan.levers and self._bound(degrees) < best

        usual = [each for each in self.usual.values() if isinstance(each, Degrees)]
        find = partial(thorough, names=("adapipe", "portfolio"))
        self._plan_side_by_side(filter(is_hopeful, usual), find, share=THOROUGH)

    def _is_close(self, degrees: Degrees) -> bool:
        """Tell whether a choice's quick plan is close to the fastest plan, or would be if it did not recompute."""
        schedule, costs = self.quick[degrees].schedule, self.quick[degrees].costs
        recomputing = [
            sum(costs.recompute[s] for s in stages if s in schedule.fused_recompute)
            for stages in schedule.placement.stages_of
        ]
        spared = float(schedule.micro_batches * max(recomputing))
        return self.ranking.steps[degrees] - spared <= FINAL_TOLERANCE * min(self.steps().values())

    def _plan_side_by_side(
        self, choices: Iterable[Degrees], find: str | Callable[[Problem], Solution], *, share: float
    ) -> None:
        """Plan these choices, in workers if the choices planned before them took long."""
        taken = max((result.solve_seconds for result in self.results.values()), default=0.0)
        effort = share * self.job.effort
        tasks: dict[Degrees, Task] = {
            degrees: (find, replace(self.problems[degrees], effort=effort, deadline=self.deadline))
            for degrees in choices
        }
        with side_by_side(tasks, seconds=taken) as answers:
            for degrees in by_completion(answers):
                if self.late:
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
        """Plan choices that promise to be faster with hosts, or on uneven stages, than what is known.

        Micro-batches are as small as they may be.  Where the planners (or the one that was asked for) fit nothing, all
        are asked, choice by choice, until one fits.
        """
        if self.late:
            return
        with_hosts = self._ranked_with_hosts()
        best = min([*self.steps().values(), *with_hosts.steps.values()], default=math.inf)
        refused = [d for d in smallest_batches(self.job) if d in self.ranking.refused and d not in with_hosts.steps]
        uneven = {degrees: estimated_uneven_step(self.problems[degrees]) for degrees in refused}
        hopeful = [
            *with_hosts.best(WITH_HOSTS),
            *sorted((d for d in refused if uneven[d] * MIN_SPEEDUP < best), key=lambda d: uneven[d])[:UNEVEN_CHOICES],
        ]
        if best == math.inf:
            hopeful += sorted(with_hosts.refused, key=lambda degrees: estimated_step(self.problems[degrees]))[
                :WITH_HOSTS
            ]
            cut = {in_most_slices(self.job, degrees): None for degrees in refused}
            sliced = [each for each in (*refused, *cut) if each is not None and each.slices > 1]
            self.problems |= {each: self.job.problem(each) for each in sliced}
            hopeful += sorted(dict.fromkeys(sliced), key=self._bound)[: 2 * WITH_HOSTS]
        if self.planner != "auto":
            self._plan_side_by_side(hopeful, self.planner, share=1.0)
            return
        self._plan_side_by_side(hopeful, partial(thorough, names=("adapipe", "chronos")), share=THOROUGH)
        for degrees in hopeful:
            if self.steps():
                break
            self._ask(degrees)

    def _ranked_with_hosts(self) -> Ranking[Degrees]:
        """The ranking of quick plans with hosts that promise more than what is known.

        Larger micro-batches are tried for the best choices of those with the smallest.
        """
        ranking = self.with_hosts
        known = self.steps()
        # Where memory is short, what the search makes of hosts is up to a fifth faster than these plans promise.
        factor = RANKING_TOLERANCE if self._lacks_memory(known) else 1 / MIN_SPEEDUP
        within = factor * min(known.values(), default=math.inf)

        def add(choices: Iterable[Degrees], stage: str) -> None:
            effort = Effort.starting(RANKING * self.job.effort, self.deadline)

            def step(degrees: Degrees) -> float:
                try:
                    return quick_host_step(self.problems[degrees], spend=effort.spend)
                finally:
                    done = len(ranking.steps) + len(ranking.refused) + 1
                    self._tell(stage, done, done + ranking.left - 1, {**known, **ranking.steps})

            bounds = [
                self._bound,
                lambda degrees: estimated_step(self.problems[degrees]),
            ]
            rank(
                [each for each in choices if each in self.problems and each.slices == 1], bounds=bounds, step=step,
                count=WITH_HOSTS, ranking=ranking, over=lambda: effort.over, within=within,
            )  # fmt: skip

        smallest = dict.fromkeys(smallest_batches(self.job))
        add(smallest, "Ranking with hosts")
        best = {of_one_size(degrees) for degrees in ranking.best(WITH_HOSTS)}
        larger = (each for each in self.legal if each not in smallest and of_one_size(each) in best)
        add(larger, "Ranking larger micro-batches")
        return ranking

    def _lacks_memory(self, known: Mapping[Degrees, float]) -> bool:
        """Tell whether the fastest plan divides its weights or recomputes."""
        if not known:
            return True
        best = min(known, key=known.__getitem__)
        solution = self.results[best].solution if best in self.results else self.quick[best]
        return best.zero == 3 or bool(solution.schedule.fused_recompute)

    def _draft(self) -> None:
        """Plan choices by `joint`, by successive halving, that may be much faster than their quick plans.

        These are choices of which the middle of bound and step is below the fastest step: where memory is short, quick
        plans are far above their bounds, and `joint` ends somewhere between the two.
        """
        if not self.results or self.late:
            return
        drafts = self._worth_drafts()
        for count, share in DRAFTS:
            steps = self.steps()
            best = min(steps.values())
            middle = {
                degrees: math.sqrt(bound * min(estimate, steps.get(degrees, math.inf)))
                for degrees, (bound, estimate) in drafts.items()
            }
            hopeful = [each for each in sorted(middle, key=lambda each: middle[each]) if middle[each] < best]
            self._plan_side_by_side(hopeful[:count], "joint", share=share)

    def _worth_drafts(self) -> dict[Degrees, tuple[float, float]]:
        """Choices whose bounds are below the fastest step and far below their own -> that bound, an estimated step.

        Choices that only divide their tokens otherwise have equal bounds; the first of them stands for all.
        """
        steps = self.steps()
        best = min(steps.values())
        found: dict[str, tuple[Degrees, tuple[float, float]]] = {}
        for degrees in dict.fromkeys((*self.results, *self.problems)):
            problem, bound = self.problems[degrees], self._bound(degrees)
            if bound * MIN_SPEEDUP >= best or f"{bound:.9g}" in found or self._pairs(degrees) > DRAFTED_PAIRS:
                continue
            estimate = min(estimated_step(problem), steps.get(degrees, math.inf))
            if bound < estimate * (1 - DRAFTED_GAP) and "joint" in planners_for(problem):
                found[f"{bound:.9g}"] = degrees, (bound, estimate)
        return dict(found.values())

    def _fastest(self) -> Degrees:
        """The fastest choice of those that were planned."""
        return min(self.results, key=lambda degrees: self.results[degrees].time)

    def _pairs(self, degrees: Degrees) -> int:
        """Pairs of a pipeline device and a micro-batch."""
        problem = self.problems[degrees]
        return problem.devices * problem.micro_batches

    def _finish(self) -> None:
        """Give the fastest choices to `auto`, and the fastest usual one if it is close.

        Those whose gap is within the tolerance are left: a faster plan would not be recommended in their place.
        """
        if not self.results or self.late:
            return
        times = {degrees: result.time for degrees, result in self.results.items()}
        ranked = sorted(times, key=lambda degrees: times[degrees])
        improvable = [each for each in ranked if self.results[each].gap > self.job.tolerance]
        # Choices that only divide their tokens otherwise take equal times; the first of them stands for all.
        unlike = [*{f"{times[each]:.9g}": each for each in reversed(improvable)}.values()][::-1]
        close = [each for each in unlike[:MOST_FINISHED] if times[each] <= DRAFTS_DIFFER * times[ranked[0]]]
        usual = [each for each in improvable if each in self.usual.values()][:1]
        simple = [each for each in usual if times[each] <= FINAL_TOLERANCE * times[ranked[0]]]
        gain = 1.0
        for degrees in dict.fromkeys((*close, *simple)):
            if degrees not in self.asked and not self.late and self._may_be_answer(degrees, gain):
                self._ask(degrees)
                gain = min(gain, float(self.results[degrees].time / times[degrees]))

    def _may_be_answer(self, degrees: Degrees, gain: float) -> bool:
        """Tell whether a choice that gains as much as others did is the fastest, or as good as that and simpler."""
        fastest, hoped = self._planned(self._fastest()), gain * float(self.results[degrees].time)
        if hoped <= fastest.step:
            return True
        simpler = len(self._planned(degrees).levers) < len(fastest.levers)
        return simpler and hoped <= (1 + self.job.tolerance) * fastest.step

    def _refuse(self, degrees: Degrees, refusal: DebubbleError) -> None:
        """Keep why a choice does not fit: of several reasons the one that misses by least."""
        self.unanswered = self.unanswered or isinstance(refusal, CutOffError)
        known = self.ranking.refused.get(degrees)
        self.ranking.refused[degrees] = refusal if known is None else closest([known, refusal])

    def _ask(self, degrees: Degrees) -> None:
        """Give a choice to `auto`; on one device without recomputation or offload only the order is left to choose."""
        self.asked.add(degrees)
        simpler = self.job.tolerance > 0
        known = self.results.get(degrees)
        share = 1.0 if known is not None and known.gap > WIDE_GAP else FINAL
        keeps_all = simpler and known is not None and known.plain
        problem = replace(self.problems[degrees], effort=share * self.job.effort, deadline=self.deadline, plain=simpler)
        large = self._pairs(degrees) >= LARGE_JOB_PAIRS
        whole = problem.slices == 1
        names = [name for name in planners_for(problem) if not large or not whole or name in PLANNERS_OF_LARGE_JOBS]
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
        if known is None or answer.time < known.time * (1 - NEGLIGIBLE):
            self.results[degrees] = answer

    def _report(self, stage: str = "Planning the best") -> None:
        ranked = self.ranking.steps.keys() | self.ranking.refused.keys()  # a planner may refuse what a quick plan fits
        done = len(self.too_large) + len(ranked) + self.ranking.slower
        self._tell(stage, done, len(self.legal), self.steps())

    def _tell(self, stage: str, done: int, total: int, steps: Mapping[Degrees, float]) -> None:
        best = min(steps, key=lambda degrees: steps[degrees], default=None)
        step = None if best is None else steps[best]
        self.progress(Progress(stage=stage, done=done, total=total, best=best, step_time=step))
