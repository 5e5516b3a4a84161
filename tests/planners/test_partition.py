from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs.units import Strategy, Unit, Units
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from tests.strategies import model_units


@given(units=model_units(), stages=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
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


def test_the_even_split_gives_embedding_and_head_to_the_ends() -> None:
    units = plain_units(10)
    ends = (replace(units.units[0], type="embedding"), *units.units[1:-1], replace(units.units[-1], type="head"))
    assert even_counts(replace(units, units=ends), 4) == [3, 2, 2, 3]
    assert even_counts(replace(units, units=ends), 3) == [3, 3, 4]


def test_units_without_embedding_and_head_are_split_in_equal_runs() -> None:
    assert even_counts(plain_units(8), 4) == [2, 2, 2, 2]
    assert even_counts(plain_units(9), 4) == [2, 2, 2, 3]


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(db.InputError, match="3 model units cannot fill 4 stages"):
        even_counts(plain_units(3), 4)


def plain_units(count: int) -> Units:
    unit = Unit(
        type="dense", layer=0, forward=1, backward_input=1, backward_weight=1, static=0,
        strategies={"none": Strategy(1)},
    )  # fmt: skip
    return Units(units=(unit,) * count)
