"""Combinations of Chronos-Pipe, Chronos-Recomp, Chronos-Offload and ZeRO-2 groups, with their schedules and costs."""

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

RATIO_STEPS = 4
"""Steps of a chunk's recomputation ratio rho, which is a multiple of 1 / 4."""
GROUP_SIZES = (1, 2, 4)
"""Micro-batches per group, g, that the search tries."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A ChronosPipe configuration except for its recomputation, which follows from the memory limit.

    Attributes:
        chunks: Stages per device, v.
        lengths: Units per stage; empty for fixed stages.
        group: Micro-batches whose gradients are reduced together, g.
        offloaded_activations: Number of shallow chunks whose activations are offloaded to the host.
        offloaded_states: Number of deep chunks whose optimizer states are offloaded and stepped on the CPU.  The paper
            keeps the first chunk on the device; here all chunks may be offloaded.
    """

    chunks: int
    lengths: tuple[int, ...] = ()
    group: int = 1
    offloaded_activations: int = 0
    offloaded_states: int = 0

    def is_subset_of(self, richer: Combination) -> bool:
        """Tell whether `richer` is this combination with the same or more offloading."""
        same = (self.chunks, self.lengths, self.group) == (richer.chunks, richer.lengths, richer.group)
        no_more_states = self.offloaded_states <= richer.offloaded_states
        return same and no_more_states and self.offloaded_activations <= richer.offloaded_activations


@dataclass(frozen=True)
class ChunkIncrement:
    """One step of recomputation: a further quarter of a chunk's units of one kind uses a strategy that saves more.

    Attributes:
        chunk: Index of the chunk.
        kind: Type and activation bytes of the units; fixed stages have a single kind.
        strategy: Recomputation strategy of these units.
        price: Recompute time per byte saved and per micro-batch in flight, which is lowest for shallow chunks.
    """

    chunk: int
    kind: tuple[str, Number]
    strategy: str
    price: float


