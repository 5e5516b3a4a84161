"""The verified answers of the planners that `auto` runs, and the choice among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from debubble.errors import PlannerFailedError
from debubble.ir import CandidateSummary, CutOffError, DebubbleError, Number, PluginError
from debubble.ir.plan_entries import Status
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.process_pool import failure
from debubble.planners.progress import Improvement, Progress, changing_events, tell
from debubble.planners.registry import Result, verify
from debubble.search.effort import Deadline
from debubble.targets.orders import undivided

MIN_RELATIVE_GAIN = 5e-4
"""Plans whose steps differ by less than this fraction count as equally fast; a larger excess of a plain plan over the
fastest one is reported."""
PLAIN_TOLERANCE = 0.01
"""Fraction of the step by which a plain plan may be slower: one without recomputation, offload and CPU optimizer."""
ONE_STAGE_TOLERANCE = 0.02
"""The same for a plain plan with a single stage, which every framework runs."""


def tolerance_of(problem: Problem) -> float:
    """Upper limit on a plain plan's step, as a multiple of the fastest; infinite on CPUs, which are their own hosts."""
    tail = problem.tail
    return math.inf if tail is not None and tail.cluster.slowest.name == "CPU" else 1 + PLAIN_TOLERANCE


def prefers_plain(problem: Problem) -> bool:
    """Whether a plain plan is preferred to one that is a little faster; not for targets: they have their own levers."""
    return problem.plain and problem.levers is None and isinstance(problem.workload, ModelUnits)


