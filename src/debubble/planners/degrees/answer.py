"""The answer of a search of degrees: the fastest or the simplest of what was found, next to the others."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from debubble.ir import CutOffError, DebubbleError, InfeasibleError
from debubble.ir.degrees import (
    CPU_OPTIMIZER,
    OFFLOAD,
    QUICK_PLAN,
    ConfigurationSummary,
    Degrees,
    DegreeSearch,
    DegreeValue,
    FasterPlan,
    UsualChoice,
)
from debubble.planners.auto import without_levers
from debubble.planners.degrees.choice_plans import MIN_SECONDS_LEFT, summary_of
from debubble.planners.degrees.other_values import other_values
from debubble.planners.degrees.ranking import NEGLIGIBLE, Ranking
from debubble.planners.degrees.simplest import PlannedChoice, simplest
from debubble.planners.degrees.space import Job, configurations
from debubble.planners.degrees.usual import usual_choices, usual_elsewhere
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.registry import Result, verify
from debubble.search.effort import Deadline
from debubble.targets.target import targets

GRACE_SECONDS = 2.0
"""Seconds after a deadline in which a search goes on to look for something that fits."""
BEST = 5
"""Choices of degrees that are planned thoroughly and shown."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The plan that a search of degrees recommends."""

    degrees: Degrees
    problem: Problem
    result: Result
    search: DegreeSearch


