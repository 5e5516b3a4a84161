"""The methods of Obscura's evaluation on the fitted models: schedules and costs of each, and Obscura as printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.ir import InfeasibleError, Number, Schedule
from debubble.papers.obscura.configurations import Configuration, FittedConfiguration, candidate, configurations
from debubble.papers.obscura.planner import Counts, SimulatedSolution, adjustments, fastest
from debubble.papers.obscura.schedule import dependency_relaxed, most_migrated, strawman
from debubble.papers.obscura.step_model import identify
from debubble.planners import planners
from debubble.planners.partitioning.fixed_partition import Stages, UnitStages
from debubble.planners.partitioning.pareto import StageRecomputation
from debubble.planners.partitioning.recomputation import in_flight
from debubble.planners.problem import Problem, Solution
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate


def unlimited(solution: Solution) -> Timeline:
    """Simulated as if memory were no matter: the paper estimates what does not fit."""
    return simulate(solution.schedule, solution.costs.with_limit(None))


def on_demand(name: str, *, devices: int, micro_batches: int, stages: int) -> Schedule:
    """A schedule of the family, or 1F1B, whose first `stages` stages recompute."""
    options = {"recomputed_stages" if name == "1f1b" else "adjusted_stages": stages}
    return schedules[name](devices=devices, micro_batches=micro_batches, costs=None, **options)


def strawman_full(problem: Problem) -> Solution:
    """Strawman with full recomputation on the stages that 1F1B overfills."""
    stages = Stages.even(problem)
    none, full = stages.named("none"), stages.named("full")
    adjusted = identify(stages, none)
    schedule = strawman(devices=problem.devices, micro_batches=problem.micro_batches, adjusted_stages=adjusted)
    return stages.solution(schedule, [*full[:adjusted], *none[adjusted:]])


def relaxed_full(problem: Problem) -> Solution:
    """Dependency relaxation alone: the stages that CMB-Identifying adjusts recompute as few whole layers as fit."""
    stages = Stages.even(problem)
    assert isinstance(stages, UnitStages), "the fitted models are units"
    roles = Roles.of(stages)
    schedule = dependency_relaxed(
        devices=problem.devices, micro_batches=problem.micro_batches, adjusted_stages=roles.adjusted
    )
    choices = roles.choices(stages, "full")
    alive = in_flight(schedule)
    fewest = [_fewest_layers(stages, s, alive[s]) for s in range(roles.adjusted)]
    return stages.solution(schedule, [*fewest, *choices[roles.adjusted :]])


def _fewest_layers(stages: UnitStages, stage: int, alive: int) -> StageRecomputation:
    """The first layers of a stage recomputed in full, as few as fit; all of them if none do."""
    first = sum(stages.lengths[:stage])
    owned = stages.units.units[first : first + stages.lengths[stage]]
    layers = sorted({unit.layer for unit in owned if unit.layer is not None})
    full = stages.named("full")[stage]
    for number in range(len(layers)):
        names = tuple("full" if unit.layer in layers[:number] else "none" for unit in owned)
        chosen = [unit.strategies[name] for unit, name in zip(owned, names, strict=True)]
        kept, again = sum(float(s.activation) for s in chosen), sum(float(s.recompute) for s in chosen)
        if alive * kept + full.workspace <= stages.budget(stage):
            return StageRecomputation(kept, again, full.workspace, names)
    return full


@dataclass(frozen=True)
class Roles:
    """The first `adjusted` stages are adjusted; those up to `over` recompute the cheap operators."""

    adjusted: int
    over: int

    @staticmethod
    def of(stages: Stages) -> Roles:
        """The roles by identification with and without the cheap operators."""
        return Roles(identify(stages, stages.named("cmb")), identify(stages, stages.named("none")))

    def choices(self, stages: Stages, strategy: str) -> tuple[StageRecomputation, ...]:
        """The recomputation of each stage, the adjusted ones using `strategy`."""
        none, cheap, chosen = stages.named("none"), stages.named("cmb"), stages.named(strategy)
        return (*chosen[: self.adjusted], *cheap[self.adjusted : self.over], *none[self.over :])


def as_printed(problem: Problem, *, balanced: bool = True) -> Solution:
    """Obscura with the paper's own choices: x = 2(p - k - 1) and one recomputation, MLP, on all adjusted stages.

    lambda_k and beta are searched.  `balanced`: with partition adjustment.
    """
    stages = Stages.even(problem)
    roles = Roles.of(stages)
    migrated = most_migrated(problem.devices, roles.adjusted)
    tried = [c for c in configurations(stages) if (c.adjusted, c.migrated) == (roles.adjusted, migrated)]
    best = fastest(_that_fit(stages, roles, tried))
    assert best is not None, "the fitted models fit"
    if balanced and best.candidate is not None:
        best = _balanced(best, best.candidate, roles)
    return best.solution


def _balanced(best: SimulatedSolution, start: FittedConfiguration, roles: Roles) -> SimulatedSolution:
    """The best partition of Algorithm 1."""
    stages, configuration = start.stages, start.configuration
    assert isinstance(stages, UnitStages), "the fitted models are units"

    def times(counts: Counts) -> list[float] | None:
        moved = replace(stages, lengths=counts)
        if not _that_fit(moved, roles, [configuration]):
            return None
        choices = roles.choices(moved, "mlp")
        return [float(moved.costs.work(s)) + choice.recompute for s, choice in enumerate(choices)]

    trace = adjustments(
        stages.lengths, adjusted=roles.adjusted, micro_batches=stages.problem.micro_batches, times=times
    )
    moved = [c for counts in trace for c in _that_fit(replace(stages, lengths=counts), roles, [configuration])]
    return fastest(moved, best) or best


def _that_fit(stages: Stages, roles: Roles, tried: Sequence[Configuration]) -> list[FittedConfiguration]:
    """The configurations under which every stage fits with the paper's recomputation."""
    choices = roles.choices(stages, "mlp")
    fitting = []
    for configuration in tried:
        alive = configuration.alive(stages.problem.devices, stages.problem.micro_batches)
        if all(alive[s] * c.retained + c.workspace <= stages.budget(s) for s, c in enumerate(choices)):
            fitting.append(candidate(stages, configuration, choices))
    return fitting


