"""The methods of Obscura's evaluation on the fitted models, including Obscura with the paper's own choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.ir import InfeasibleError, Number, Schedule
from debubble.papers.obscura.configurations import Configuration, FittedConfiguration, candidate, configurations
from debubble.papers.obscura.planner import Counts, SimulatedSolution, adjustments, fastest
from debubble.papers.obscura.schedule import dependency_relaxed, max_migrated, strawman
from debubble.papers.obscura.step_model import identify
from debubble.planners import planners
from debubble.planners.partitioning.fixed_partition import Stages, UnitStages
from debubble.planners.partitioning.pareto import StageRecomputation
from debubble.planners.partitioning.recomputation import in_flight
from debubble.planners.problem import Problem, Solution
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate


def simulate_unlimited(solution: Solution) -> Timeline:
    """Simulate without a memory limit, as the paper estimates configurations that run out of memory."""
    return simulate(solution.schedule, solution.costs.with_limit(None))


def on_demand(name: str, *, devices: int, micro_batches: int, stages: int) -> Schedule:
    """One of Obscura's schedules, or 1F1B, whose first `stages` stages recompute."""
    options = {"recomputed_stages" if name == "1f1b" else "adjusted_stages": stages}
    return schedules[name](devices=devices, micro_batches=micro_batches, costs=None, **options)


def strawman_full(problem: Problem) -> Solution:
    """The strawman with full recomputation on the stages that exceed the limit under 1F1B."""
    stages = Stages.even(problem)
    none, full = stages.named("none"), stages.named("full")
    adjusted = identify(stages, none)
    schedule = strawman(devices=problem.devices, micro_batches=problem.micro_batches, adjusted_stages=adjusted)
    return stages.solution(schedule, [*full[:adjusted], *none[adjusted:]])


def relaxed_full(problem: Problem) -> Solution:
    """Dependency relaxation only: the stages that CMB-Identifying adjusts recompute as few full layers as needed."""
    stages = Stages.even(problem)
    assert isinstance(stages, UnitStages), "the fitted models are units"
    roles = Roles.from_stages(stages)
    schedule = dependency_relaxed(
        devices=problem.devices, micro_batches=problem.micro_batches, adjusted_stages=roles.adjusted
    )
    choices = roles.choices(stages, "full")
    alive = in_flight(schedule)
    minimal = [_min_layers(stages, s, alive[s]) for s in range(roles.adjusted)]
    return stages.solution(schedule, [*minimal, *choices[roles.adjusted :]])


def _min_layers(stages: UnitStages, stage: int, alive: int) -> StageRecomputation:
    """Full recomputation of the first layers of a stage, as few as needed to fit; of all layers if nothing fits."""
    first = sum(stages.lengths[:stage])
    stage_units = stages.units.units[first : first + stages.lengths[stage]]
    layers = sorted({unit.layer for unit in stage_units if unit.layer is not None})
    full = stages.named("full")[stage]
    for number in range(len(layers)):
        names = tuple("full" if unit.layer in layers[:number] else "none" for unit in stage_units)
        chosen = [unit.strategies[name] for unit, name in zip(stage_units, names, strict=True)]
        activation, recompute = sum(float(s.activation) for s in chosen), sum(float(s.recompute) for s in chosen)
        if alive * activation + full.workspace <= stages.budget(stage):
            return StageRecomputation(activation, recompute, full.workspace, names)
    return full


@dataclass(frozen=True)
class Roles:
    """Roles of the stages: the first `adjusted` are adjusted, those up to `over` recompute the cheap operators."""

    adjusted: int
    over: int

    @staticmethod
    def from_stages(stages: Stages) -> Roles:
        """The roles by identification with and without CMB-Identifying."""
        return Roles(identify(stages, stages.named("cmb")), identify(stages, stages.named("none")))

    def choices(self, stages: Stages, strategy: str) -> tuple[StageRecomputation, ...]:
        """The recomputation per stage; adjusted stages use `strategy`."""
        none, cheap, chosen = stages.named("none"), stages.named("cmb"), stages.named(strategy)
        return (*chosen[: self.adjusted], *cheap[self.adjusted : self.over], *none[self.over :])