class FoundPlans:
    """The plans that a search has found so far, and its answer."""

    def __init__(self, job: Job, planner: str) -> None:
        self.job, self.planner = job, planner
        self.problems: dict[Degrees, Problem] = {}
        self.too_large: dict[Degrees, str] = {}
        self.proven: dict[Degrees, float] = {}
        """Seconds that every plan of a choice takes at least, of those that memory does not rule out."""
        self.bounds: dict[Degrees, float] = {}
        """Seconds that a quick plan of it takes at least, where that was worked out."""
        self.ranking: Ranking[Degrees] = Ranking()
        self.with_hosts: Ranking[Degrees] = Ranking()
        """Steps by quick plans with hosts."""
        self.quick: dict[Degrees, Solution] = {}
        self.simpler: dict[Degrees, Result] = {}
        """Answers of `auto` that are slower than what is known, and may be simpler."""
        self.results: dict[Degrees, Result] = {}
        self.usual: dict[str, Degrees | str] = {}
        """Name of a usual choice -> its fastest, or why none fits."""
        self.interrupted = False
        self.unanswered = False
        """Whether the deadline kept a planner from an answer."""
        self.clock = Deadline(math.inf if job.deadline is None else job.deadline)

    @property
    def late(self) -> bool:
        """True if the job's deadline has passed, and something fits."""
        return self.clock.passed and bool(self.ranking.steps or self.results)

    @property
    def hopeless(self) -> bool:
        """True if the job's deadline has passed by some time, and nothing fits."""
        return self.clock.remaining < -GRACE_SECONDS and not (self.ranking.steps or self.results)

    @property
    def deadline(self) -> float | None:
        """The seconds that are left of the job's deadline; None: it has none."""
        return None if self.job.deadline is None else max(self.clock.remaining, MIN_SECONDS_LEFT)

    @cached_property
    def legal(self) -> list[Degrees]:
        """All legal choices."""
        return configurations(self.job)

    def steps(self) -> dict[Degrees, float]:
        """The best step known of every choice that fits."""
        return {**self.ranking.steps, **{degrees: float(result.time) for degrees, result in self.results.items()}}

    def best(self) -> Best:
        """The simplest plan within the tolerance of the fastest; raises InfeasibleError if the planner has none."""
        steps = self.steps()
        if not steps or (self.planner != "auto" and not self.results and not self.interrupted):
            raise self._nothing_fits()
        if self.planner == "auto" or not self.results:
            # Also where the planners had no answer, or no time for one.
            for degrees in self.ranking.best(1 if self.late else BEST):
                self._verified(degrees)
        shown = sorted(self.results, key=lambda degrees: steps[degrees])[:BEST]
        fastest = self._summary(shown[0])
        plan, levers = self._simplest()
        best = plan.degrees
        usual = tuple(
            self._usual_row(name, choice)
            for name, choice in self.usual.items()
            if not self.late or choice in self.results or isinstance(choice, str)
        )
        shown = [best, *(degrees for degrees in shown if degrees != best)][:BEST]
        slower = plan.step > fastest.step_time * (1 + NEGLIGIBLE)
        # After a Ctrl-C they may not have been listed.
        legal = len({*self.legal, *self.problems} if "legal" in vars(self) else self.problems)
        too_large = len(self.too_large) + len(self.ranking.refused.keys() - steps.keys())
        looked_at = too_large + self.ranking.slower + len(self.ranking.steps)
        found = DegreeSearch(
            fastest=FasterPlan(configuration=fastest, levers=levers) if slower else None,
            usual=usual,
            tolerance=self.job.tolerance,
            configurations=tuple(self._summary(degrees) for degrees in shown),
            legal=legal,
            too_large=too_large,
            slower=self.ranking.slower,
            planned=len(self.ranking.steps),
            unplanned=max(legal - looked_at, 0) if self.ranking.left else 0,
            interrupted=self.interrupted,
            cut_off=self.late,
            other_values=self._other_values(best),
        )
        return Best(degrees=best, problem=self.problems[best], result=self.results[best], search=found)

    def _other_values(self, best: Degrees) -> tuple[DegreeValue, ...]:
        """Other values of the degrees, where all choices were looked at."""
        if "legal" not in vars(self) or self.ranking.left or self.interrupted:
            return ()
        known = {**self.proven, **self.bounds}
        bounds = {degrees: known[degrees] for degrees in known.keys() - self.ranking.refused.keys()}
        steps = self.steps()
        for degrees, step in self.with_hosts.steps.items():
            steps[degrees] = min(step, steps.get(degrees, math.inf))
        return other_values(best, self.legal, steps=steps, bounds=bounds, too_large=self.too_large)

    def _verified(self, degrees: Degrees) -> Result:
        """The best plan of a choice, its quick plan if no planner has answered."""
        if degrees not in self.results:
            self.results[degrees] = self._verified_quick(degrees, self.quick[degrees])
        return self.results[degrees]

    def _verified_quick(self, degrees: Degrees, solution: Solution) -> Result:
        """A quick plan; on one device plain gradient accumulation in its place if that is within the tolerance."""
        problem = self.problems[degrees]
        result = verify(QUICK_PLAN, problem, solution, 0.0)
        if problem.devices == 1 and problem.levers is None:
            for plainer in without_levers(problem, result.solution):
                with suppress(DebubbleError):
                    plain = verify(QUICK_PLAN, problem, plainer, 0.0)
                    if plain.time <= result.time * (1 + self.job.tolerance):
                        return plain
        return result

    def _simplest(self) -> tuple[PlannedChoice, tuple[str, ...]]:
        """The plan to recommend, which becomes its choice's result, and the levers of the fastest plan."""
        plans = [self._planned(degrees) for degrees in self.results]
        fastest = min(plans, key=lambda plan: plan.step)
        if self.planner == "auto":
            near = fastest.step * (1 + self.job.tolerance)
            plans += [
                PlannedChoice(degrees=degrees, solution=result.solution, step=float(result.time))
                for degrees, result in self.simpler.items()
            ]
            plans += [
                PlannedChoice(degrees=degrees, solution=solution, step=self.ranking.steps[degrees])
                for degrees, solution in self.quick.items()
                if self.job.tolerance and degrees in self.ranking.steps and self.ranking.steps[degrees] <= near
            ]
        known = [*self.results.values(), *self.simpler.values()]
        while True:
            plan = fastest
            if self.job.tolerance:
                plan = simplest(plans, tolerance=self.job.tolerance, runs=self._runs)
            result = next((result for result in known if result.solution is plan.solution), None)
            if result is not None:
                self.results[plan.degrees] = result
                return plan, fastest.levers
            # A quick plan's target may offload, which is a lever more.
            result = self._verified_quick(plan.degrees, plan.solution)
            known.append(result)
            plans.remove(plan)
            plans.append(replace(plan, solution=result.solution, step=float(result.time)))

    def _planned(self, degrees: Degrees) -> PlannedChoice:
        result = self.results[degrees]
        return PlannedChoice(degrees=degrees, solution=result.solution, step=float(result.time))

    def _runs(self, plan: PlannedChoice) -> bool:
        """Tell whether debubble's runtime runs the plan, or some framework accepts its options."""
        job, degrees = self.job, plan.degrees
        if job.runs_as_planned(degrees):
            return True
        if job.target is not None or {OFFLOAD, CPU_OPTIMIZER} & set(plan.levers):
            return False
        options = job.run_options(degrees)
        return any(target.refusal(options, job.model, pipeline=degrees.pipeline) is None for target in targets.values())

    def _usual_row(self, name: str, choice: Degrees | str) -> UsualChoice:
        if isinstance(choice, str):
            elsewhere = None if self.late else usual_elsewhere(self.job, name, usual_choices(self.legal)[name])
            return elsewhere or UsualChoice(name=name, reason=choice)
        if self.planner == "auto" or choice in self.results:
            self._verified(choice)
            return UsualChoice(name=name, configuration=self._summary(choice))
        return UsualChoice(name=name, reason=f"The planner '{self.planner}' did not plan it.")

    def no_time(self) -> CutOffError:
        """The error where the deadline has passed, and nothing is known to fit."""
        looked_at = len(self.too_large) + len(self.problems)
        return CutOffError(
            f"The deadline passed before a plan was found that fits: quick plans fit none of the {looked_at} choices of"
            f" degrees (of {len(self.legal)}) that were looked at.  Give a longer --deadline, or degrees."
        )

    def _nothing_fits(self) -> DebubbleError:
        if self.unanswered and not self.ranking.steps:
            return self.no_time()
        tried = f"None of the {len(self.legal)} choices of degrees fits; the one that misses by least:"
        if self.ranking.steps:
            tried = f"The planner '{self.planner}' has no plan for the choices of degrees that fit; it says:"
        refused = self.ranking.refused
        if not refused:
            degrees, reason = next(iter(self.too_large.items()))
            return InfeasibleError(f"{tried} {degrees}.  {reason}")
        error = closest(list(refused.values()))
        degrees = next(each for each, other in refused.items() if other is error)
        return InfeasibleError(f"{tried} {degrees}.  {error}")

    def _summary(self, degrees: Degrees) -> ConfigurationSummary:
        return summary_of(self.job, degrees, self.problems[degrees], self.results[degrees])
