"""The answer of a degree search: the recommended plan, and the table of alternatives to it."""

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
from debubble.planners.degrees.ranking import NEGLIGIBLE_DIFFERENCE, Ranking
from debubble.planners.degrees.simplest import PlannedChoice, simplest
from debubble.planners.degrees.space import Job, configurations
from debubble.planners.degrees.usual import usual_choices, usual_elsewhere
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.registry import Result, frameworks_of, verify
from debubble.search.effort import Deadline
from debubble.targets.target import targets

GRACE_SECONDS = 2.0
"""Seconds after the deadline for which a search that has no plan yet keeps looking for one."""
MAX_SHOWN = 5
"""Number of choices of degrees that are planned thoroughly and shown."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The plan that a degree search recommends, and the record of that search."""

    degrees: Degrees
    problem: Problem
    result: Result
    search: DegreeSearch


class CandidatePlans:
    """The plans and bounds that a degree search has so far, and the answer made of them."""

    def __init__(self, job: Job, planner: str) -> None:
        self.job, self.planner = job, planner
        self.problems: dict[Degrees, Problem] = {}
        self.too_large: dict[Degrees, str] = {}
        self.step_bounds: dict[Degrees, float] = {}
        """Lower bound in seconds on the step of any plan, for choices that memory does not rule out."""
        self.quick_bounds: dict[Degrees, float] = {}
        """Lower bound in seconds on the step of a quick plan, for choices where it was computed."""
        self.ranking: Ranking[Degrees] = Ranking()
        self.host_ranking: Ranking[Degrees] = Ranking()
        """Ranking by quick plans that offload to the host."""
        self.quick: dict[Degrees, Solution] = {}
        self.simpler: dict[Degrees, Result] = {}
        """Answers of `auto` that are slower than the result of the same choice, but may be simpler."""
        self.results: dict[Degrees, Result] = {}
        self.usual: dict[str, Degrees | str] = {}
        """Name of a usual choice -> its fastest degrees, or why none fits."""
        self.interrupted = False
        self.unanswered = False
        """Whether the deadline ended a planner before it had an answer."""
        self.clock = Deadline(math.inf if job.deadline is None else job.deadline)

    @property
    def cut_off(self) -> bool:
        """True if the job's deadline has passed and some plan fits."""
        return self.clock.passed and bool(self.ranking.steps or self.results)

    @property
    def expired(self) -> bool:
        """True if no plan fits `GRACE_SECONDS` after the job's deadline."""
        return self.clock.remaining < -GRACE_SECONDS and not (self.ranking.steps or self.results)

    @property
    def deadline(self) -> float | None:
        """Seconds until the job's deadline; None if it has none."""
        return None if self.job.deadline is None else max(self.clock.remaining, MIN_SECONDS_LEFT)

    @cached_property
    def legal(self) -> list[Degrees]:
        """All legal choices."""
        return configurations(self.job)

    def steps(self) -> dict[Degrees, float]:
        """The best known step, in seconds, of every choice that fits."""
        return {**self.ranking.steps, **{degrees: float(result.time) for degrees, result in self.results.items()}}

    def best(self) -> Recommendation:
        """Return the simplest plan within the tolerance of the fastest; raise InfeasibleError if there is no plan."""
        steps = self.steps()
        if not steps or (self.planner != "auto" and not self.results and not self.interrupted):
            raise self._nothing_fits()
        if self.planner == "auto" or not self.results:
            # A choice for which no planner had an answer is shown with its quick plan.
            for degrees in self.ranking.best(1 if self.cut_off else MAX_SHOWN):
                self._verified(degrees)
        shown = sorted(self.results, key=lambda degrees: steps[degrees])[:MAX_SHOWN]
        fastest = self._summary(shown[0])
        plan, levers = self._simplest()
        best = plan.degrees
        usual = tuple(
            self._usual_row(name, choice)
            for name, choice in self.usual.items()
            if not self.cut_off or choice in self.results or isinstance(choice, str)
        )
        shown = [best, *(degrees for degrees in shown if degrees != best)][:MAX_SHOWN]
        slower = plan.step > fastest.step_time * (1 + NEGLIGIBLE_DIFFERENCE)
        # After Ctrl-C the legal choices may not have been listed.
        legal = len({*self.legal, *self.problems} if "legal" in vars(self) else self.problems)
        too_large = len(self.too_large) + len(self.ranking.infeasible.keys() - steps.keys())
        excluded = len(self.ranking.slower - self.ranking.infeasible.keys())
        examined = too_large + excluded + len(self.ranking.steps)
        search = DegreeSearch(
            fastest=FasterPlan(configuration=fastest, levers=levers) if slower else None,
            usual=usual,
            tolerance=self.job.tolerance,
            configurations=tuple(self._summary(degrees) for degrees in shown),
            legal=legal,
            too_large=too_large,
            slower=excluded,
            planned=len(self.ranking.steps),
            unplanned=max(legal - examined, 0) if self.ranking.remaining else 0,
            interrupted=self.interrupted,
            cut_off=self.cut_off,
            other_values=self._other_values(best),
        )
        return Recommendation(degrees=best, problem=self.problems[best], result=self.results[best], search=search)

    def _other_values(self, best: Degrees) -> tuple[DegreeValue, ...]:
        """The cost of other values of the degrees, if all choices were examined."""
        if "legal" not in vars(self) or self.ranking.remaining or self.interrupted:
            return ()
        known = {**self.step_bounds, **self.quick_bounds}
        bounds = {degrees: known[degrees] for degrees in known.keys() - self.ranking.infeasible.keys()}
        steps = self.steps()
        for degrees, step in self.host_ranking.steps.items():
            steps[degrees] = min(step, steps.get(degrees, math.inf))
        return other_values(best, self.legal, steps=steps, bounds=bounds, too_large=self.too_large)

    def _verified(self, degrees: Degrees) -> Result:
        """The best plan of a choice; its quick plan if no planner has one."""
        if degrees not in self.results:
            self.results[degrees] = self._verified_quick(degrees, self.quick[degrees])
        return self.results[degrees]

    def _verified_quick(self, degrees: Degrees, solution: Solution) -> Result:
        """A verified quick plan; on one device, plain gradient accumulation if that is within the tolerance of it."""
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
        """Choose the plan to recommend and store it as its choice's result; also return the fastest plan's levers."""
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
                plan = simplest(plans, tolerance=self.job.tolerance, support=self._support)
            result = next((result for result in known if result.solution is plan.solution), None)
            if result is not None:
                self.results[plan.degrees] = result
                return plan, fastest.levers
            # Verification may add offload to a quick plan, and with it a lever.
            result = self._verified_quick(plan.degrees, plan.solution)
            known.append(result)
            plans.remove(plan)
            plans.append(replace(plan, solution=result.solution, step=float(result.time)))

    def _planned(self, degrees: Degrees) -> PlannedChoice:
        result = self.results[degrees]
        return PlannedChoice(degrees=degrees, solution=result.solution, step=float(result.time))

    def _support(self, plan: PlannedChoice) -> int:
        """2: debubble's runtime or a framework runs the plan as it is, 1: one accepts its options, 0: none does."""
        job, degrees = self.job, plan.degrees
        if job.runs_as_planned(degrees):
            return 2
        if job.target is not None or {OFFLOAD, CPU_OPTIMIZER} & set(plan.levers):
            return 0
        if frameworks_of(self.problems[degrees], plan.solution):
            return 2
        options = job.run_options(degrees)
        return any(target.refusal(options, job.model, pipeline=degrees.pipeline) is None for target in targets.values())

    def _usual_row(self, name: str, choice: Degrees | str) -> UsualChoice:
        if isinstance(choice, str):
            elsewhere = None if self.cut_off else usual_elsewhere(self.job, name, usual_choices(self.legal)[name])
            return elsewhere or UsualChoice(name=name, reason=choice)
        if self.planner == "auto" or choice in self.results:
            self._verified(choice)
            offload = {OFFLOAD, CPU_OPTIMIZER} & set(self._planned(choice).levers)
            return UsualChoice(name=f"{name} with offload" if offload else name, configuration=self._summary(choice))
        return UsualChoice(name=name, reason=f"The planner '{self.planner}' did not plan it.")

    def deadline_error(self) -> CutOffError:
        """The error if the deadline passed before any plan was found that fits."""
        examined = len(self.too_large) + len(self.problems)
        return CutOffError(
            f"The deadline passed before a plan was found that fits: quick plans fit none of the {examined} choices of"
            f" degrees (of {len(self.legal)}) that were looked at.  Give a longer --deadline, or degrees."
        )

    def _nothing_fits(self) -> DebubbleError:
        if self.unanswered and not self.ranking.steps:
            return self.deadline_error()
        tried = f"None of the {len(self.legal)} choices of degrees fits; the one that misses by least:"
        if self.ranking.steps:
            tried = f"The planner '{self.planner}' has no plan for the choices of degrees that fit; it says:"
        infeasible = self.ranking.infeasible
        if not infeasible:
            degrees, reason = next(iter(self.too_large.items()))
            return InfeasibleError(f"{tried} {degrees}.  {reason}")
        error = closest(list(infeasible.values()))
        degrees = next(choice for choice, other in infeasible.items() if other is error)
        return InfeasibleError(f"{tried} {degrees}.  {error}")

    def _summary(self, degrees: Degrees) -> ConfigurationSummary:
        return summary_of(self.job, degrees, self.problems[degrees], self.results[degrees])
