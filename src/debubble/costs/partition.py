"""A partition: which units form each stage, and how each recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, count, pairwise
from typing import Self

from debubble.costs.units import Units
from debubble.ir import InputError
from debubble.ir.plan_entries import PlannedUnit


class Partition(tuple[tuple[tuple[int, str], ...], ...]):
    """The units of each stage with their strategies of recomputation: per stage (index, strategy), in model order.

    Args:
        stages: For every stage, its units as (index in the model, name of its strategy).
    """

    def __new__(cls, stages: Iterable[Iterable[tuple[int, str]]]) -> Self:
        """Build the partition from its stages."""
        return super().__new__(cls, map(tuple, stages))

    @classmethod
    def cut(cls, units: Units, lengths: Iterable[int], *, strategy: str = "none") -> Self:
        """Cut the model into stages of these numbers of units, all with one strategy (`none` for units without it).

        Raises InputError if the lengths do not add up to the model's units.
        """
        strategies = [strategy if strategy in unit.strategies else "none" for unit in units.units]
        ends = list(accumulate(lengths, initial=0))
        _check_count(ends[-1], units)
        return cls([(i, strategies[i]) for i in range(begin, end)] for begin, end in pairwise(ends))

    @classmethod
    def cut_layers(cls, units: Units, lengths: Iterable[int], *, strategy: str) -> Self:
        """Cut the model as `cut` does, but only layers have the strategy, as in frameworks, and not the head."""
        stages = cls.cut(units, lengths, strategy=strategy)
        return cls([(i, "none" if units.units[i].layer is None else name) for i, name in stage] for stage in stages)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Units per stage."""
        return tuple(map(len, self))

    @property
    def recomputing(self) -> frozenset[int]:
        """The stages where some unit recomputes."""
        return frozenset(s for s, stage in enumerate(self) if any(strategy != "none" for _, strategy in stage))


def partition_named(stages: Sequence[Sequence[PlannedUnit]], units: Units) -> Partition:
    """The partition of the units that a plan lists, stage by stage in model order.

    Raises InputError if the plan lists another number of units than the model has.
    """
    _check_count(sum(map(len, stages)), units)
    index = count()
    return Partition(
        [(i, units.units[i].strategy_named(unit.strategy) or "none") for unit, i in zip(stage, index, strict=False)]
        for stage in stages
    )


def _check_count(listed: int, units: Units) -> None:
    if listed != len(units.units):
        raise InputError(f"The plan's stages have {listed} units, but its model has {len(units.units)}: plan again.")
