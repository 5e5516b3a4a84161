from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from debubble.costs.unit import HostStates, Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError
from debubble.planners.bounds.quick_plans import PipelineBounds
from debubble.planners.degrees.estimate import quick_bound, quick_step
from debubble.planners.problem import ModelUnits, Problem
from tests.strategies import model_units


def problem(units: Units, *, devices: int, micro_batches: int, chunks: int | None = None) -> Problem:
    return Problem(devices=devices, micro_batches=micro_batches, workload=ModelUnits(units), chunks=chunks)


def equal_units(count: int, *, limit: int | None = None) -> Units:
    """Units with a forward of 1, a backward of 2, and activations of 10 that recompute for 1."""
    unit = Unit(
        type="dense", layer=None, forward=1, backward_input=1, backward_weight=1, static=5,
        strategies={"none": Strategy(10), "full": Strategy(2, 1)},
    )  # fmt: skip
    return Units(units=(unit,) * count, memory_limit=None if limit is None else (limit,))


@given(model_units(max_layers=8, limit=True), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 2, 3, None]))
def test_no_quick_plan_beats_the_quick_bound(
    units: Units, devices: int, micro_batches: int, chunks: int | None
) -> None:
    assume(len(units.units) >= devices * (chunks or 1))
    asked = problem(units, devices=devices, micro_batches=micro_batches, chunks=chunks)
    try:
        bound = quick_bound(asked)
    except DebubbleError:
        with pytest.raises(DebubbleError):
            quick_step(asked)
        return
    with suppress(DebubbleError):
        assert bound <= quick_step(asked)[0]


def test_the_quick_bound_counts_slow_links_between_nodes() -> None:
    units = replace(equal_units(8), communication=10, communication_within_node=1, devices_per_node=2)
    asked, without = (problem(model, devices=4, micro_batches=8, chunks=1) for model in (units, equal_units(8)))
    assert quick_bound(asked) - quick_bound(without) == pytest.approx(2 * (1 + 10 + 1))


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_quick_bound_is_the_time_of_equal_stages(chunks: int) -> None:
    asked = problem(equal_units(16), devices=4, micro_batches=8, chunks=chunks)
    assert quick_bound(asked) == pytest.approx(quick_step(asked)[0])


def test_the_quick_bound_counts_messages() -> None:
    asked = problem(replace(equal_units(8), communication=1), devices=4, micro_batches=8, chunks=1)
    without = problem(equal_units(8), devices=4, micro_batches=8, chunks=1)
    assert quick_bound(asked) - quick_bound(without) == pytest.approx(2 * 3)


def test_the_quick_bound_counts_recomputation_for_memory() -> None:
    # Device 0 of 4 has 4 micro-batches of 4 units, 20 + 160 bytes; a unit that recomputes saves 32 bytes.
    def bound(limit: int) -> float:
        return PipelineBounds(problem(equal_units(16, limit=limit), devices=4, micro_batches=8)).bound(1)

    assert bound(180) == pytest.approx((8 + 3) * 12)
    assert bound(148) == pytest.approx(max((8 + 3) * 12, 8 * (12 + 1) + 3 * 8 - 3 * 4 + 12))


def test_the_quick_bound_refuses_what_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"Device 0 needs .* even if everything recomputes"):
        quick_bound(problem(equal_units(16, limit=50), devices=4, micro_batches=8))


def test_the_quick_bound_counts_restored_activations() -> None:
    # Device 0 of 4 has 4 micro-batches of 4 units that recompute, 20 + 32 bytes, and 8 more for one full activation.
    def fits(limit: int) -> Problem:
        return problem(equal_units(16, limit=limit), devices=4, micro_batches=8, chunks=1)

    assert quick_bound(fits(60)) <= quick_step(fits(60))[0]
    with pytest.raises(InfeasibleError):
        quick_bound(fits(59))


def on_hosts(*, step: float) -> PipelineBounds:
    """Two chunks on each of 4 devices; a host has the states of all units and steps a unit in `step`."""
    unit = replace(equal_units(1).units[0], on_host=HostStates(static=2, gradients=1, parameters=1, step=step))
    units = Units(units=(unit,) * 8, offload_bandwidth=1, memory_limit=(60,))
    return PipelineBounds(problem(units, devices=4, micro_batches=8))


def test_an_estimate_counts_host_steps_that_are_not_hidden() -> None:
    # The last backward of chunk 0 ends 2 x 4 after that of chunk 1, and the first gradients take 1 more.
    assert on_hosts(step=0).bound(2, hosted=1) == on_hosts(step=3).bound(2, hosted=1)
    assert on_hosts(step=27).bound(2, hosted=1) - on_hosts(step=17).bound(2, hosted=1) == pytest.approx(10)