def planned(name: str) -> Callable[[Problem], Solution]:
    """The planner of that name."""
    return planners[name].find


def timeline_of(solution: Solution) -> Timeline:
    """Under the limit if it fits, because that fixes when swapping waits; else as if memory were no matter."""
    try:
        return simulate(solution.schedule, solution.costs)
    except InfeasibleError:
        return unlimited(solution)


def fits(given: Problem, build: Callable[[Problem], Solution]) -> bool:
    """Tell whether a method's plan is within the limit."""
    try:
        solution = build(given)
        simulate(solution.schedule, solution.costs)
    except InfeasibleError:
        return False
    return True


def fitting_speed_up(given: Problem, build: Callable[[Problem], Solution]) -> float | None:
    """Speed-up of a method over DAPPLE+ if it fits, or None."""
    solution = build(given)
    try:
        makespan = simulate(solution.schedule, solution.costs).makespan
    except InfeasibleError:
        return None
    return round(float(unlimited(planned("dapple+")(given)).makespan / makespan), 3)


def speed_up(given: Problem, build: Callable[[Problem], Solution]) -> float:
    """Speed-up of a method over DAPPLE+ on the same problem."""
    slow = unlimited(planned("dapple+")(given)).makespan
    return round(float(slow / timeline_of(build(given)).makespan), 3)


def idle_times(timeline: Timeline) -> Iterator[Number]:
    """The idle time of each stage between its first and its last operation."""
    for lane, busy in zip(timeline.compute, timeline.busy, strict=True):
        yield lane[-1].end - lane[0].start - busy