def as_printed(problem: Problem, *, balanced: bool = True) -> Solution:
    """Obscura with the paper's choices: x = 2(p - k - 1), and MLP recomputation on all adjusted stages.

    lambda_k and beta are searched.  `balanced` enables partition adjustment.
    """
    stages = Stages.even(problem)
    roles = Roles.from_stages(stages)
    migrated = max_migrated(problem.devices, roles.adjusted)
    tried = [c for c in configurations(stages) if (c.adjusted, c.migrated) == (roles.adjusted, migrated)]
    best = fastest(_fitting(stages, roles, tried))
    assert best is not None, "the fitted models fit"
    if balanced and best.candidate is not None:
        best = _balanced(best, best.candidate, roles)
    return best.solution


def _balanced(best: SimulatedSolution, start: FittedConfiguration, roles: Roles) -> SimulatedSolution:
    """The best partition of Algorithm 1's trace."""
    stages, configuration = start.stages, start.configuration
    assert isinstance(stages, UnitStages), "the fitted models are units"

    def times(counts: Counts) -> list[float] | None:
        moved = replace(stages, lengths=counts)
        if not _fitting(moved, roles, [configuration]):
            return None
        choices = roles.choices(moved, "mlp")
        return [float(moved.costs.work(s)) + choice.recompute for s, choice in enumerate(choices)]

    trace = adjustments(
        stages.lengths, adjusted=roles.adjusted, micro_batches=stages.problem.micro_batches, times=times
    )
    moved = [c for counts in trace for c in _fitting(replace(stages, lengths=counts), roles, [configuration])]
    return fastest(moved, best) or best


def _fitting(stages: Stages, roles: Roles, tried: Sequence[Configuration]) -> list[FittedConfiguration]:
    """The configurations that fit with the paper's MLP recomputation on adjusted stages."""
    choices = roles.choices(stages, "mlp")
    fitting = []
    for configuration in tried:
        alive = configuration.alive(stages.problem.devices, stages.problem.micro_batches)
        if all(alive[s] * c.retained + c.workspace <= stages.budget(s) for s, c in enumerate(choices)):
            fitting.append(candidate(stages, configuration, choices))
    return fitting


def planned(name: str) -> Callable[[Problem], Solution]:
    """The `find` method of a planner."""
    return planners[name].find


def timeline_of(solution: Solution) -> Timeline:
    """Simulate under the memory limit if it fits, because the limit delays swaps; otherwise without a limit."""
    try:
        return simulate(solution.schedule, solution.costs)
    except InfeasibleError:
        return simulate_unlimited(solution)


def fits(job: Problem, build: Callable[[Problem], Solution]) -> bool:
    """Tell whether a method's plan fits within the memory limit."""
    try:
        solution = build(job)
        simulate(solution.schedule, solution.costs)
    except InfeasibleError:
        return False
    return True


def fitting_speed_up(job: Problem, build: Callable[[Problem], Solution]) -> float | None:
    """Speed-up of a method over DAPPLE+; None if it does not fit."""
    solution = build(job)
    try:
        makespan = simulate(solution.schedule, solution.costs).makespan
    except InfeasibleError:
        return None
    return round(float(simulate_unlimited(planned("dapple+")(job)).makespan / makespan), 3)


def speed_up(job: Problem, build: Callable[[Problem], Solution]) -> float:
    """Speed-up of a method over DAPPLE+ on the same problem."""
    slow = simulate_unlimited(planned("dapple+")(job)).makespan
    return round(float(slow / timeline_of(build(job)).makespan), 3)


def idle_times(timeline: Timeline) -> Iterator[Number]:
    """The idle time of each stage between its first and its last operation."""
    for lane, busy in zip(timeline.compute, timeline.busy, strict=True):
        yield lane[-1].end - lane[0].start - busy
