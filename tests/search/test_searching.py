import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError, InfeasibleError, Schedule
from debubble.search.annealing.search import search
from debubble.search.bounds import lower_bound
from debubble.search.optimize import optimize
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import simulate
from tests.search.orders import offload_problems, uniform
from tests.strategies import random_schedules, stage_costs


def last(problem: OrderProblem, *, steps: int, seed: int = 0) -> Incumbent:
    *_, best = search(problem, steps=steps, seed=seed)
    return best


@given(data=st.data())
@settings(max_examples=12)
def test_every_incumbent_fits_and_has_the_simulated_time(data: st.DataObject) -> None:
    problem = data.draw(offload_problems(micro_batches=5))
    previous = float("inf")
    for incumbent in search(problem, steps=400):
        timeline = simulate(incumbent.schedule, problem.costs)
        assert timeline.makespan == incumbent.value < previous
        limits = map(problem.costs.limit_of, range(problem.devices))
        assert all(peak <= (limit or 0) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
        assert incumbent.bound <= incumbent.value
        previous = float(incumbent.value)


@given(data=st.data())
@settings(max_examples=50)
def test_no_schedule_beats_the_lower_bound(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules())
    costs = data.draw(stage_costs(stages=schedule.stages, offload=True))
    costs = costs.with_limit(data.draw(st.none() | st.integers(5, 60)))
    try:
        timeline = simulate(schedule, costs)
    except DebubbleError:
        return
    for objective, value in (("makespan", timeline.makespan), ("span", timeline.span)):
        assert lower_bound(OrderProblem.from_schedule(schedule, costs, objective=objective)) <= value  # type: ignore[arg-type]


def test_the_same_seed_and_steps_give_the_same_schedule() -> None:
    problem = uniform(4, 6, offload=20, limit=6)
    answers = [last(problem, steps=6000, seed=seed) for seed in (3, 3, 4)]
    assert answers[0].schedule == answers[1].schedule
    assert answers[0].schedule != answers[2].schedule


@pytest.mark.parametrize(("p", "m", "to", "limit"), [(4, 8, 10, 3), (8, 16, 5, 8)])
def test_local_search_meets_the_bound_on_a_fast_link(p: int, m: int, to: int, limit: int) -> None:
    best = last(uniform(p, m, offload=to, limit=2 * limit), steps=400_000)
    assert best.optimal


def test_no_more_moves_are_made_than_allowed() -> None:
    for steps in (0, 1, 500):
        assert all(incumbent.steps <= steps for incumbent in search(uniform(4, 8, offload=20, limit=6), steps=steps))


def test_a_given_start_is_improved_and_keeps_its_name() -> None:
    problem = uniform(3, 4, offload=10, limit=4)
    start = Schedule.of(
        "mine", problem.placement, 4, [[f"{s}{k}{j}" for j in range(4) for k in "FB"] for s in range(3)]
    )
    first = next(search(problem, starts=[start], steps=10))
    assert first.schedule.name == "mine"
    assert last(problem, steps=3000).value < first.value


def test_recomputation_helps_where_there_is_no_host_link() -> None:
    problem = uniform(4, 8, limit=2)
    without = last(problem, steps=3000)
    problem = OrderProblem(
        placement=problem.placement, micro_batches=8, costs=problem.costs.replace(recompute=2), recompute=True
    )
    best = last(problem, steps=20_000)
    assert best.schedule.explicit_recompute
    assert best.value < without.value


def test_a_problem_that_never_fits_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="its peak would be 2, above its limit of 0"):
        next(search(uniform(2, 2, offload=10, limit=0), steps=1))


def test_optimize_streams_better_values_and_higher_bounds() -> None:
    stream = list(optimize(uniform(2, 4, offload=20, limit=4), effort=8))
    values, bounds = [float(i.value) for i in stream], [float(i.bound) for i in stream]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert stream[-1].optimal
