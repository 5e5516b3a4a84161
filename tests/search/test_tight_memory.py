from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.ir import DebubbleError, Kind, Number, Placement, StageCosts
from debubble.schedules import schedules
from debubble.search.bounds import lower_bound
from debubble.search.constructive.initial import initial_schedules
from debubble.search.constructive.zero_bubble import place_weights
from debubble.search.exact.cp_memory import staircase
from debubble.search.exact.tight_memory import improve_tight, with_late_release
from debubble.search.problem import Incumbent, OrderProblem


def problem_of(
    p: int, m: int, limit: int, *, times: tuple[int, int, int, int] = (1, 1, 1, 0), **sizes: Any
) -> OrderProblem:
    forward, backward_input, backward_weight, communication = times
    costs = StageCosts.of(
        stages=p, forward=forward, backward_input=backward_input, backward_weight=backward_weight,
        communication=communication, memory_limit=limit, **sizes,
    )  # fmt: skip
    return OrderProblem(placement=Placement.linear(p), micro_batches=m, costs=costs)


def start(problem: OrderProblem) -> Incumbent:
    values: list[Incumbent] = []
    for schedule in initial_schedules(problem):
        try:
            value = problem.value(schedule)
        except DebubbleError:
            continue
        values.append(Incumbent(schedule=schedule, value=value, bound=lower_bound(problem), source="start"))
    return min(values, key=lambda incumbent: incumbent.value)


@given(
    capacity=st.integers(0, 40), retained=st.integers(1, 8), input_frees=st.integers(0, 8),
    weight_frees=st.integers(0, 8), forwards=st.integers(1, 7),
)  # fmt: skip
def test_the_corners_are_the_minimal_counts_that_fit(
    capacity: int, retained: int, input_frees: int, weight_frees: int, forwards: int
) -> None:
    stairs = staircase(
        capacity=capacity, retained=retained, input_frees=input_frees, weight_frees=weight_frees, forwards=forwards
    )
    for j, corners in enumerate(stairs):
        for a in range(j + 1):
            for b in range(a + 1):
                fits = retained * (j + 1) - input_frees * a - weight_frees * b <= capacity
                assert fits == any(a >= x and b >= y for x, y in corners)
        assert all(x == y or not (x[0] <= y[0] and x[1] <= y[1]) for x in corners for y in corners)


@pytest.mark.parametrize(
    ("limit", "sizes", "optimum"),
    [(2, {"activation": 1, "activation_after_input": 1}, 41), (6, {"activation": 2, "activation_after_input": 1}, 31)],
)
def test_known_optima_are_proven(limit: int, sizes: dict[str, Any], optimum: Number) -> None:
    problem = problem_of(4, 8, limit, **sizes)
    *_, best = improve_tight(problem, start(problem), steps=0)
    assert (best.value, best.bound) == (optimum, optimum)


def test_late_release_changes_nothing_if_w_frees_all_or_none() -> None:
    for remains in (0, 4):
        problem = problem_of(2, 5, 8, activation=4, activation_after_input=remains)
        assert with_late_release(problem) == problem


def test_weights_fill_the_gaps_between_the_same_f_and_i() -> None:
    problem = problem_of(4, 8, 4, activation=1, activation_after_input=1)
    fixed = schedules["1f1b"](devices=4, micro_batches=8).with_split_backwards()
    placed = place_weights(fixed, costs=problem.costs, capacity=[4] * 4)
    assert placed is not None
    assert (problem.value(fixed), problem.value(placed)) == (30, 27)
    passes = [[[op for op in order if op.kind is not Kind.W] for order in s.orders] for s in (fixed, placed)]
    assert passes[0] == passes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "remains"), [(6, 0), (7, 1), (7, 2)])
def test_the_order_of_f_and_i_is_near_its_bound(limit: int, remains: int) -> None:
    problem = problem_of(8, 32, 2 * limit, times=(10, 11, 9, 1), activation=2, activation_after_input=remains)
    complete = partial(place_weights, costs=problem.costs, capacity=[2 * limit] * 8)
    *_, best = improve_tight(problem, start(problem), steps=0, complete=complete)
    assert best.value <= 1.03 * {6: 1122, 7: 1102}[limit]


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem = problem_of(4, 8, 2, times=(10, 11, 9, 1), activation=1, activation_after_input=1)
    first, second = ([i.schedule for i in improve_tight(problem, start(problem), steps=2000)] for _ in range(2))
    assert first[-1] == second[-1]


@pytest.mark.slow
def test_cp_sat_with_rounded_times_improves_the_start() -> None:
    problem = problem_of(8, 32, 4, times=(10, 11, 9, 1), activation=1, activation_after_input=1)
    *_, best = improve_tight(problem, start(problem), steps=0)
    assert (best.source, best.value < start(problem).value) == ("cp-sat", True)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "optimum"), [(4, 151), (5, 127), (6, 109), (7, 106)])
@pytest.mark.parametrize("remains", [1, 2])
def test_32_micro_batches_on_8_stages_are_proven_optimal(limit: int, optimum: int, remains: int) -> None:
    problem = problem_of(8, 32, 2 * limit, activation=2, activation_after_input=remains)
    begun = start(problem)
    *_, best = [begun, *improve_tight(problem, begun, steps=0)]
    assert (best.value, best.bound) == (optimum, optimum)
