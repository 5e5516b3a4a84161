from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Placement
from debubble.planners.partitioning.balance import (
    balanced_by_device,
    balanced_counts,
    balanced_within,
    even_counts,
)
from tests.strategies import model_units


@given(units=model_units(), stages=st.integers(1, 4))
@settings(max_examples=25)
def test_the_balanced_split_is_optimal(units: Units, stages: int) -> None:
    work = [float(u.work) for u in units.units]
    if len(work) < stages:
        return
    counts = balanced_counts(units, stages)
    best = min(
        max(sum(work[a:b]) for a, b in zip((0, *cuts), (*cuts, len(work)), strict=True))
        for cuts in combinations(range(1, len(work)), stages - 1)
    )
    bounds = [sum(counts[:s]) for s in range(stages + 1)]
    assert sum(counts) == len(work)
    assert min(counts) >= 1
    assert max(sum(work[a:b]) for a, b in pairwise(bounds)) == pytest.approx(best)


def test_the_device_of_a_heavy_head_gets_a_light_stage() -> None:
    """Devices can be balanced although stages cannot: the head of 4 shares a device with one unit."""
    work, placement = [1] * 6 + [4], Placement.looped(2, 2)
    assert busiest(work, balanced_by_device(units_of(work), placement), placement) == 5
    assert busiest(work, balanced_counts(units_of(work), 4), placement) == 6


@pytest.mark.parametrize(("limit", "counts"), [(6, None), (5, [2, 4]), (4, None)])
def test_states_move_units_away_only_if_they_do_not_fit(limit: int, counts: list[int] | None) -> None:
    """The embedding has states of 4, the other five units of 1; all have the same work."""
    units = units_of([1] * 6)
    large = replace(units, units=tuple(replace(u, static=4 if i == 0 else 1) for i, u in enumerate(units.units)))
    light = replace(large, units=tuple(replace(u, strategies={"none": Strategy(0)}) for u in large.units))
    assert balanced_within(light, Placement.linear(2), [limit] * 2, micro_batches=4) == counts


def busiest(work: list[int], counts: Sequence[int], placement: Placement) -> int:
    ends = [sum(counts[:s]) for s in range(len(counts) + 1)]
    stages = [sum(work[a:b]) for a, b in pairwise(ends)]
    return max(sum(stages[s] for s in local) for local in placement.stages_of)


def test_the_even_split_gives_embedding_and_head_to_the_ends() -> None:
    units = plain_units(10)
    ends = (replace(units.units[0], type="embedding"), *units.units[1:-1], replace(units.units[-1], type="head"))
    assert even_counts(replace(units, units=ends), 4) == [3, 2, 2, 3]
    assert even_counts(replace(units, units=ends), 3) == [3, 3, 4]


def test_units_without_embedding_and_head_are_split_evenly() -> None:
    assert even_counts(plain_units(8), 4) == [2, 2, 2, 2]
    assert even_counts(plain_units(9), 4) == [2, 2, 2, 3]


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(db.InputError, match="3 model units cannot fill 4 stages"):
        even_counts(plain_units(3), 4)


def units_of(work: Sequence[int]) -> Units:
    unit = plain_units(1).units[0]
    return Units(units=tuple(replace(unit, forward=w, backward_input=w, backward_weight=w) for w in work))


def plain_units(count: int) -> Units:
    unit = Unit(
        type="dense", layer=0, forward=1, backward_input=1, backward_weight=1, static=0,
        strategies={"none": Strategy(1)},
    )  # fmt: skip
    return Units(units=(unit,) * count)
