"""`auto`: the plan with the shortest step, gradients and optimizer included, of the planners that it asks.

It asks `joint`, `portfolio`, `adapipe` (of given stages `optpipe`, for frameworks also `scope`) and what other
distributions register, or with `Problem.compare` every planner: the papers' and the baselines are asked by name
otherwise.  All are given the same problem, and the fastest verified answer is kept; what the others answered, or why
they could not, stays with the plan.

Planners that do not search answer first, so that there is a plan at once.  `joint` then drafts plans, and the others
search in processes of their own where that is worth one; `portfolio` only where the fastest answer is close to its
bound, as memory suffices.  Last, `joint` searches the order of the fastest answer at length, whoever gave it.  An
answer that neither recomputes, offloads nor steps on hosts, whoever gave it, replaces the fastest one if its step is at
most 1% longer; on CPUs, where hosts have the devices' own cores and memory, if it fits.  Without a pipeline such an
answer that accumulates gradients, as every framework does, may take 2% longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from debubble.costs.partition import Partition
from debubble.errors import PlannerFailedError
from debubble.ir import CandidateSummary, CutOffError, DebubbleError, Kind, PluginError
from debubble.ir.plan_entries import INTERRUPTED, Status
from debubble.planners.joint.planner import joint_draft
from debubble.planners.portfolio.planner import SMALL
from debubble.planners.problem import ModelUnits, Problem, Solution, closest
from debubble.planners.process_pool import Task, TaskAnswer, by_completion, failure, side_by_side
from debubble.planners.progress import Improvement, Progress, changing_news, tell
from debubble.planners.registry import Result, planner, planners, verify
from debubble.search.effort import Deadline
from debubble.targets.orders import COMPUTE, OwnOrders, accumulated, undivided, without_transfers

LITTLE_EFFORT = 0.5
"""Effort up to which `joint` searches the order of its own fastest plan too, and all others are asked."""


@planner("auto", paper="debubble's own", searches=True, slices=True)
def auto(problem: Problem) -> Iterator[Solution]:
    """Ask joint, portfolio, adapipe and registered plug-ins, and keep the fastest plan that fits."""
    yield from fastest_of(problem, planners_for(problem))


def planners_for(problem: Problem) -> list[str]:
    """The planners that `auto` asks; for a target with orders of its own, those alone that plan such orders."""
    if problem.slices > 1:
        return [name for name in planners if planners[name].slices and name != "auto"]
    usual: tuple[str, ...] = ASKED if isinstance(problem.workload, ModelUnits) else ASKED_OF_STAGES
    if problem.levers is not None:
        usual = ASKED_FOR_TARGETS
    asked = [name for name in planners if name != "auto" and (problem.compare or name in usual or _is_plugin(name))]
    own = problem.levers is not None and isinstance(problem.levers.orders, OwnOrders)
    return [name for name in asked if planners[name].plain] if own else asked


ASKED = ("joint", "portfolio", "adapipe")
"""The planners that `auto` asks about model units without `Problem.compare`."""
ASKED_FOR_TARGETS = (*ASKED, "scope")
"""The planners asked for a framework, whose orders leave partition and recomputation to choose, as SCOPE does."""
ASKED_OF_STAGES = ("joint", "portfolio", "optpipe")
"""The planners asked about given stages, of which `joint` searches the order of the fastest answer alone."""


OF_THE_LIBRARY, LIBRARY_GAP = "portfolio", 0.04
"""The planner of the library's schedules, and the gap of the fastest plan above which `auto` does not ask it: memory is
short there, and stages that recompute alike are behind.  In small steps and with little effort it is asked all the
same."""


def _is_plugin(name: str) -> bool:
    """Tell whether another distribution has registered the planner."""
    return planners[name].function.__module__.partition(".")[0] != "debubble"


def fastest_of(problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Ask these planners and keep the fastest plan that fits, with a summary of every answer.

    Args:
        problem: What is asked.
        names: The planners.

    Returns:
        Plans, each faster than those before it, or the same with the answers of more planners.

    Raises:
        InfeasibleError: If none of the planners has a plan, with the reason that misses the limit by least.
    """
    answers = _Answers(problem, names)
    try:
        yield from _asked(answers, problem, names)
    except KeyboardInterrupt:
        if not answers.results:
            raise
        answers.interrupt()
    if not answers.results:
        raise closest(answers.refusals)
    yield answers.solution()


