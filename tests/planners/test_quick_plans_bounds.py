"""The bound of quick plans: never above one, exact where nothing is short, and it knows order and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from debubble.costs.unit import HostStates, Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Kind
from debubble.planners.bounds.quick_plans import PipelineBounds, first_forwards
from debubble.planners.degrees.estimate import quick_bound, quick_step
from debubble.planners.problem import ModelUnits, Problem
from debubble.schedules import schedules
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
def test_no_quick_plan_is_faster(units: Units, devices: int, micro_batches: int, chunks: int | None) -> None:
    assume(len(units.units) >= devices * (chunks or 1))
    asked = problem(units, devices=devices, micro_batches=micro_batches, chunks=chunks)
    try:
        step, _ = quick_step(asked)
    except DebubbleError:
        return
    assert quick_bound(asked) <= step


@given(model_units(max_layers=8, limit=True), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 2, 3]))
def test_what_it_refuses_fits_in_no_quick_plan(units: Units, devices: int, micro_batches: int, chunks: int) -> None:
    assume(len(units.units) >= devices * chunks)
    asked = problem(units, devices=devices, micro_batches=micro_batches, chunks=chunks)
    try:
        quick_bound(asked)
    except DebubbleError:
        with pytest.raises(DebubbleError):
            quick_step(asked)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_quick_bound_is_the_time_of_equal_stages(chunks: int) -> None:
    asked = problem(equal_units(16), devices=4, micro_batches=8, chunks=chunks)
    assert quick_bound(asked) == pytest.approx(quick_step(asked)[0])


def test_the_quick_bound_counts_the_messages_on_the_way_through_the_pipeline() -> None:
    asked = problem(replace(equal_units(8), communication=1), devices=4, micro_batches=8, chunks=1)
    without = problem(equal_units(8), devices=4, micro_batches=8, chunks=1)
    assert quick_bound(asked) - quick_bound(without) == pytest.approx(2 * 3)


def test_the_quick_bound_counts_the_recomputation_that_memory_asks_for() -> None:
    # Device 0 of 4 holds 4 micro-batches of 4 units: 20 + 160 bytes; each unit that recomputes saves 32 of them.
    def bound(limit: int) -> float:
        return PipelineBounds(problem(equal_units(16, limit=limit), devices=4, micro_batches=8)).of(1)

    assert bound(180) == pytest.approx((8 + 3) * 12)
    assert bound(148) == pytest.approx(max((8 + 3) * 12, 8 * (12 + 1) + 3 * 8 - 3 * 4 + 12))


def test_the_quick_bound_refuses_what_does_not_fit_however_much_recomputes() -> None:
    with pytest.raises(InfeasibleError, match=r"Device 0 needs .* even if everything recomputes"):
        quick_bound(problem(equal_units(16, limit=50), devices=4, micro_batches=8))


def test_the_quick_bound_counts_what_the_first_backward_restores() -> None:
    # Device 0 of 4 holds 4 micro-batches of 4 units that recompute, 20 + 32 bytes, and one whole activation, 8 more.
    def fits(limit: int) -> Problem:
        return problem(equal_units(16, limit=limit), devices=4, micro_batches=8, chunks=1)

    assert quick_bound(fits(60)) <= quick_step(fits(60))[0]
    with pytest.raises(InfeasibleError):
        quick_bound(fits(59))


def on_hosts(*, step: float) -> PipelineBounds:
    """Two chunks on each of 4 devices, of units whose states a host takes, and steps in so much time."""
    unit = replace(equal_units(1).units[0], on_host=HostStates(static=2, gradients=1, parameters=1, step=step))
    units = Units(units=(unit,) * 8, offload_bandwidth=1, memory_limit=(60,))
    return PipelineBounds(problem(units, devices=4, micro_batches=8))


def test_an_estimate_with_hosts_counts_the_steps_that_the_backwards_do_not_hide() -> None:
    # The last backward of a device's chunk 0 is 2 x 4 after that of chunk 1, and the first gradients need 1 more.
    assert on_hosts(step=0).of(2, hosted=1) == on_hosts(step=3).of(2, hosted=1)
    assert on_hosts(step=27).of(2, hosted=1) - on_hosts(step=17).of(2, hosted=1) == pytest.approx(10)


def test_an_estimate_with_hosts_needs_no_recomputation_for_the_states_that_they_take() -> None:
    assert on_hosts(step=0).of(2, hosted=2) < on_hosts(step=0).of(2)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_the_first_forwards_are_those_of_the_schedules(devices: int, micro_batches: int, chunks: int) -> None:
    if chunks == 1:
        schedule = schedules["1f1b"](devices=devices, micro_batches=micro_batches)
    else:
        schedule = schedules["interleaved"](devices=devices, micro_batches=micro_batches, chunks=chunks)
    for d, order in enumerate(schedule.orders):
        first = next(i for i, op in enumerate(order) if op.kind is Kind.B)
        counts = [sum(op.stage == d + c * devices for op in order[:first]) for c in range(chunks)]
        assert first_forwards(devices, micro_batches, chunks)[d] == tuple(counts)