class Answers:
    """The verified answer of every planner that was asked, or its error."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        self._problem, self._names = problem, list(names)
        # Without a deadline, every planner has a default one, which excludes the compilation of kernels.
        self._deadline = Deadline(math.inf if problem.deadline is None else problem.deadline)
        self._answers: dict[str, Result | DebubbleError] = {}
        self._failures: dict[str, DebubbleError] = {}
        """Errors in the code of planners that already had a plan."""
        self.quickest: Result | None = None
        """The answer with the shortest step without disturbances."""

    def __getitem__(self, name: str) -> Result | DebubbleError:
        return self._answers[name]

    def problem(self, effort: float | None = None) -> Problem:
        """The problem with the time remaining until its deadline."""
        deadline = None if self._problem.deadline is None else max(self._deadline.remaining, 1e-3)
        return replace(self._problem, deadline=deadline, effort=self._problem.effort if effort is None else effort)

    @property
    def results(self) -> list[Result]:
        """The answers that fit, fastest first, then in the order in which planners are asked."""
        answers = (self._answers[name] for name in self._names if name in self._answers)
        return sorted((answer for answer in answers if isinstance(answer, Result)), key=lambda result: result.score)

    @property
    def chosen(self) -> Result:
        """The fastest answer, or a plain one within the tolerance of it if that is preferred."""
        fastest, *_ = results = self.results
        if not prefers_plain(self._problem):
            return fastest
        plain = [result for result in results if result.plain]
        one_stage = [result for result in plain if undivided(result.solution.schedule).stages == 1]
        if one_stage and one_stage[0].score <= (1 + ONE_STAGE_TOLERANCE) * fastest.score:
            return one_stage[0]
        plain = [result for result in plain if result.score <= tolerance_of(self._problem) * fastest.score]
        if not plain:
            return fastest
        equal = [result for result in plain if result.score <= (1 + MIN_RELATIVE_GAIN) * plain[0].score]
        return min(equal, key=lambda result: result.solution.complexity)

    @property
    def refusals(self) -> list[DebubbleError]:
        """The errors of planners without an answer."""
        return [answer for answer in self._answers.values() if isinstance(answer, DebubbleError)]

    @property
    def deadline_passed(self) -> bool:
        """True if the deadline has passed."""
        return self._deadline.passed

    def cut_off(self, names: Sequence[str]) -> None:
        """Record that the deadline passed before these planners were asked."""
        for name in names:
            self._answers[name] = CutOffError("The deadline came before it was asked; give more with --deadline.")
        self._tell()

    def leave_out(self, name: str) -> None:
        """Drop a planner from the list of planners to ask."""
        self._names.remove(name)
        self._tell()

    def take(self, name: str, ask: Callable[[], Result]) -> Iterator[Solution]:
        """Store a planner's answer; yield the chosen solution if it is the fastest so far.

        Raises KeyboardInterrupt if one ended the planner's search.
        """
        try:
            with changing_events(self._with_best_bound):
                answer = ask()
        except DebubbleError as error:
            self._answers.setdefault(name, error)
        except Exception as error:  # other planners may have an answer: the plan reports the failure
            self._fail(name, failure(error))
        else:
            yield from self._store(name, answer)
            answer.solution.raise_if_interrupted()
        self._tell()

    def _tell(self) -> None:
        """Report how many planners have answered, and the fastest answer."""
        best = next(iter(self.results), None)
        done = sum(name in self._answers for name in self._names)
        tell(
            Progress(
                stage="Planning", done=done, total=len(self._names), counted="planners",
                best=None if best is None else best.planner, step_time=None if best is None else float(best.time),
            )
        )  # fmt: skip

    def stream(
        self, name: str, problem: Problem, find: Callable[[], Iterable[Solution]], *, tolerance: float = 1.0
    ) -> Iterator[Solution]:
        """Store a planner's answers as it finds them; yield the chosen solution whenever one is the fastest so far.

        An answer replaces the planner's last one if its step is at most `tolerance` times as long.
        """
        begin, solutions = time.perf_counter(), iter(find())
        while True:
            try:
                solution = next(solutions)
                answer = verify(name, problem, solution, time.perf_counter() - begin)
            except StopIteration:
                return
            except DebubbleError as error:
                self._answers.setdefault(name, error)
            except Exception as error:  # as above
                self._fail(name, failure(error))
            else:
                yield from self._store(name, answer, tolerance=tolerance)

    def _fail(self, name: str, error: DebubbleError) -> None:
        """Record an error in a planner's code; a plan that it already had is kept."""
        if isinstance(self._answers.setdefault(name, error), Result):
            self._failures[name] = error

    def _store(self, name: str, answer: Result, *, tolerance: float = 1.0) -> Iterator[Solution]:
        if self.quickest is None or answer.time < self.quickest.time:
            self.quickest = answer
        known = self._answers.get(name)
        best = min((result.score for result in self.results), default=math.inf)
        if not isinstance(known, Result) or answer.score <= tolerance * known.score:
            self._answers[name] = answer
        if answer.score < best:
            # Only plans that Ctrl-C would return are reported.
            schedule, step = answer.solution.schedule.name, float(answer.time)
            tell(self._with_best_bound(Improvement(planner=name, schedule=schedule, step_time=step, gap=answer.gap)))
            yield self.solution()

    def _with_best_bound(self, event: Progress | Improvement) -> Progress | Improvement:
        """The event, with a plan's gap to the best bound of any planner."""
        if isinstance(event, Progress):
            return event
        bound = max((float(result.lower_bound) for result in self.results), default=0.0)
        return replace(event, gap=min(event.gap, max(0.0, (event.step_time - bound) / event.step_time)))

    def interrupt(self) -> None:
        """Record that the search was interrupted, with the fastest answer."""
        best = self.results[0]
        self._answers[best.planner] = replace(best, solution=replace(best.solution, cut_off=True, interrupted=True))

    def compare_undisturbed(self) -> None:
        """Record how much slower the chosen answer is than the fastest one without disturbances."""
        chosen, quickest = self.chosen, self.quickest
        if quickest is not None:
            self._answers[chosen.planner] = replace(chosen, robust_excess=_excess(chosen.time, quickest.time))

    def _compared_with_levers(self, chosen: Result) -> Result:
        """The chosen answer with its excess over the fastest one, if only the chosen one is plain."""
        quickest = self.quickest
        if self._problem.robust or quickest is None or quickest.plain or not chosen.plain:
            return chosen
        return replace(chosen, plain_excess=_excess(chosen.time, quickest.time))

    def solution(self) -> Solution:
        """The chosen solution with the summaries of all answers, its own first."""
        chosen = self._compared_with_levers(self.chosen)
        answers = {**self._answers, chosen.planner: chosen}
        return replace(
            chosen.solution,
            lower_bound=max(result.pipeline_bound for result in self.results),
            candidates=tuple(
                sorted(
                    (_summary(name, answer, self._failures.get(name)) for name, answer in answers.items()),
                    key=lambda c: (
                        c.planner != chosen.planner,
                        c.step_time is None,
                        c.robustness.expected if c.robustness else c.step_time,
                    ),
                )
            ),
            remark=None,
            cut_off=False,
            interrupted=False,
        )


def _excess(step: Number, fastest: Number) -> float | None:
    """Fraction by which a step is longer than the fastest; None if that is negligible."""
    excess = float(step - fastest) / float(fastest)
    return excess if excess > MIN_RELATIVE_GAIN else None


def _summary(name: str, answer: Result | DebubbleError, failed: DebubbleError | None) -> CandidateSummary:
    """A planner's summary; `failed` is an error in its code after it had a plan."""
    if isinstance(answer, Result):
        return answer.summary if failed is None else replace(answer.summary, rejected=str(failed))
    status: Status = "rejected"
    if isinstance(answer, CutOffError):
        status = "cut off"
    elif isinstance(answer, PlannerFailedError | PluginError):
        status = "failed"
    return CandidateSummary(planner=name, status=status, rejected=str(answer))
