"""Starts of a search: list schedules that count on the memory of the host, and what of them leaves the device."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError, Kind, Lane, Number, Placement
from debubble.search.bounds import idle_allowed, lower_bound, round_trip
from debubble.search.constructive.initial import initial_schedules, list_schedule, offloading_schedules
from debubble.search.constructive.list_scheduling import GapFilling
from debubble.search.constructive.offload import movable_pairs, offload_to_fit
from debubble.search.problem import OrderProblem
from debubble.simulator import simulate
from tests.search.orders import offload_problems, uniform


def best_of(problem: OrderProblem) -> Number:
    """The best start with offload."""
    return min(
        map(problem.value, (*offloading_schedules(problem), *offloading_schedules(problem, idle=idle_allowed(problem))))
    )


@pytest.mark.parametrize("limit", [10, 12, 16])
def test_a_start_meets_the_bound_where_memory_leaves_a_place_free(limit: int) -> None:
    problem = uniform(16, 32, offload=10, limit=2 * limit)
    assert best_of(problem) == lower_bound(problem) == 1125


@pytest.mark.parametrize(("p", "m", "limit", "bound"), [(16, 32, 3, 1250), (8, 32, 4, 1054), (8, 16, 3, 594)])
def test_a_start_is_two_round_trips_of_a_message_from_the_bound(p: int, m: int, limit: int, bound: int) -> None:
    problem = uniform(p, m, offload=10, limit=2 * limit)
    assert lower_bound(problem) == bound
    assert best_of(problem) == bound + 4


def test_on_a_half_duplex_link_a_reload_goes_before_the_offload_that_would_delay_it() -> None:
    problem = uniform(8, 32, offload=10, limit=12, host_link="half-duplex")
    assert best_of(problem) == lower_bound(problem) == 1037


def test_devices_that_share_a_link_leave_each_other_time() -> None:
    problem = uniform(8, 32, offload=5, limit=8, link_groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert best_of(problem) == 1059
    assert lower_bound(problem) == 1054


def test_over_a_slow_link_only_those_leave_that_it_has_time_for() -> None:
    def moved(to: int) -> int:
        schedule = min(offloading_schedules(problem := uniform(8, 32, offload=to, limit=8)), key=problem.value)
        return sum(op.kind is Kind.O for order in schedule.orders for op in order)

    assert moved(10) == 224
    assert moved(20) == 183
    assert best_of(uniform(8, 32, offload=20, limit=8)) == 1092


def test_what_leaves_never_waits_longer_than_half_a_transfer() -> None:
    problem = uniform(4, 12, offload=25)
    timetable = list_schedule(problem, [None] * 4)
    assert timetable is not None
    moved = offload_to_fit(problem, timetable.orders, eager=movable_pairs(problem, timetable))
    assert moved is not None
    times = {o.op: o for o in simulate(moved, problem.costs).operations}
    offloads = [o for o in times.values() if o.lane is Lane.D2H]
    assert offloads
    assert all(o.start - times[o.op._replace(kind=Kind.F)].end <= Fraction(25, 2) for o in offloads)


def test_a_device_without_time_to_lose_fills_every_gap() -> None:
    problem = uniform(4, 16, limit=8)
    timetable = list_schedule(problem, [16, 14, 10, 8], GapFilling(Fraction(1), (1000, 1000, 1000, 0)))
    assert timetable is not None
    ends, order = timetable.ends[3], timetable.orders[3]
    first = next(at for at, op in enumerate(order) if op.kind is Kind.I)
    assert all(after - before == 10 for before, after in itertools.pairwise(ends[first:]))


def test_the_bottleneck_may_lose_nothing() -> None:
    assert idle_allowed(uniform(4, 16, offload=10, limit=6))[-1] == 0


def test_operations_that_take_no_time_have_starts_too() -> None:
    problem = uniform(2, 3, offload=1, limit=4, forward=0, backward_input=0, backward_weight=0)
    assert lower_bound(problem) == 3
    assert best_of(problem) == 4


def test_a_round_trip_is_the_way_up_and_down() -> None:
    problem = uniform(4, 4)
    assert [round_trip(problem, stage) for stage in range(4)] == [66, 44, 22, 0]


def test_between_chunks_on_one_device_nothing_travels() -> None:
    problem = uniform(4, 4)
    folded = OrderProblem(placement=Placement.v_shape(2), micro_batches=4, costs=problem.costs)
    assert [round_trip(folded, stage) for stage in range(4)] == [64, 42, 22, 0]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_start_that_fits_is_complete_and_no_better_than_the_bound(data: st.DataObject) -> None:
    problem = data.draw(offload_problems(micro_batches=6))
    bound = lower_bound(problem)
    for schedule in initial_schedules(problem):
        forwards = [op for order in schedule.orders for op in order if op.kind is Kind.F]
        assert len(forwards) == len(set(forwards)) == problem.stages * problem.micro_batches
        try:
            timeline = simulate(schedule, problem.costs)
        except DebubbleError:
            continue
        assert float(timeline.makespan) >= float(bound) - 1e-9
