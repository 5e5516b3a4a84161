"""A plan whose stages end at layers' edges: what other frameworks can partition by.

debubble's units are half-layers.  Where a stage ends within a layer, the layer moves as a whole to one of the two
stages, for all such layers to the earlier or for all to the later, whichever is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from debubble.costs.units import Partition
from debubble.exports.prices import fits, partition_of, seconds, slowdown, units_of, with_partition
from debubble.ir import Plan, PlannedUnit


def to_whole_layers(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with its layers whole, and what that costs.

    The same plan if they are whole already, if none of the two ways fits in memory, or if its costs are not those of
    model units, which are all that the new stages could be judged by.
    """
    split = split_stages(plan.partition)
    units = units_of(plan) if split else None
    if units is None:
        return plan, ()
    moved = [with_partition(plan, units, _moved(partition_of(plan, units), split, to)) for to in (_earlier, _later)]
    fitting = [candidate for candidate in moved if fits(candidate)]
    if not fitting:
        return plan, ()
    best = min(fitting, key=seconds)
    count = f"{len(split)} stages end" if len(split) > 1 else "One stage ends"
    return best, (f"{count} within a layer; with whole layers {slowdown(best, plan)}.",)


def split_stages(partition: Sequence[Sequence[PlannedUnit]]) -> list[int]:
    """The stages that end with the attention half of a layer."""
    return [s for s, units in enumerate(partition[:-1]) if units and units[-1].type == "attention"]


def _earlier(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    before.append(after.pop(0))


def _later(before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    after.insert(0, before.pop())


def _moved(
    partition: Partition, split: Sequence[int], to: Callable[[list[tuple[int, str]], list[tuple[int, str]]], None]
) -> Partition:
    stages = [list(stage) for stage in partition]
    for stage in split:
        to(stages[stage], stages[stage + 1])
    return Partition(stages)
