"""OptPipe's and AdaOffload's plans: activations leave the device while it computes."""

from typing import Any

import pytest

from debubble.ir import Kind
from tests.support.run_cases import (
    LLAMA8,
    assert_reference_equal,
    kinds_of,
    moved_beside_compute,
    on_lanes,
    overlapping,
    plan_for,
    run,
)


@pytest.fixture(scope="module")
def limit(peak_of_1f1b: Any) -> Any:
    return peak_of_1f1b * 3 // 4  # three micro-batches on the first device


@pytest.fixture(scope="module", params=["optpipe", pytest.param("adaoffload", marks=pytest.mark.slow)])
def plan(request: pytest.FixtureRequest, units: Any, limit: Any) -> Any:
    return plan_for(request.param, LLAMA8, units=units, limit=limit, effort=0.2)


def test_the_plans_gradients_are_the_references(plan: Any) -> None:
    assert {Kind.O, Kind.L, Kind.I, Kind.W} <= kinds_of(plan)
    assert_reference_equal(plan)


def test_the_plans_counted_peaks_are_within_the_limit(plan: Any, limit: Any) -> None:
    offloading = {stage for stage, _ in plan.schedule.offloaded}
    for stage, (peak, elsewhere, _) in enumerate(run(plan, steps=1)):
        assert 0.9 * plan.costs.activation[stage] < peak <= limit
        assert (elsewhere > 0) == (stage in offloading)


@pytest.mark.slow
def test_transfers_happen_while_the_device_computes(plan: Any) -> None:
    moved = overlapping(plan)
    assert any("O" in name for name in moved)
    assert any("L" in name for name in moved)
    transfers = {op.name for op in plan.schedule.operations if op.kind in (Kind.O, Kind.L)}
    assert on_lanes(run(plan)[0][2]) == transfers
    assert moved_beside_compute(plan) == {Kind.O, Kind.L}
