import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError, Kind, Number
from debubble.search.bounds import idle_allowed, lower_bound
from debubble.search.constructive.initial import initial_schedules, offloading_schedules
from debubble.search.problem import OrderProblem
from debubble.simulator import simulate
from tests.search.orders import offload_problems, uniform


def best_of(problem: OrderProblem) -> Number:
    """The makespan of the best initial schedule with offload."""
    return min(
        map(problem.value, (*offloading_schedules(problem), *offloading_schedules(problem, idle=idle_allowed(problem))))
    )


@pytest.mark.parametrize("limit", [10, 16])
def test_an_initial_schedule_meets_the_bound(limit: int) -> None:
    problem = uniform(16, 32, offload=10, limit=2 * limit)
    assert best_of(problem) == lower_bound(problem) == 1125


@pytest.mark.parametrize(("p", "m", "limit", "bound"), [(8, 32, 4, 1054), (8, 16, 3, 594)])
def test_an_initial_schedule_is_four_messages_above_the_bound(p: int, m: int, limit: int, bound: int) -> None:
    problem = uniform(p, m, offload=10, limit=2 * limit)
    assert lower_bound(problem) == bound
    assert best_of(problem) == bound + 4


def test_a_half_duplex_link_reloads_before_it_offloads() -> None:
    problem = uniform(8, 32, offload=10, limit=12, host_link="half-duplex")
    assert best_of(problem) == lower_bound(problem) == 1037


def test_initial_schedules_share_a_link_between_devices() -> None:
    problem = uniform(8, 32, offload=5, limit=8, link_groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert best_of(problem) == 1059
    assert lower_bound(problem) == 1054


def test_a_slow_link_offloads_fewer_activations() -> None:
    def moved(to: int) -> int:
        schedule = min(offloading_schedules(problem := uniform(8, 32, offload=to, limit=8)), key=problem.value)
        return sum(op.kind is Kind.O for order in schedule.orders for op in order)

    assert moved(10) == 224
    assert moved(20) == 183
    assert best_of(uniform(8, 32, offload=20, limit=8)) == 1092


def test_operations_that_take_no_time_have_initial_schedules() -> None:
    problem = uniform(2, 3, offload=1, limit=4, forward=0, backward_input=0, backward_weight=0)
    assert lower_bound(problem) == 3
    assert best_of(problem) == 4


@given(data=st.data())
@settings(max_examples=15)
def test_initial_schedules_are_complete_and_above_the_bound(data: st.DataObject) -> None:
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