def _asked(answers: _Answers, problem: Problem, names: Sequence[str]) -> Iterator[Solution]:
    """Ask the planners in turn, and search the order of the fastest answer."""
    for name in names:
        if not planners[name].searches:
            yield from answers.take(name, partial(planners[name], answers.problem()))
    yield from _searched(answers, [name for name in names if planners[name].searches])
    best = next(iter(answers.results), None)
    if best is not None and answers.late:
        return
    # A target has orders of its own, and on one device gradients accumulate in one.
    accumulates = problem.devices == 1 and best is not None and best.plain and _prefers_plain(problem)
    if best is not None and "joint" in names and best.gap > 0 and problem.levers is None and not accumulates:
        # It loads the compiler.
        from debubble.planners.joint.orders import last_search

        last = answers.problem()
        yield from answers.stream("joint", last, partial(last_search, last, best.solution, drafted=_drafts(problem)))
    best = next(iter(answers.results), None)
    if best is not None and _prefers_plain(problem):
        tried = [best]
        if problem.robust and answers.quickest is not None and answers.quickest is not best:
            # What disturbances spoil of it may be its transfers alone.
            tried.append(answers.quickest)
        for answer in tried:
            plainer = partial(without_levers, problem, answer.solution)
            yield from answers.stream(answer.planner, problem, plainer, tolerance=_tolerance(problem))
    if problem.robust and best is not None:
        answers.remark_robustness()
        yield answers.solution()


NOTABLE = 5e-4
"""Share of a step from which it is told how much slower a plan without levers is; of those that differ by less the one
with fewest stages is taken."""
LITTLE = 0.01
"""Share of a step by which a plan may be slower that neither recomputes, nor offloads, nor steps on hosts."""
OF_ROBUSTNESS = "slower undisturbed than the fastest plan that was found"
"""What a plan that stands disturbances better is said to be."""
WITH_LEVERS = "slower than with recomputation, offload or steps on hosts"
"""What a plan without levers is said to be."""
ONE_STAGE = 0.02
"""Share of a step for such a plan that runs the model as a whole, as every framework does."""


def _tolerance(problem: Problem) -> float:
    """How many times the fastest step a plan without levers may take: any, where hosts have the devices' own cores."""
    tail = problem.tail
    return math.inf if tail is not None and tail.cluster.slowest.name == "CPU" else 1 + LITTLE


def _prefers_plain(problem: Problem) -> bool:
    """Tell whether a plan without levers is taken for one that is a little faster; a target has levers of its own."""
    return problem.plain and problem.levers is None and isinstance(problem.workload, ModelUnits)


def without_levers(problem: Problem, answer: Solution) -> Iterator[Solution]:
    """The answer without offload, recomputation and steps on hosts; it is kept where it fits and is about as fast.

    Without a pipeline it accumulates gradients as every framework does.
    """
    schedule = answer.schedule.without_host_steps()
    others = {op.kind for op in schedule.operations} - {*COMPUTE, Kind.R, Kind.O, Kind.L}
    if others or answer.partition is None or schedule.peers:
        return
    units, cut = problem.units, [len(stage) for stage in answer.partition]
    plain = replace(without_transfers(schedule), fused_recompute=frozenset())
    if plain.devices == 1:
        plain = accumulated(plain)
    if plain == answer.schedule:
        return
    partition = Partition.cut(units, cut)
    costs = units.stage_costs(partition, schedule.placement)
    yield replace(answer, schedule=plain, costs=costs, partition=partition, candidates=(), timeline=None)


