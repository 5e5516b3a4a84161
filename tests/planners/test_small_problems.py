from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError
from debubble.planners import planners
from debubble.planners.bounds.proven import proven_bound
from tests.planners.small_problems import best_time, random_problem

SLOWER = 1.01
"""A plan that takes more times the best one's time counts as missed."""
EFFORT = 10.0
"""That of a call that gives none."""
MOST = 1.03
"""No plan takes more."""


def ratio_to_best(seed: int) -> float:
    """How many times the best plan's time the found plan takes; 1 where neither finds one."""
    problem = random_problem(seed, effort=EFFORT)
    try:
        found = float(planners["joint"](problem).time)
    except DebubbleError:
        found = inf
    best = best_time(problem, below=found)
    if best < inf:
        assert proven_bound(problem).time <= best
    return 1.0 if found == best else found / best


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 2**31 - 1))
def test_fresh_small_problems_are_planned_to_the_optimum(seed: int) -> None:
    assert ratio_to_best(seed) <= MOST


@pytest.mark.slow
def test_at_most_three_of_300_small_problems_miss_the_optimum() -> None:
    ratios = [ratio_to_best(seed) for seed in range(1000, 1300)]
    assert sum(ratio > SLOWER for ratio in ratios) <= 3
    assert max(ratios) <= MOST


@pytest.mark.parametrize(("seed", "best"), [(1003, 41), (1040, 72)])
def test_plans_with_unlike_stages_recompute_and_offload(seed: int, best: int) -> None:
    assert planners["joint"](random_problem(seed, effort=0.1)).time <= best


@pytest.mark.parametrize("seed", [1000, 1005])
def test_small_problems_are_planned_to_the_optimum(seed: int) -> None:
    problem = random_problem(seed, effort=0.1)
    found = float(planners["joint"](problem).time)
    assert best_time(problem, below=found + 1) == found
    assert proven_bound(problem).time <= found
