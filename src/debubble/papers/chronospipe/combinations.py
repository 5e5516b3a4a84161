"""The combinations of ChronosPipe's parts, and the schedule and costs that each of them makes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from debubble.costs.partition import Partition
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Number, Placement, Schedule, StageCosts
from debubble.papers.chronospipe.offload import offload_activations
from debubble.papers.chronospipe.schedule import periodic, reduce_gradients
from debubble.planners.bounds.quick_plans import IN_TRANSIT, PipelineBounds
from debubble.planners.partitioning.balance import even_and_balanced
from debubble.planners.partitioning.recomputation import in_flight
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution

PARTS = 4
"""A chunk recomputes in quarters: rho is a multiple of 1 / 4."""
GROUPS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """ChronosPipe without the amount of recomputation, which follows from the limit.

    Attributes:
        chunks: Stages per device.
        lengths: Units per stage; none for fixed stages.
        group: Micro-batches whose gradients are reduced together.
        offloaded: Shallow chunks whose activations go to the host.
        hosted: Deep chunks whose optimizer states and step are the host's.  The paper leaves the first one on the
            device; all of them are tried, too.
    """

    chunks: int
    lengths: tuple[int, ...] = ()
    group: int = 1
    offloaded: int = 0
    hosted: int = 0

    def saves_no_more_than(self, richer: Combination) -> bool:
        """Tell whether `richer` is this one with more means to save memory."""
        same = (self.chunks, self.lengths, self.group) == (richer.chunks, richer.lengths, richer.group)
        return same and self.offloaded <= richer.offloaded and self.hosted <= richer.hosted


@dataclass(frozen=True)
class ChunkIncrement:
    """A further quarter of a chunk's units of one kind (or of the fixed chunk) recomputes more.

    Attributes:
        chunk: The chunk.
        kind: Type and size of the units.
        strategy: What they then recompute.
        price: Recompute time per byte, over how many micro-batches of the chunk are alive: shallow chunks are cheap.
    """

    chunk: int
    kind: tuple[str, Number]
    strategy: str
    price: float


class CombinationBuilder(ABC):
    """Builds the schedule and costs of the combinations that a problem allows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def of(problem: Problem) -> CombinationBuilder:
        """The builder for the problem's workload."""
        match problem.workload:
            case FixedStages(costs):
                return _StagesBuilder(problem, costs)
            case ModelUnits(units):
                return _UnitsBuilder(problem, units)

    def combinations(self) -> list[Combination]:
        """Every combination worth trying, those that promise most first, of these the simplest."""
        limited = self.problem.memory_limit is not None
        return sorted(
            (
                Combination(chunks=chunks, lengths=lengths, group=group, offloaded=offloaded, hosted=hosted)
                for chunks in self.problem.chunk_choices
                for lengths in self._splits(chunks)
                for group in GROUPS
                if group == 1 or (self._reduces and group <= self.problem.micro_batches)
                for hosted in range(chunks + 1 if limited and self._hostable else 1)
                for offloaded in range(2 if limited and self._offloads else 1)
            ),
            key=lambda each: (self.promise(each), each.offloaded + each.hosted),
        )

    @abstractmethod
    def promise(self, combination: Combination) -> float:
        """Seconds that a step may take, to compare combinations by; infinite if its memory seems not to suffice."""

    def increments(self, combination: Combination) -> list[ChunkIncrement]:
        """All that can recompute, first what takes the least time per byte and time that the byte lives."""
        plain = self._periodic(combination, self._stages(combination, ())[0])
        alive = in_flight(plain)[:: self.problem.devices]
        increments = []
        for chunk in range(combination.chunks):
            resident = min(alive[chunk], IN_TRANSIT) if chunk < combination.offloaded else alive[chunk]
            for kind, name, time, saved in self._savings(chunk):
                increments += [ChunkIncrement(chunk, kind, name, float(time / saved) / resident)] * PARTS
        # A kind's later steps are dearer than its earlier ones, so a stable sort keeps their order.
        return sorted(increments, key=lambda increment: increment.price)

    def build(self, combination: Combination, increments: Sequence[ChunkIncrement], *, micro_batches: int) -> Solution:
        """The schedule, of so many micro-batches, and costs of a combination that recomputes these increments."""
        costs, partition = self._stages(combination, increments)
        schedule = self._periodic(combination, costs, micro_batches=micro_batches, recompute=self._shares(increments))
        if self._reduces:
            schedule = reduce_gradients(schedule, group=combination.group)
        if combination.offloaded:
            schedule = offload_activations(schedule, chunks=range(combination.offloaded), costs=costs)
        if combination.hosted:
            schedule = schedule.with_host_steps(self._hosted(combination))
        return Solution(schedule=schedule, costs=costs, partition=partition)

    def _hosted(self, combination: Combination) -> frozenset[int]:
        """The stages of the deepest chunks whose optimizers hosts step."""
        placement = Placement.looped(self.problem.devices, combination.chunks)
        return placement.last_chunks(combination.hosted) - self.problem.stepped_on_device(placement)

    def _periodic(
        self,
        combination: Combination,
        costs: StageCosts,
        *,
        micro_batches: int | None = None,
        recompute: dict[int, Number] | None = None,
    ) -> Schedule:
        short = min(self.problem.micro_batches, 3 * self.problem.devices * combination.group)
        return periodic(
            "chronos",
            devices=self.problem.devices,
            micro_batches=micro_batches or short,
            chunks=combination.chunks,
            costs=costs,
            recompute=recompute,
            group=combination.group,
        )

    _reduces: bool
    """True if gradients are summed inside the step."""
    _hostable: bool
    """True if optimizer states can be the host's."""
    _offloads: bool
    """True if activations can go to the host."""

    @abstractmethod
    def _splits(self, chunks: int) -> list[tuple[int, ...]]:
        """The units per stage that are tried with so many chunks."""

    @abstractmethod
    def _savings(self, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
        """(kind, strategy, extra time, extra bytes saved) of each step from keeping everything on."""

    @abstractmethod
    def _stages(
        self, combination: Combination, increments: Sequence[ChunkIncrement]
    ) -> tuple[StageCosts, Partition | None]:
        """The costs of the stages with the increments' strategies, and their partition, if that is open."""

    @abstractmethod
    def _shares(self, increments: Sequence[ChunkIncrement]) -> dict[int, Number]:
        """The share of each chunk that its R recomputes."""


class _StagesBuilder(CombinationBuilder):
    """Fixed stages: a chunk recomputes a share of all that its stages can."""

    _hostable = False

    def __init__(self, problem: Problem, costs: StageCosts) -> None:
        super().__init__(problem)
        self._stage_costs = costs
        self._reduces = any(costs.gradient_reduce)
        self._offloads = costs.offload is not None

    def promise(self, combination: Combination) -> float:
        return 0.0

    def _splits(self, chunks: int) -> list[tuple[int, ...]]:
        return [()]

    def _savings(self, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
        costs, p = self._stage_costs, self.problem.devices
        stages = range(chunk * p, (chunk + 1) * p)
        saved = sum(costs.dropped_bytes(s) for s in stages)
        if saved:
            yield ("stage", 0), "full", sum(costs.recompute[s] for s in stages), saved

    def _stages(self, combination: Combination, increments: Sequence[ChunkIncrement]) -> tuple[StageCosts, None]:
        return self._stage_costs, None

    def _shares(self, increments: Sequence[ChunkIncrement]) -> dict[int, Number]:
        shares: dict[int, Number] = defaultdict(int)
        for increment in increments:
            shares[increment.chunk] += Fraction(1, PARTS)
        return dict(shares)


class _UnitsBuilder(CombinationBuilder):
    """Model units: of each kind, quarters of a stage's units recompute."""

    def __init__(self, problem: Problem, units: Units) -> None:
        super().__init__(problem)
        self._reduces = units.reduces_inside
        self._units = units.with_unsharded_gradients() if self._reduces else units
        self._hostable = units.hostable
        self._offloads = units.offload_bandwidth is not None
        self._bounds = PipelineBounds(replace(problem, workload=ModelUnits(self._units)))
        self._promises: dict[tuple[int, int, int], float] = {}

    def promise(self, combination: Combination) -> float:
        parts = combination.chunks, combination.hosted, combination.offloaded
        if parts not in self._promises:
            self._promises[parts] = self._seconds(*parts)
        return self._promises[parts]

    def _seconds(self, chunks: int, hosted: int, offloaded: int) -> float:
        """The promise, which groups and the cut into stages leave as it is."""
        try:
            pipeline = self._bounds.bound(chunks, hosted=hosted, offloaded=offloaded)
        except InfeasibleError:
            return math.inf
        tail, unsummed = self.problem.tail, 0.0 if self._reduces else 1.0
        return pipeline + (tail.after(unsummed=unsummed, unstepped=1 - hosted / chunks) if tail else 0.0)

    def _splits(self, chunks: int) -> list[tuple[int, ...]]:
        return even_and_balanced(self._units, self.problem.devices * chunks)

    def _savings(self, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
        kinds = {_kind(unit): index for index, unit in reversed(list(enumerate(self._units.units)))}
        for kind, index in kinds.items():
            for saving in self._units.units[index].savings():
                yield kind, *saving

    def _stages(self, combination: Combination, increments: Sequence[ChunkIncrement]) -> tuple[StageCosts, Partition]:
        """A further quarter of each stage's units of a kind recomputes, per increment."""
        p = self.problem.devices
        quarters: dict[tuple[int, tuple[str, Number], str], int] = defaultdict(int)
        for increment in increments:
            quarters[increment.chunk, increment.kind, increment.strategy] += 1
        stages = [dict(stage) for stage in Partition.cut(self._units, combination.lengths)]
        for (chunk, kind, strategy), count in quarters.items():
            for stage in stages[chunk * p : (chunk + 1) * p]:
                of_kind = [index for index in stage if _kind(self._units.units[index]) == kind]
                for index in of_kind[: -(-len(of_kind) * count // PARTS)]:
                    stage[index] = strategy
        partition = Partition(stage.items() for stage in stages)
        placement = Placement.looped(p, combination.chunks)
        return self._units.stage_costs(partition, placement, on_host=self._hosted(combination)), partition

    def _shares(self, increments: Sequence[ChunkIncrement]) -> dict[int, Number]:
        # R recomputes just the chosen units: that is all that the costs say of it.
        return dict.fromkeys((increment.chunk for increment in increments), 1)


def _kind(unit: Unit) -> tuple[str, Number]:
    return unit.type, unit.activation
