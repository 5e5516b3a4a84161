"""The planners' registry.

A planner is a function from Problem to Solution, or a generator of Solutions, each faster than those before it,
decorated with `@planner`; it raises InfeasibleError, with the reason as its message, if nothing fits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from debubble.argument_types import with_checked_types
from debubble.costs.host_memory import check_host_memory
from debubble.errors import PlannerFailedError
from debubble.ir import CandidateSummary, DebubbleError, InputError, Number, PlannedUnit, Robustness
from debubble.ir.plan_entries import recomputation_of
from debubble.planners.bounds.proven import ORDER_SEARCH, check_states, proven_bound, proven_step_bound
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.progress import Improvement, tell
from debubble.planners.restriction import as_run, with_module_offload
from debubble.registry import PAPERS, Registry, guarding_plugins
from debubble.schedules.registry import check_size
from debubble.simulator import Timeline
from debubble.targets.target import runs_in

SLICED = "seq1f1b"
"""The planner of sliced sequences."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A planner's verified answer: lowered under the memory limit and simulated.

    Attributes:
        planner: The planner's name.
        solution: The planner's answer.
        lower_bound: Lower bound on the step of every plan for the same problem.
        pipeline_bound: Lower bound on the pipeline's time.
        bound_argument: The argument of these bounds, in words.
        solve_seconds: Wall-clock seconds of planning.
        time: Time of the full step: makespan or span, plus gradients and optimizer after it.
        partition: Per stage, its units with their strategies.
        runs_in: Names of the targets that run it unchanged, for plans of a model.
        robustness: The step under disturbances, if the problem is `robust`.
        plain_excess: See `CandidateSummary`.
        robust_excess: See `CandidateSummary`.
    """

    planner: str
    solution: Solution
    lower_bound: Number
    pipeline_bound: Number
    bound_argument: str
    solve_seconds: float
    time: Number
    partition: tuple[tuple[PlannedUnit, ...], ...]
    runs_in: tuple[str, ...] = ()
    robustness: Robustness | None = None
    plain_excess: float | None = None
    robust_excess: float | None = None

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.solution.simulate()

    @property
    def score(self) -> Number:
        """The time by which plans are compared: the step, or its mean under disturbances if the problem is `robust`."""
        return self.time if self.robustness is None else self.robustness.expected

    @property
    def makespan(self) -> Number:
        """Time from the first start to the last end over all devices."""
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """Upper limit on the fraction of the step that a better plan could save."""
        return max(0.0, float((self.time - self.lower_bound) / self.time))

    @property
    def plain(self) -> bool:
        """True without recomputation, offload and CPU optimizer."""
        schedule = self.solution.schedule
        recomputes = any({*unit.strategies} != {"none"} for stage in self.partition for unit in stage)
        return not (recomputes or schedule.explicit_recompute or schedule.offloaded or schedule.host_steps)

    @property
    def summary(self) -> CandidateSummary:
        """The answer as a candidate."""
        return CandidateSummary(
            planner=self.planner,
            status="cut off" if self.solution.cut_off else "found",
            step_time=float(self.time),
            makespan=float(self.timeline.makespan),
            span=float(self.timeline.span),
            lower_bound=float(self.lower_bound),
            gap=self.gap,
            peak_memory=tuple(map(float, self.timeline.peak_memory)),
            schedule=self.solution.schedule.name,
            partition=self.partition,
            recompute=recomputation_of(self.partition),
            solve_seconds=self.solve_seconds,
            remark=self.solution.remark,
            interrupted=self.solution.interrupted,
            plain_excess=self.plain_excess,
            robust_excess=self.robust_excess,
            runs_in=self.runs_in,
            robustness=self.robustness,
        )


Answers = Solution | Iterator[Solution]
"""A planner's answer, or its answers, each faster than those before it."""


@dataclass(frozen=True, kw_only=True)
class HostEstimate:
    """A planner's estimate of steps with CPU optimizer and activation offload, by which degrees are ranked.

    Attributes:
        estimated_step: Estimated seconds of a step; infinite if nothing seems to fit.
        quick_step: Seconds of a step of a quick plan; the second argument is called with the effort spent.  Raises
            InfeasibleError if nothing fits.
    """

    estimated_step: Callable[[Problem], float]
    quick_step: Callable[[Problem, Callable[[float], None]], float]


