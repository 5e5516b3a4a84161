"""What ChronosPipe ALL can choose, and the schedule and costs that each choice makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from debubble.costs.units import Partition, Unit, Units
from debubble.ir import Number, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.recomputation import in_flight, ladder
from debubble.planners.problem import Problem, Solution, cut
from debubble.schedules.chronos.offload import offload_activations, offload_states
from debubble.schedules.chronos.schedule import periodic, reduce_gradients

PARTS = 4
"""A chunk recomputes in quarters: rho is a multiple of 1 / 4."""
GROUPS = (1, 2, 4)
IN_TRANSIT = 2
"""Micro-batches of a chunk on the device while its activations are offloaded."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """ChronosPipe without the amount of recomputation, which follows from the limit."""

    chunks: int
    counts: tuple[int, ...] | None
    """Units per stage; None for fixed stages."""
    group: int = 1
    """Micro-batches whose gradients are reduced together."""
    offloaded: int = 0
    """Shallow chunks whose activations go to the host."""
    hosted: int = 0
    """Deep chunks whose optimizer states and step are the host's."""

    @property
    def means(self) -> int:
        """How many means to save memory it takes."""
        return self.offloaded + self.hosted

    def saves_no_more_than(self, other: Setting) -> bool:
        """Whether `other` is this one with more means to save memory."""
        same = (self.chunks, self.counts, self.group) == (other.chunks, other.counts, other.group)
        return same and self.offloaded <= other.offloaded and self.hosted <= other.hosted


@dataclass(frozen=True)
class Increment:
    """A further quarter of a chunk's units of one kind (or of the fixed chunk) recomputes more."""

    chunk: int
    kind: tuple[str, Number]
    strategy: str
    price: float
    """Recompute time per byte, over how many micro-batches of the chunk are alive: shallow chunks are cheap."""


def settings(problem: Problem) -> list[Setting]:
    """Every setting worth trying, those with fewer means to save memory first."""
    return sorted(_settings(problem), key=lambda setting: setting.means)


def _settings(problem: Problem) -> Iterator[Setting]:
    units, costs = problem.units, problem.costs
    limited = problem.memory_limit is not None
    reduces = _reduces(problem)
    transfers = units.offload_bandwidth is not None if units else costs is not None and costs.offload is not None
    for chunks in problem.chunk_choices:
        for counts in _partitions(units, problem.devices * chunks):
            for group in (g for g in GROUPS if g == 1 or (reduces and g <= problem.micro_batches)):
                for hosted in range(chunks if limited and units and units.hostable else 1):
                    for offloaded in range(2 if limited and transfers else 1):
                        yield Setting(chunks=chunks, counts=counts, group=group, offloaded=offloaded, hosted=hosted)


def increments(problem: Problem, setting: Setting) -> list[Increment]:
    """All that can recompute, in the order in which it should: the least time for the most bytes and the longest."""
    plain = _chronos(problem, setting, problem.costs or _costs(problem, setting, _kept(problem, setting)))
    alive = in_flight(plain)[:: problem.devices]
    found = []
    for chunk in range(setting.chunks):
        held = min(alive[chunk], IN_TRANSIT) if chunk < setting.offloaded else alive[chunk]
        for kind, name, time, saved in _ladders(problem, chunk):
            found += [Increment(chunk, kind, name, float(time / saved) / held)] * PARTS
    # A kind's later steps are dearer than its earlier ones, so a stable sort keeps each ladder's order.
    return sorted(found, key=lambda increment: increment.price)


def build(problem: Problem, setting: Setting, taken: Sequence[Increment], *, micro_batches: int) -> Solution:
    """The schedule and costs of a setting that recomputes what was taken."""
    partition: Partition | None = None
    recompute: dict[int, Number] = {}
    if problem.costs is not None:
        costs = problem.costs
        for increment in taken:
            recompute[increment.chunk] = recompute.get(increment.chunk, 0) + Fraction(1, PARTS)
    else:
        partition = _chosen(problem, setting, taken)
        costs = _costs(problem, setting, partition)
        # R recomputes just the chosen units: that is all that the costs say of it.
        recompute = dict.fromkeys((increment.chunk for increment in taken), 1)
    made = _chronos(problem, setting, costs, micro_batches=micro_batches, recompute=recompute)
    if _reduces(problem):
        made = reduce_gradients(made, group=setting.group)
    if setting.offloaded:
        made = offload_activations(made, chunks=range(setting.offloaded), costs=costs)
    if setting.hosted:
        made = offload_states(made, chunks=range(setting.chunks - setting.hosted, setting.chunks))
    return Solution(schedule=made, costs=costs, partition=partition)


def _chronos(
    problem: Problem,
    setting: Setting,
    costs: StageCosts,
    *,
    micro_batches: int | None = None,
    recompute: dict[int, Number] | None = None,
) -> Schedule:
    return periodic(
        "chronos",
        devices=problem.devices,
        micro_batches=micro_batches or min(problem.micro_batches, 3 * problem.devices * setting.group),
        chunks=setting.chunks,
        costs=costs,
        recompute=recompute,
        group=setting.group,
    )


def _ladders(problem: Problem, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
    """(kind, strategy, extra time, extra bytes saved) of each step from keeping everything on."""
    if problem.units is None:
        costs = problem.costs
        assert costs is not None
        stages = range(chunk * problem.devices, (chunk + 1) * problem.devices)
        saved = sum(costs.dropped(s) for s in stages)
        if saved:
            yield ("stage", 0), "full", sum(costs.recompute[s] for s in stages), saved
        return
    kinds = {_kind(unit): index for index, unit in reversed(list(enumerate(problem.units.units)))}
    for kind, index in kinds.items():
        for name, time, saved in ladder(problem.units, index):
            yield kind, name, time, saved


def _kept(problem: Problem, setting: Setting) -> Partition:
    assert problem.units is not None
    assert setting.counts is not None
    return cut(problem.units, setting.counts)


def _chosen(problem: Problem, setting: Setting, taken: Sequence[Increment]) -> Partition:
    """The partition in which a further quarter of each stage's units of a kind recomputes, per increment."""
    units = problem.units
    assert units is not None
    quarters: dict[tuple[int, tuple[str, Number], str], int] = defaultdict(int)
    for increment in taken:
        quarters[increment.chunk, increment.kind, increment.strategy] += 1
    partition = [dict(stage) for stage in _kept(problem, setting)]
    for (chunk, kind, strategy), count in quarters.items():
        for stage in partition[chunk * problem.devices : (chunk + 1) * problem.devices]:
            mine = [index for index in stage if _kind(units.units[index]) == kind]
            for index in mine[: -(-len(mine) * count // PARTS)]:
                stage[index] = strategy
    return [list(stage.items()) for stage in partition]


def _costs(problem: Problem, setting: Setting, partition: Partition) -> StageCosts:
    assert problem.units is not None
    stages = problem.devices * setting.chunks
    placement = Placement.looped(problem.devices, setting.chunks)
    hosted = range(stages - setting.hosted * problem.devices, stages)
    return problem.units.stage_costs(partition, placement, on_host=hosted)


def _reduces(problem: Problem) -> bool:
    """Whether gradients are summed inside the step."""
    if problem.units is not None:
        return problem.units.reduces_inside
    assert problem.costs is not None
    return any(problem.costs.gradient_reduce)


def _kind(unit: Unit) -> tuple[str, Number]:
    return unit.type, unit.activation


def _partitions(units: Units | None, stages: int) -> Sequence[tuple[int, ...] | None]:
    if units is None:
        return (None,)
    return list(dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))))
