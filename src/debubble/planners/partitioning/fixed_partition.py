"""Problems with a fixed partition: the stages, their choices of recomputation, and the solutions made of these.

`Stages` is a common interface to fixed stage costs, where a stage recomputes entirely or not at all
(`IndivisibleStages`), and to model units, where every unit has its strategies (`UnitStages`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Placement, Schedule, StageCosts, UnsupportedError
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.pareto import Front, StageRecomputation, front
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution


@dataclass(frozen=True)
class Stages(ABC):
    """One stage per device."""

    problem: Problem

    @staticmethod
    def even(problem: Problem) -> Stages:
        """The fixed stages, or the even partition of the units.

        Raises UnsupportedError if the problem wants several stages per device.
        """
        if problem.chunks not in (None, 1):
            raise UnsupportedError(
                f"This planner holds one stage per device, and --chunks asks for {problem.chunks}: leave it out, or"
                " take another planner, such as auto."
            )
        match problem.workload:
            case FixedStages(costs):
                return IndivisibleStages(problem, costs)
            case ModelUnits(units):
                return UnitStages(problem, units, tuple(even_counts(units, problem.devices)))

    @property
    @abstractmethod
    def costs(self) -> StageCosts:
        """The stages' costs, without recomputation."""

    @property
    @abstractmethod
    def fronts(self) -> tuple[Front, ...]:
        """Per stage, the Pareto front of its choices of recomputation."""

    @abstractmethod
    def knows(self, strategy: str) -> bool:
        """Whether any stage has a recomputation strategy of that name."""

    @abstractmethod
    def named(self, strategy: str) -> tuple[StageRecomputation, ...]:
        """Per stage, the recomputation with this strategy for all units that have it, and `none` for the others.

        Raises InfeasibleError if no unit has it.
        """

    @abstractmethod
    def solution(self, schedule: Schedule, choices: Sequence[StageRecomputation]) -> Solution:
        """The solution with this schedule and these choices of recomputation per stage."""

    @cached_property
    def on_demand(self) -> tuple[StageRecomputation | None, ...]:
        """Per stage, the least recomputation with which 1F1B fits; None if none does."""
        p, m = self.problem.devices, self.problem.micro_batches
        fronts = enumerate(self.fronts)
        return tuple(front.cheapest(in_flight=min(p - s, m), budget=self.budget(s)) for s, front in fronts)

    def budget(self, stage: int) -> float:
        """Bytes for activations on a stage's device, if all micro-batches are as long as the longest."""
        capacity = self.costs.capacity_of(stage)
        longest = max(self.costs.micro_batch_scale or (1,))
        return float("inf") if capacity is None else float(capacity / longest)


@dataclass(frozen=True)
class IndivisibleStages(Stages):
    """The problem's fixed stages, which recompute entirely or not at all."""

    stage_costs: StageCosts

    @property
    def costs(self) -> StageCosts:
        """The problem's stage costs."""
        return self.stage_costs

    @cached_property
    def fronts(self) -> tuple[Front, ...]:
        """Per stage, the front of no and full recomputation."""
        return tuple(self._front(s) for s in range(self.costs.stages))

    def knows(self, strategy: str) -> bool:
        """Whether the strategy is `none` or `full`, the only ones of fixed stages."""
        return strategy in ("none", "full")

    def named(self, strategy: str) -> tuple[StageRecomputation, ...]:
        """Per stage, no (`none`) or full (`full`) recomputation; other strategies raise InfeasibleError."""
        if not self.knows(strategy):
            raise InfeasibleError(f"Fixed stage costs do not say what '{strategy}' recomputes; give model units.")
        return tuple(self._choice(s, strategy) for s in range(self.costs.stages))

    def solution(self, schedule: Schedule, choices: Sequence[StageRecomputation]) -> Solution:
        """The solution with this schedule and these choices of recomputation per stage."""
        fused = frozenset(s for s, choice in enumerate(choices) if choice.strategies != ("none",))
        return Solution(schedule=replace(schedule, fused_recompute=fused), costs=self.costs)

    def _choice(self, stage: int, strategy: str) -> StageRecomputation:
        costs = self.costs
        if strategy == "none":
            return StageRecomputation(float(costs.activation[stage]), 0.0, 0.0, ("none",))
        dropped = costs.dropped_bytes(stage)
        workspace = dropped if costs.recompute_workspace is None else min(costs.recompute_workspace[stage], dropped)
        return StageRecomputation(
            float(costs.activation_recomputed[stage]), float(costs.recompute[stage]), float(workspace), ("full",)
        )

    def _front(self, stage: int) -> Front:
        menu = tuple(self._choice(stage, strategy) for strategy in ("none", "full"))
        return Front.from_counts((menu,), np.eye(2, dtype=np.int64), [(menu, choice) for choice in menu])


@dataclass(frozen=True)
class UnitStages(Stages):
    """A model's units in stages of these lengths."""

    units: Units
    lengths: tuple[int, ...]

    @cached_property
    def costs(self) -> StageCosts:
        """The stages' costs, without recomputation."""
        return self._costs(Partition.cut(self.units, self.lengths))

    @cached_property
    def fronts(self) -> tuple[Front, ...]:
        """Per stage, the Pareto front of its units' strategies."""
        return tuple(front(self.units.units[a:b]) for a, b in self._bounds)

    def knows(self, strategy: str) -> bool:
        """Whether any unit has the strategy."""
        return any(strategy in unit.strategies for unit in self.units.units)

    def named(self, strategy: str) -> tuple[StageRecomputation, ...]:
        """Per stage, the recomputation with this strategy for all units that have it, and `none` for the others."""
        if not self.knows(strategy):
            raise InfeasibleError(f"No unit of the model has the recomputation strategy '{strategy}'.")
        partition = Partition.cut(self.units, self.lengths, strategy=strategy)
        costs = self._costs(partition)
        assert costs.recompute_workspace is not None
        numbers = zip(costs.activation_recomputed, costs.recompute, costs.recompute_workspace, partition, strict=True)
        return tuple(
            StageRecomputation(float(retained), float(time), float(workspace), tuple(name for _, name in stage))
            for retained, time, workspace, stage in numbers
        )

    def solution(self, schedule: Schedule, choices: Sequence[StageRecomputation]) -> Solution:
        """The solution with this schedule and these choices of recomputation per stage."""
        partition = Partition(
            zip(range(a, b), choice.strategies, strict=True)
            for (a, b), choice in zip(self._bounds, choices, strict=True)
        )
        return Solution(
            schedule=replace(schedule, fused_recompute=partition.recomputing),
            costs=self.units.stage_costs(partition, schedule.placement),
            partition=partition,
        )

    def _costs(self, partition: Partition) -> StageCosts:
        return self.units.stage_costs(partition, Placement.linear(len(partition)))

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """Per stage, its first unit and the one after its last."""
        return list(pairwise(accumulate(self.lengths, initial=0)))