@dataclass(frozen=True)
class PlannerEntry:
    """A registered planner."""

    name: str
    function: Callable[[Problem], Answers]
    paper: str
    searches: bool
    peers: bool = False
    slices: bool = False
    plain: bool = False
    host_estimate: HostEstimate | None = None

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @with_checked_types()
    def __call__(self, problem: Problem) -> Result:
        """Plan, and verify the answer by simulating it.

        Raises:
            InfeasibleError: If nothing fits.
            InputError: If the planner does not support swapping to peers or slices, or if there are too many
                micro-batches.
            PluginError: If the planner of a plug-in fails.
        """
        start = time.perf_counter()
        solution = self.find(problem)
        return verify(self.name, problem, solution, time.perf_counter() - start)

    def find(self, problem: Problem) -> Solution:
        """The planner's last answer, after Ctrl-C the last one so far.  Raises the same errors as a call."""
        best: Solution | None = None
        try:
            for best in self.solutions(problem):
                tell_improvement(self.name, problem, best)
        except KeyboardInterrupt:
            if best is None:
                raise
            return replace(best, cut_off=True, interrupted=True)
        if best is None:
            raise PlannerFailedError(f"The planner '{self.name}' has no answer and does not say why.")
        return best

    def solutions(self, problem: Problem) -> Iterator[Solution]:
        """The planner's answers as it finds them, each faster than the last.  Raises the same errors as a call."""
        if problem.peers and not self.peers:
            able = " and ".join(sorted(name for name in planners if planners[name].peers))
            raise InputError(f"The planner '{self.name}' cannot swap to peers; {able} can.")
        if problem.slices > 1 and not self.slices:
            raise InputError(f"The planner '{self.name}' does not cut sequences into slices; {SLICED} and auto do.")
        check_size(problem.devices * (problem.chunks or 1), problem.micro_batches)
        check_states(problem)
        with guarding_plugins(self.function, name=f"The planner '{self.name}'"):
            answers = self.function(problem)
            for answer in answers if isinstance(answers, Iterable) else [answers]:
                if not isinstance(answer, Solution):
                    other = "its solution is one" if isinstance(answer, Result) else "a planner answers with one"
                    kind = type(answer).__name__
                    raise InputError(f"The planner '{self.name}' returns no Solution, but {kind}: {other}.")
                yield answer


def tell_improvement(name: str, problem: Problem, solution: Solution) -> None:
    """Report a planner's answer to the progress listener, as the problem's target runs it, if it fits."""
    with suppress(DebubbleError):
        solution = as_run(problem, solution)
        time = problem.step_time(_simulated(problem, solution))
        bound = max(problem.step_bound(solution.lower_bound), proven_step_bound(problem).time)
        gap = max(0.0, float((time - bound) / time))
        tell(Improvement(planner=name, schedule=solution.schedule.name, step_time=float(time), gap=gap))


def _simulated(problem: Problem, solution: Solution) -> Timeline:
    """Simulate an answer; raises HostMemoryError if it exceeds the memory of a host."""
    timeline = solution.simulate()
    if isinstance(problem.workload, ModelUnits) and solution.partition is not None:
        check_host_memory(problem.workload.units, solution.partition, timeline)
    return timeline


def _assert_all_states(problem: Problem, solution: Solution) -> None:
    """Assert that a planner's costs count all states on devices if there is no CPU optimizer."""
    schedule = solution.schedule
    if not isinstance(problem.workload, ModelUnits) or solution.partition is None or schedule.host_steps:
        return
    expected = problem.workload.units.stage_costs(solution.partition, schedule.placement).static
    counted = all(static >= states for static, states in zip(solution.costs.static, expected, strict=True))
    assert counted, f"{schedule.name} counts fewer states than its stages have"