class _Answers:
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
        left = None if self._problem.deadline is None else max(self._deadline.left, 1e-3)
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
        if not _prefers_plain(self._problem):
            return fastest
        whole = [each for each in results if each.plain and undivided(each.solution.schedule).stages == 1]
        if whole and whole[0].score <= (1 + ONE_STAGE) * fastest.score:
            return whole[0]
        plain = [each for each in results if each.plain and each.score <= _tolerance(self._problem) * fastest.score]
        if not plain:
            return fastest
        equal = [each for each in plain if each.score <= (1 + NOTABLE) * plain[0].score]
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
        """Keep a planner's answer; yield it if it is the fastest so far."""
        try:
            with changing_news(self._with_best_bound):
                answer = ask()
        except DebubbleError as error:
            self._found.setdefault(name, error)
        except Exception as error:  # others may have an answer: the plan says that this one failed
            self._fail(name, failure(error))
        else:
            yield from self._keep(name, answer)
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
            if isinstance(known, Result) and answer.score > (1 + NOTABLE) * known.score:
                slower = 100 * (float(answer.score) / float(known.score) - 1)
                self.remark(name, f"{slower:.1f}% {WITH_LEVERS}")
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
        self._found[best.planner] = replace(best, solution=replace(best.solution, cut_off=True, remark=INTERRUPTED))

    def remark(self, name: str, remark: str) -> None:
        """Add a remark to a planner's answer."""
        result = self._found[name]
        if isinstance(result, Result):
            said = result.solution.remark
            solution = replace(result.solution, remark=remark if said is None else f"{said}; {remark}")
            self._found[name] = replace(result, solution=solution)

    def remark_robustness(self) -> None:
        """Say how much slower the chosen answer is than the fastest one, if nothing disturbs them."""
        chosen, quickest = self.chosen, self.quickest
        if quickest is not None and chosen.time > (1 + NOTABLE) * quickest.time:
            slower = 100 * (float(chosen.time) / float(quickest.time) - 1)
            self.remark(chosen.planner, f"{slower:.1f}% {OF_ROBUSTNESS}")

    def solution(self) -> Solution:
        """The chosen answer, with a summary of all, its own the first."""
        chosen = self.chosen
        return replace(
            chosen.solution,
            lower_bound=max(result.pipeline_bound for result in self.results),
            candidates=tuple(
                sorted(
                    (_summary(name, answer, self._failures.get(name)) for name, answer in self._found.items()),
                    key=lambda c: (
                        c.planner != chosen.planner,
                        c.step_time is None,
                        c.robustness.expected if c.robustness else c.step_time,
                    ),
                )
            ),
            remark=None,
            cut_off=False,
        )


def _searched(answers: _Answers, names: Sequence[str]) -> Iterator[Solution]:
    """Ask planners that search: `joint`, and then the others side by side."""
    others, problem = list(names), answers.problem()
    if "joint" in names and isinstance(problem.workload, ModelUnits):
        # What `joint` searches at length is the order of the fastest answer.
        find = joint_draft if _drafts(problem) else planners["joint"].solutions
        yield from answers.stream("joint", problem, partial(find, problem))
        others.remove("joint")
        if OF_THE_LIBRARY in others and _skips_library(answers, problem):
            others.remove(OF_THE_LIBRARY)
            answers.leave_out(OF_THE_LIBRARY)
    if answers.results and answers.late:
        answers.cut_off(others)
        return
    yield from _side_by_side(answers, {name: (name, answers.problem()) for name in others})


def _drafts(problem: Problem) -> bool:
    """Tell whether `joint` drafts plans, and the order of the fastest answer is searched at length."""
    return problem.levers is None and problem.effort > LITTLE_EFFORT


def _skips_library(answers: _Answers, problem: Problem) -> bool:
    """Tell whether the schedules of the library would be slower than the answers, or there is no time left for them."""
    if problem.compare or problem.levers is not None or not answers.results:
        return False
    asked = problem.effort <= LITTLE_EFFORT or problem.devices * problem.micro_batches <= SMALL
    return answers.late or (answers.results[0].gap > LIBRARY_GAP and not asked)


def _side_by_side(answers: _Answers, tasks: Mapping[str, Task]) -> Iterator[Solution]:
    """Have tasks answered, in processes of their own where that is worth one."""
    with side_by_side(tasks) as found:
        for name in by_completion(found):
            yield from answers.take(name, partial(_verify, name, tasks[name][1], found[name]))


def _verify(name: str, problem: Problem, answer: TaskAnswer) -> Result:
    solution, seconds = answer.result()
    return verify(name, problem, solution, seconds)


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
