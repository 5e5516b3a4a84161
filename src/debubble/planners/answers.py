"""The verified answers of the planners that `auto` asks: the chosen one, and what is told of the others."""

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
from debubble.planners.progress import Improvement, Progress, changing_news, tell
from debubble.planners.registry import Result, verify
from debubble.search.effort import Deadline
from debubble.targets.orders import undivided

MIN_RELATIVE_GAIN = 5e-4
"""Share of a step from which it is told how much slower a plan without levers is; of those that differ by less the one
with fewest stages is taken."""
PLAIN_TOLERANCE = 0.01
"""Share of a step by which a plan may be slower that neither recomputes, nor offloads, nor steps on hosts."""
ONE_STAGE = 0.02
"""Share of a step for such a plan that runs the model as a whole, as every framework does."""


def tolerance_of(problem: Problem) -> float:
    """Times the fastest step that a plan without levers may take: any, where hosts have the devices' own cores."""
    tail = problem.tail
    return math.inf if tail is not None and tail.cluster.slowest.name == "CPU" else 1 + PLAIN_TOLERANCE


def prefers_plain(problem: Problem) -> bool:
    """Tell whether a plan without levers is taken for one that is a little faster; a target has levers of its own."""
    return problem.plain and problem.levers is None and isinstance(problem.workload, ModelUnits)