def verify(name: str, problem: Problem, solution: Solution, solve_seconds: float) -> Result:
    """Lower a planner's answer, as the problem's target runs it, under the memory limit, and simulate it.

    Raises OutOfMemoryError if the answer does not fit, HostMemoryError if it exceeds a host's memory, and DeadlockError
    if its operations wait for each other.
    """
    _assert_all_states(problem, solution)
    solution = with_module_offload(problem, as_run(problem, solution))
    timeline = _simulated(problem, solution)
    partition = _planned_units(problem, solution)
    proven = proven_bound(problem)
    bound = max(solution.lower_bound, proven.time)
    of_step = proven_step_bound(problem)
    step_bound = max(problem.step_bound(bound), of_step.time)
    return Result(
        planner=name,
        solution=solution,
        time=problem.step_time(timeline),
        partition=partition,
        runs_in=frameworks_of(problem, solution),
        lower_bound=step_bound,
        pipeline_bound=bound,
        bound_argument=of_step.argument if of_step.time == step_bound else ORDER_SEARCH,
        solve_seconds=solve_seconds,
        robustness=_robustness(problem, solution, timeline),
    )


def _robustness(problem: Problem, solution: Solution, timeline: Timeline) -> Robustness | None:
    if not problem.robust:
        return None
    judged = [c.robustness for c in solution.candidates if c.robustness is not None]
    if judged:
        return judged[0]  # the chosen candidate comes first
    # Imported here as it loads the compiler, which is not needed to list planners.
    from debubble.planners.robustness import robustness

    tail = problem.step_time(timeline) - problem.time_of(timeline)
    return robustness(timeline.program, objective=problem.objective, tail=tail, seed=problem.seed)


def _planned_units(problem: Problem, solution: Solution) -> tuple[tuple[PlannedUnit, ...], ...]:
    """The partition as in a plan; a fixed stage is one unit of type `stage`."""
    if isinstance(problem.workload, ModelUnits):
        assert solution.partition is not None
        return problem.workload.units.planned(solution.partition, solution.deeper)
    schedule = solution.schedule
    recomputing = schedule.fused_recompute | {stage for stage, _ in schedule.explicit_recompute}
    return tuple((PlannedUnit("stage", s, "full" if s in recomputing else "none"),) for s in range(schedule.stages))


def frameworks_of(problem: Problem, solution: Solution) -> tuple[str, ...]:
    """Names of the frameworks that run a solution as it is; empty for abstract costs."""
    if problem.target is not None:
        return (problem.target,)
    if problem.tail is None or solution.partition is None or not isinstance(problem.workload, ModelUnits):
        return ()
    partition = _planned_units(problem, solution)
    return runs_in(solution.schedule, partition, problem.tail.options, problem.tail.model)


ORDER = (
    "chronos", "joint", "auto", "adapipe", "scope", "dapple", "dapple+", "ohp-cmb", "megatron-kwai", "megatron-even",
    "merak", "pipedream", "bpipe", "pipeoffload", "adaoffload", "optpipe", "milp", "obscura", "portfolio", "seq1f1b",
)  # fmt: skip
"""The order in which planners are listed and run; of equally fast answers `auto` takes the first."""

AnswerT = TypeVar("AnswerT", bound=Answers)

planners: Registry[PlannerEntry] = Registry(
    "debubble.planners", kind="planner", folders=(PAPERS, "planner"), order=ORDER
)


def planner(
    name: str,
    *,
    paper: str,
    searches: bool = False,
    peers: bool = False,
    slices: bool = False,
    plain: bool = False,
    host_estimate: HostEstimate | None = None,
) -> Callable[[Callable[[Problem], AnswerT]], Callable[[Problem], AnswerT]]:
    """Register a planner.

    Args:
        name: Its name in `db.planners`.
        paper: Its source.
        searches: Whether it uses the problem's effort; `auto` runs such planners in separate processes if the effort is
            worth it.
        peers: Whether it can swap activations to other devices.
        slices: Whether it plans sliced sequences.
        plain: Whether its answers are 1F1B or interleaved 1F1B without offload, for frameworks with fixed orders.
        host_estimate: Its estimate of steps with host offload, if it has one.
    """

    def register(find: Callable[[Problem], AnswerT]) -> Callable[[Problem], AnswerT]:
        planners.add(name, PlannerEntry(name, find, paper, searches, peers, slices, plain, host_estimate))
        return find

    return register
