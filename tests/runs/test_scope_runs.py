"""SCOPE's plans: uneven partitions with mixed recomputation."""

from typing import Any

import pytest

from tests.support.run_cases import LLAMA8, assert_reference_equal, plan_for, run


@pytest.fixture(scope="module")
def limit(peak_of_1f1b: Any) -> Any:
    return peak_of_1f1b // 2


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["1f1b", "interleaved"])
def plan(request: pytest.FixtureRequest, units: Any, limit: Any) -> Any:
    return plan_for("scope", LLAMA8, units=units, limit=limit, chunks=request.param)


def test_the_plan_is_uneven_and_mixes_strategies(plan: Any) -> None:
    assert len({len(stage) for stage in plan.partition}) > 1
    assert len({frozenset(unit.type for unit in stage) for stage in plan.partition}) > 1
    assert any(len({unit.strategy for unit in stage}) > 1 for stage in plan.partition)


def test_the_plans_gradients_are_the_references(plan: Any) -> None:
    assert_reference_equal(plan)


def test_the_plans_counted_peaks_are_within_the_limit(plan: Any, limit: Any) -> None:
    for (peak, _, _), predicted in zip(run(plan, steps=1), plan.simulate().peak_memory, strict=True):
        assert 0.8 * predicted < peak <= min(predicted, limit)
