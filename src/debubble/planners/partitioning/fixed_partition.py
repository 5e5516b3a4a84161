"""A problem whose partition is fixed: its stages, what each can recompute, and the answer they make.

It hides from a planner whether the problem gave stage costs, where a stage recomputes or not, or model units, where
every unit has strategies of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from debubble.costs.units import recomputing
from debubble.ir import InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.partitioning.pareto import Choice, Front, front
from debubble.planners.problem import Problem, Solution, cut


@dataclass(frozen=True)
class Stages:
    """One stage per device: `counts` units each, or the problem's fixed stages."""

    problem: Problem
    counts: tuple[int, ...] | None

    @staticmethod
    def even(problem: Problem) -> Stages:
        """The even partition.  Raises InfeasibleError if the problem wants several stages per device."""
        if problem.chunks not in (None, 1):
            raise InfeasibleError("This planner holds one stage per device; ask for one chunk.")
        counts = None if problem.units is None else tuple(even_counts(problem.units, problem.devices))
        return Stages(problem, counts)

    @cached_property
    def costs(self) -> StageCosts:
        """Of the stages, without recomputation."""
        if self.problem.costs is not None:
            return self.problem.costs
        assert self.problem.units is not None
        assert self.counts is not None
        return self.problem.units.stage_costs(cut(self.problem.units, self.counts), Placement.linear(len(self.counts)))

    @cached_property
    def fronts(self) -> tuple[Front, ...]:
        """Per stage, its efficient choices."""
        units = self.problem.units
        if units is None:
            return tuple(_fixed_front(self.costs, s) for s in range(self.costs.stages))
        return tuple(front([units.units[i] for i in self._range(s)]) for s in range(self.costs.stages))

    @cached_property
    def on_demand(self) -> tuple[Choice | None, ...]:
        """Per stage, the least recomputation with which 1F1B fits; None where nothing does."""
        p, m = self.problem.devices, self.problem.micro_batches
        return tuple(front.cheapest(alive=min(p - s, m), budget=self.budget(s)) for s, front in enumerate(self.fronts))

    def named(self, strategy: str) -> tuple[Choice, ...]:
        """Every unit with this strategy, or `none` where it lacks it.

        Raises InfeasibleError if no unit has it: fixed stages know only `none` and `full`.
        """
        units = self.problem.units
        if units is None:
            if strategy not in ("none", "full"):
                raise InfeasibleError(f"Fixed stage costs do not say what '{strategy}' recomputes; give model units.")
            return tuple(_fixed_choice(self.costs, s, strategy) for s in range(self.costs.stages))
        if not any(strategy in unit.strategies for unit in units.units):
            raise InfeasibleError(f"No unit of the model has the recomputation strategy '{strategy}'.")
        assert self.counts is not None
        partition = cut(units, self.counts, strategy=strategy)
        costs = units.stage_costs(partition, Placement.linear(len(self.counts)))
        assert costs.recompute_workspace is not None
        return tuple(
            Choice(
                float(costs.activation_recomputed[s]),
                float(costs.recompute[s]),
                float(costs.recompute_workspace[s]),
                tuple(name for _, name in partition[s]),
            )
            for s in range(costs.stages)
        )

    def budget(self, stage: int) -> float:
        """Bytes that activations may take on a stage's device, if all micro-batches are as long as the longest."""
        limit = self.costs.limit_of(stage)
        longest = max(self.costs.micro_batch_scale or (1,))
        return float("inf") if limit is None else float((limit - self.costs.static_of(stage)) / longest)

    def solution(self, schedule: Schedule, choices: Sequence[Choice]) -> Solution:
        """The schedule on these stages, each recomputing as chosen."""
        if self.problem.units is None:
            fused = frozenset(s for s, choice in enumerate(choices) if choice.strategies != ("none",))
            return Solution(schedule=replace(schedule, fused_recompute=fused), costs=self.costs)
        partition = [list(zip(self._range(s), choice.strategies, strict=True)) for s, choice in enumerate(choices)]
        return Solution(
            schedule=replace(schedule, fused_recompute=recomputing(partition)),
            costs=self.problem.units.stage_costs(partition, schedule.placement),
            partition=partition,
        )

    def _range(self, stage: int) -> range:
        assert self.counts is not None
        begin = sum(self.counts[:stage])
        return range(begin, begin + self.counts[stage])


def _fixed_choice(costs: StageCosts, stage: int, strategy: str) -> Choice:
    if strategy == "none":
        return Choice(float(costs.activation[stage]), 0.0, 0.0, ("none",))
    dropped = costs.dropped(stage)
    workspace = dropped if costs.recompute_workspace is None else min(costs.recompute_workspace[stage], dropped)
    return Choice(float(costs.activation_recomputed[stage]), float(costs.recompute[stage]), float(workspace), ("full",))


def _fixed_front(costs: StageCosts, stage: int) -> Front:
    choices = [_fixed_choice(costs, stage, strategy) for strategy in ("none", "full")]
    menu = tuple((c.strategies[0], c.kept, c.recompute) for c in choices)
    return Front(
        menus=(menu,),
        kept=np.array([c.kept for c in choices]),
        recompute=np.array([c.recompute for c in choices]),
        workspace=np.array([c.workspace for c in choices]),
        counts=np.eye(2, dtype=np.int64),
        columns=((menu, "none"), (menu, "full")),
    )