class Answers:
    """The verified answer of every planner that was asked, or why it has none."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        self._problem, self._names = problem, list(names)
        # Without one every planner has its own, which kernels that are compiled first put off.
        self._deadline = Deadline(math.inf if problem.deadline is None else problem.deadline)
        self._found: dict[str, Result | DebubbleError] = {}
        self._failures: dict[str, DebubbleError] = {}
        """Errors in the programs of planners that already had a plan."""
        self.quickest: Result | None = None
        """The answer with the shortest step, whatever disturbances make of it."""

    def __getitem__(self, name: str) -> Result | DebubbleError:
        return self._found[name]

    def problem(self, effort: float | None = None) -> Problem:
        """The problem with what is left of its time on the clock."""
        left = None if self._problem.deadline is None else max(self._deadline.remaining, 1e-3)
        return replace(self._problem, deadline=left, effort=self._problem.effort if effort is None else effort)

    @property
    def results(self) -> list[Result]:
        """The answers that fit, the fastest first; of equally fast ones the one of the planner asked first."""
        found = (self._found[name] for name in self._names if name in self._found)
        return sorted((each for each in found if isinstance(each, Result)), key=lambda result: result.score)

    @property
    def chosen(self) -> Result:
        """The fastest answer; of model units one without levers that is about as fast, if there is one."""
        fastest, *_ = results = self.results
        if not prefers_plain(self._problem):
            return fastest
        whole = [each for each in results if each.plain and undivided(each.solution.schedule).stages == 1]
        if whole and whole[0].score <= (1 + ONE_STAGE) * fastest.score:
            return whole[0]
        plain = [each for each in results if each.plain and each.score <= tolerance_of(self._problem) * fastest.score]
        if not plain:
            return fastest
        equal = [each for each in plain if each.score <= (1 + MIN_RELATIVE_GAIN) * plain[0].score]
        return min(equal, key=lambda each: each.solution.complexity)

    @property
    def refusals(self) -> list[DebubbleError]:
        """Why the other planners have none."""
        return [answer for answer in self._found.values() if isinstance(answer, DebubbleError)]

    @property
    def late(self) -> bool:
        """True if the deadline has passed."""
        return self._deadline.passed

    def cut_off(self, names: Sequence[str]) -> None:
        """Note that the deadline came before these planners were asked."""
        for name in names:
            self._found[name] = CutOffError("The deadline came before it was asked; give more with --deadline.")
        self._tell()

    def leave_out(self, name: str) -> None:
        """Do not wait for a planner's answer."""
        self._names.remove(name)
        self._tell()

    def take(self, name: str, ask: Callable[[], Result]) -> Iterator[Solution]:
        """Keep a planner's answer; yield it if it is the fastest so far.

        Raises KeyboardInterrupt if one ended its search.
        """
        try:
            with changing_news(self._with_best_bound):
                answer = ask()
        except DebubbleError as error:
            self._found.setdefault(name, error)
        except Exception as error:  # others may have an answer: the plan says that this one failed
            self._fail(name, failure(error))
        else:
            yield from self._keep(name, answer)
            answer.solution.raise_if_interrupted()
        self._tell()

    def _tell(self) -> None:
        """Say how many planners have answered, and the fastest answer."""
        best = next(iter(self.results), None)
        tell(
            Progress(
                stage="Planning", done=len(self._found), total=len(self._names), counted="planners",
                best=None if best is None else best.planner, step_time=None if best is None else float(best.time),
            )
        )  # fmt: skip

    def stream(
        self, name: str, problem: Problem, find: Callable[[], Iterable[Solution]], *, tolerance: float = 1.0
    ) -> Iterator[Solution]:
        """Keep the answers of a planner as it finds them; yield those that are the fastest so far.

        With a tolerance they may take so many times the step of the planner's answer that they replace.
        """
        begin, solutions = time.perf_counter(), iter(find())
        while True:
            try:
                solution = next(solutions)
                answer = verify(name, problem, solution, time.perf_counter() - begin)
            except StopIteration:
                return
            except DebubbleError as error:
                self._found.setdefault(name, error)
            except Exception as error:  # as above
                self._fail(name, failure(error))
            else:
                yield from self._keep(name, answer, tolerance=tolerance)

    def _fail(self, name: str, error: DebubbleError) -> None:
        """Note an error in a planner's program; a plan that it had stays."""
        if isinstance(self._found.setdefault(name, error), Result):
            self._failures[name] = error

    def _keep(self, name: str, answer: Result, *, tolerance: float = 1.0) -> Iterator[Solution]:
        if self.quickest is None or answer.time < self.quickest.time:
            self.quickest = answer
        known = self._found.get(name)
        best = min((result.score for result in self.results), default=math.inf)
        if not isinstance(known, Result) or answer.score <= tolerance * known.score:
            self._found[name] = answer
        if answer.score < best:
            # Only what a Ctrl-C would keep is told.
            schedule, step = answer.solution.schedule.name, float(answer.time)
            tell(self._with_best_bound(Improvement(planner=name, schedule=schedule, step_time=step, gap=answer.gap)))
            yield self.solution()

    def _with_best_bound(self, news: Progress | Improvement) -> Progress | Improvement:
        """The news with a plan's gap to the best bound that any planner has, as the answer has it."""
        if isinstance(news, Progress):
            return news
        bound = max((float(result.lower_bound) for result in self.results), default=0.0)
        return replace(news, gap=min(news.gap, max(0.0, (news.step_time - bound) / news.step_time)))

    def interrupt(self) -> None:
        """Note that the search of the fastest answer was interrupted."""
        best = self.results[0]
        self._found[best.planner] = replace(best, solution=replace(best.solution, cut_off=True, interrupted=True))

    def compare_undisturbed(self) -> None:
        """Note how much slower the chosen answer is than the fastest one, if nothing disturbs them."""
        chosen, quickest = self.chosen, self.quickest
        if quickest is not None:
            self._found[chosen.planner] = replace(chosen, robust_excess=_excess(chosen.time, quickest.time))

    def _compared_with_levers(self, chosen: Result) -> Result:
        """The chosen answer with its excess over the fastest of all planners, if it is plain and that is not."""
        quickest = self.quickest
        if self._problem.robust or quickest is None or quickest.plain or not chosen.plain:
            return chosen
        return replace(chosen, plain_excess=_excess(chosen.time, quickest.time))

    def solution(self) -> Solution:
        """The chosen answer, with a summary of all, its own the first."""
        chosen = self._compared_with_levers(self.chosen)
        found = {**self._found, chosen.planner: chosen}
        return replace(
            chosen.solution,
            lower_bound=max(result.pipeline_bound for result in self.results),
            candidates=tuple(
                sorted(
                    (_summary(name, answer, self._failures.get(name)) for name, answer in found.items()),
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
    """Share by which a step is longer than the fastest; None: by nothing that is worth a word."""
    excess = float(step - fastest) / float(fastest)
    return excess if excess > MIN_RELATIVE_GAIN else None


def _summary(name: str, answer: Result | DebubbleError, failed: DebubbleError | None) -> CandidateSummary:
    """A planner's row; with an error in its program that came after its plan."""
    if isinstance(answer, Result):
        return answer.summary if failed is None else replace(answer.summary, rejected=str(failed))
    status: Status = "rejected"
    if isinstance(answer, CutOffError):
        status = "cut off"
    elif isinstance(answer, PlannerFailedError | PluginError):
        status = "failed"
    return CandidateSummary(planner=name, status=status, rejected=str(answer))
