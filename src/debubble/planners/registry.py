"""The planners' registry.

A planner is a function from Problem to Solution, or a generator of Solutions, each faster than those before it,
decorated with `@planner`; it raises InfeasibleError, with the reason as a sentence, if it finds nothing that fits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
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
"""The planner of sequences that are cut into slices."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A planner's answer, verified: lowered under the limit and simulated.

    Attributes:
        planner: The planner's name.
        solution: Its answer.
        lower_bound: Time that no plan's step for the same problem beats.
        pipeline_bound: A lower bound on the pipeline's part of it.
        bound_argument: What these bounds count, in words.
        solve_seconds: Seconds on the clock that the planner took.
        time: Time of the whole step: makespan or span, as the problem says, and gradients and optimizer after it.
        partition: Per stage, its units with their strategies.
        runs_in: Names of the targets that run it as it is, if it is a model's.
        robustness: Its step under disturbances, if the problem asks for plans that stand them.
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
        """The number that plans are compared by: the step, or its mean under disturbances if that was asked for."""
        return self.time if self.robustness is None else self.robustness.expected

    @property
    def makespan(self) -> Number:
        """Time from the first start to the last end over all devices."""
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """Share of that time that a better plan could save at most."""
        return max(0.0, float((self.time - self.lower_bound) / self.time))

    @property
    def plain(self) -> bool:
        """True if it neither recomputes, nor offloads, nor steps on hosts."""
        schedule = self.solution.schedule
        recomputes = any({*unit.strategies} != {"none"} for stage in self.partition for unit in stage)
        return not (recomputes or schedule.explicit_recompute or schedule.offloaded or schedule.host_steps)

    @property
    def summary(self) -> CandidateSummary:
        """The answer's row in the table of candidates."""
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
    """A planner's estimate of a step with optimizer states and activations on hosts, by which degrees are ranked.

    Attributes:
        estimated_step: Seconds that a step may take; infinite if nothing seems to fit.
        quick_step: Seconds of a step of a quick plan; the second argument is called with the effort spent.  Raises
            InfeasibleError if nothing fits.
    """

    estimated_step: Callable[[Problem], float]
    quick_step: Callable[[Problem, Callable[[float], None]], float]


@dataclass(frozen=True)
class PlannerEntry:
    """One published planner, as `planner` registers it."""

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
            InputError: If activations are to go to peers, and the planner cannot do that, or there are more
                micro-batches than can be ordered.
            PluginError: If a planner of another distribution fails.
        """
        start = time.perf_counter()
        solution = self.find(problem)
        return verify(self.name, problem, solution, time.perf_counter() - start)

    def find(self, problem: Problem) -> Solution:
        """The last of the planner's answers; after a Ctrl-C the last that there is.  Raises as a call does."""
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
        """The planner's answers as it finds them, each faster than those before it.  Raises as a call does."""
        if problem.peers and not self.peers:
            able = " and ".join(sorted(name for name in planners if planners[name].peers))
            raise InputError(f"The planner '{self.name}' cannot swap to peers; {able} can.")
        if problem.slices > 1 and not self.slices:
            raise InputError(f"The planner '{self.name}' does not cut sequences into slices; {SLICED} and auto do.")
        check_size(problem.devices * (problem.chunks or 1), problem.micro_batches)
        check_states(problem)
        with guarding_plugins(self.function, what=f"The planner '{self.name}'"):
            answers = self.function(problem)
            if isinstance(answers, Solution):
                yield answers
            else:
                yield from answers


def tell_improvement(name: str, problem: Problem, solution: Solution) -> None:
    """Tell who listens of a planner's answer, as the problem's target runs it, if it fits."""
    with suppress(DebubbleError):
        solution = as_run(problem, solution)
        time = problem.step_time(_simulated(problem, solution))
        bound = max(problem.step_bound(solution.lower_bound), proven_step_bound(problem).time)
        gap = max(0.0, float((time - bound) / time))
        tell(Improvement(planner=name, schedule=solution.schedule.name, step_time=float(time), gap=gap))


