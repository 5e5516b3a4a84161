from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError
from debubble.planners import planners
from debubble.planners.bounds.proven import proven_bound
from tests.planners.small_problems import best_time, random_problem

MISS_RATIO = 1.01
"""A plan that takes more than this multiple of the optimum counts as a miss."""
EFFORT = 10.0
"""The default effort."""
MAX_RATIO = 1.03
"""No plan takes more than this multiple of the optimum."""


def ratio_to_best(seed: int) -> float:
    """The time of joint's plan over that of the optimum; 1 if neither fits."""
    problem = random_problem(seed, effort=EFFORT)
    try:
        time = float(planners["joint"](problem).time)
    except DebubbleError:
        time = inf
    best = best_time(problem, below=time)
    if best < inf:
        assert proven_bound(problem).time <= best
    return 1.0 if time == best else time / best


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 2**31 - 1))
def test_random_small_problems_are_planned_to_the_optimum(seed: int) -> None:
    assert ratio_to_best(seed) <= MAX_RATIO


@pytest.mark.slow
def test_at_most_three_of_300_small_problems_miss_the_optimum() -> None:
    ratios = [ratio_to_best(seed) for seed in range(1000, 1300)]
    assert sum(ratio > MISS_RATIO for ratio in ratios) <= 3
    assert max(ratios) <= MAX_RATIO


@pytest.mark.parametrize(("seed", "best"), [(1003, 41), (1040, 72)])
def test_plans_with_different_stages_reach_the_optimum(seed: int, best: int) -> None:
    assert planners["joint"](random_problem(seed, effort=0.1)).time <= best


@pytest.mark.parametrize("seed", [1000, 1005])
def test_small_problems_are_planned_to_the_optimum(seed: int) -> None:
    problem = random_problem(seed, effort=0.1)
    time = float(planners["joint"](problem).time)
    assert best_time(problem, below=time + 1) == time
    assert proven_bound(problem).time <= time