class CombinationBuilder(ABC):
    """Enumerates the combinations of a problem and builds their schedules and costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def for_problem(problem: Problem) -> CombinationBuilder:
        """The builder for the problem's workload."""
        match problem.workload:
            case FixedStages(costs):
                return _StagesBuilder(problem, costs)
            case ModelUnits(units):
                return _UnitsBuilder(problem, units)

    def combinations(self) -> list[Combination]:
        """All candidates by estimated step time, then by the number of offloaded chunks."""
        limited = self.problem.memory_limit is not None
        return sorted(
            (
                Combination(chunks=v, lengths=lengths, group=g, offloaded_activations=a, offloaded_states=s)
                for v in self.problem.chunk_choices
                for lengths in self._splits(v)
                for g in GROUP_SIZES
                if g == 1 or (self._reduces_gradients and g <= self.problem.micro_batches)
                for s in range(v + 1 if limited and self._can_offload_states else 1)
                for a in range(2 if limited and self._can_offload_activations else 1)
            ),
            key=lambda c: (self.estimated_time(c), c.offloaded_activations + c.offloaded_states),
        )

    @abstractmethod
    def estimated_time(self, combination: Combination) -> float:
        """Estimated seconds of a step, for ranking; infinite if the estimated memory exceeds the limit."""

    def increments(self, combination: Combination) -> list[ChunkIncrement]:
        """All recomputation steps in order of price, cheapest first."""
        plain = self._periodic(combination, self._stages(combination, ())[0])
        alive = in_flight(plain)[:: self.problem.devices]
        increments = []
        for chunk in range(combination.chunks):
            resident = min(alive[chunk], IN_TRANSIT) if chunk < combination.offloaded_activations else alive[chunk]
            for kind, name, time, saved in self._savings(chunk):
                increments += [ChunkIncrement(chunk, kind, name, float(time / saved) / resident)] * RATIO_STEPS
        # Later strategies of a kind have higher prices than earlier ones, so a stable sort keeps their order.
        return sorted(increments, key=lambda increment: increment.price)

    def build(self, combination: Combination, increments: Sequence[ChunkIncrement], *, micro_batches: int) -> Solution:
        """Build the schedule and costs of a combination with these recomputation steps."""
        costs, partition = self._stages(combination, increments)
        schedule = self._periodic(combination, costs, micro_batches=micro_batches, recompute=self._shares(increments))
        if self._reduces_gradients:
            schedule = reduce_gradients(schedule, group=combination.group)
        if combination.offloaded_activations:
            schedule = offload_activations(schedule, chunks=range(combination.offloaded_activations), costs=costs)
        if combination.offloaded_states:
            schedule = schedule.with_host_steps(self._offloaded_stages(combination))
        return Solution(schedule=schedule, costs=costs, partition=partition)

    def _offloaded_stages(self, combination: Combination) -> frozenset[int]:
        """The stages whose optimizer states are offloaded."""
        placement = Placement.looped(self.problem.devices, combination.chunks)
        return placement.last_chunks(combination.offloaded_states) - self.problem.stepped_on_device(placement)

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

    _reduces_gradients: bool
    """Whether gradients are reduced within the pipeline."""
    _can_offload_states: bool
    """Whether optimizer states can be offloaded."""
    _can_offload_activations: bool
    """Whether activations can be offloaded."""

    @abstractmethod
    def _splits(self, chunks: int) -> list[tuple[int, ...]]:
        """The candidate partitions (units per stage) for a number of chunks."""

    @abstractmethod
    def _savings(self, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
        """(kind, strategy, extra recompute time, extra bytes saved) of each step, starting without recomputation."""

    @abstractmethod
    def _stages(
        self, combination: Combination, increments: Sequence[ChunkIncrement]
    ) -> tuple[StageCosts, Partition | None]:
        """The stages' costs with the increments' strategies, and their partition unless stages are fixed."""

    @abstractmethod
    def _shares(self, increments: Sequence[ChunkIncrement]) -> dict[int, Number]:
        """Chunk -> rho, the fraction of it that R recomputes."""


class _StagesBuilder(CombinationBuilder):
    """Builder for fixed stages: a chunk recomputes a fraction of its stages."""

    _can_offload_states = False

    def __init__(self, problem: Problem, costs: StageCosts) -> None:
        super().__init__(problem)
        self._stage_costs = costs
        self._reduces_gradients = any(costs.gradient_reduce)
        self._can_offload_activations = costs.offload is not None

    def estimated_time(self, combination: Combination) -> float:
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
            shares[increment.chunk] += Fraction(1, RATIO_STEPS)
        return dict(shares)


class _UnitsBuilder(CombinationBuilder):
    """Builder for model units: quarters of a stage's units of a kind recompute."""

    def __init__(self, problem: Problem, units: Units) -> None:
        super().__init__(problem)
        self._reduces_gradients = units.reduces_inside
        self._units = units.with_unsharded_gradients() if self._reduces_gradients else units
        self._can_offload_states = units.hostable
        self._can_offload_activations = units.offload_bandwidth is not None
        self._bounds = PipelineBounds(replace(problem, workload=ModelUnits(self._units)))
        self._estimates: dict[tuple[int, int, int], float] = {}

    def estimated_time(self, combination: Combination) -> float:
        parts = combination.chunks, combination.offloaded_states, combination.offloaded_activations
        if parts not in self._estimates:
            self._estimates[parts] = self._estimate(*parts)
        return self._estimates[parts]

    def _estimate(self, chunks: int, offloaded_states: int, offloaded_activations: int) -> float:
        """The estimate, which does not depend on groups and on the partition."""
        try:
            pipeline = self._bounds.bound(chunks, hosted=offloaded_states, offloaded=offloaded_activations)
        except InfeasibleError:
            return math.inf
        tail, unsummed = self.problem.tail, 0.0 if self._reduces_gradients else 1.0
        return pipeline + (tail.after(unsummed=unsummed, unstepped=1 - offloaded_states / chunks) if tail else 0.0)

    def _splits(self, chunks: int) -> list[tuple[int, ...]]:
        return even_and_balanced(self._units, self.problem.devices * chunks)

    def _savings(self, chunk: int) -> Iterator[tuple[tuple[str, Number], str, Number, Number]]:
        kinds = {_kind(unit): index for index, unit in reversed(list(enumerate(self._units.units)))}
        for kind, index in kinds.items():
            for saving in self._units.units[index].savings():
                yield kind, *saving

    def _stages(self, combination: Combination, increments: Sequence[ChunkIncrement]) -> tuple[StageCosts, Partition]:
        p = self.problem.devices
        quarters: dict[tuple[int, tuple[str, Number], str], int] = defaultdict(int)
        for increment in increments:
            quarters[increment.chunk, increment.kind, increment.strategy] += 1
        stages = [dict(stage) for stage in Partition.cut(self._units, combination.lengths)]
        for (chunk, kind, strategy), count in quarters.items():
            for stage in stages[chunk * p : (chunk + 1) * p]:
                of_kind = [index for index in stage if _kind(self._units.units[index]) == kind]
                for index in of_kind[: -(-len(of_kind) * count // RATIO_STEPS)]:
                    stage[index] = strategy
        partition = Partition(stage.items() for stage in stages)
        placement = Placement.looped(p, combination.chunks)
        return self._units.stage_costs(partition, placement, on_host=self._offloaded_stages(combination)), partition

    def _shares(self, increments: Sequence[ChunkIncrement]) -> dict[int, Number]:
        # The costs of R already cover the chosen units only.
        return dict.fromkeys((increment.chunk for increment in increments), 1)


def _kind(unit: Unit) -> tuple[str, Number]:
    return unit.type, unit.activation