def _simulated(problem: Problem, solution: Solution) -> Timeline:
    """Simulate an answer; raises HostMemoryError if it keeps more of a model on a host than there is."""
    timeline = solution.simulate()
    if isinstance(problem.workload, ModelUnits) and solution.partition is not None:
        check_host_memory(problem.workload.units, solution.partition, timeline)
    return timeline


def _assert_all_states(problem: Problem, solution: Solution) -> None:
    """Assert that devices hold all states where no host steps, whatever costs a planner answers with."""
    schedule = solution.schedule
    if not isinstance(problem.workload, ModelUnits) or solution.partition is None or schedule.host_steps:
        return
    whole = problem.workload.units.stage_costs(solution.partition, schedule.placement).static
    pairs = zip(solution.costs.static, whole, strict=True)
    assert all(own >= states for own, states in pairs), f"{schedule.name} counts fewer states than its stages have"


def verify(name: str, problem: Problem, solution: Solution, solve_seconds: float) -> Result:
    """Lower a planner's answer, as the problem's target runs it, under the limit and simulate it.

    Raises OutOfMemoryError if the answer does not fit, InfeasibleError if it keeps more on a host than there is, and
    DeadlockError if its operations wait for each other.
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
        runs_in=_runs_in(problem, solution, partition),
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
        # It is the first of them.
        return judged[0]
    # The evaluator is compiled, which nobody needs who only lists planners.
    from debubble.planners.robustness import robustness

    tail = problem.step_time(timeline) - problem.time_of(timeline)
    return robustness(timeline.program, objective=problem.objective, tail=tail, seed=problem.seed)


def _planned_units(problem: Problem, solution: Solution) -> tuple[tuple[PlannedUnit, ...], ...]:
    """The partition as a plan lists it; a fixed stage is one unit of type `stage`."""
    if isinstance(problem.workload, ModelUnits):
        assert solution.partition is not None
        return problem.workload.units.planned(solution.partition, solution.deeper)
    schedule = solution.schedule
    recomputing = schedule.fused_recompute | {stage for stage, _ in schedule.explicit_recompute}
    return tuple((PlannedUnit("stage", s, "full" if s in recomputing else "none"),) for s in range(schedule.stages))


def _runs_in(problem: Problem, solution: Solution, partition: Sequence[Sequence[PlannedUnit]]) -> tuple[str, ...]:
    if problem.target is not None:
        return (problem.target,)
    if problem.tail is None or solution.partition is None or not isinstance(problem.workload, ModelUnits):
        return ()
    return runs_in(solution.schedule, partition, problem.tail.options, problem.tail.model)


ORDER = (
    "chronos", "joint", "auto", "adapipe", "scope", "dapple", "dapple+", "ohp-cmb", "megatron-kwai", "megatron-even",
    "merak", "pipedream", "bpipe", "pipeoffload", "adaoffload", "optpipe", "milp", "obscura", "portfolio", "seq1f1b",
)  # fmt: skip
"""The order in which planners are listed and asked; of equally fast answers `auto` takes the first."""

FoundT = TypeVar("FoundT", bound=Answers)

planners: Registry[PlannerEntry] = Registry(
    "debubble.planners", what="planner", folders=(PAPERS, "planner"), order=ORDER
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
) -> Callable[[Callable[[Problem], FoundT]], Callable[[Problem], FoundT]]:
    """Register a planner.

    Args:
        name: Its name in `db.planners`.
        paper: Its source.
        searches: Whether it uses the problem's effort; such planners run in processes of their own under `auto`, if
            the effort is worth a process.
        peers: Whether it can keep activations on other devices.
        slices: Whether it plans sequences that are cut into slices.
        plain: Whether its answers are 1F1B or interleaved 1F1B without offload, for frameworks that have orders of
            their own.
        host_estimate: Its estimate of a step with hosts, if it has one.
    """

    def register(find: Callable[[Problem], FoundT]) -> Callable[[Problem], FoundT]:
        planners.add(name, PlannerEntry(name, find, paper, searches, peers, slices, plain, host_estimate))
        return find

    return register
