"""Periodic patterns: what they repeat, and that several micro-batches a period pay where the link is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.ir import Kind, Placement, StageCosts
from debubble.solver.growing import _Seedling
from debubble.solver.patterns import Pattern, _Model, patterns, unrolled
from debubble.solver.problem import OrderProblem


def problem_of(micro_batches: int = 24, *, offload: int = 35, limit: int = 6) -> OrderProblem:
    costs = StageCosts.of(
        stages=4,
        forward=10,
        backward_input=10,
        backward_weight=10,
        activation=2,
        activation_after_input=1,
        communication=1,
        offload=offload,
        memory_limit=limit,
    )
    return OrderProblem(placement=Placement.linear(4), micro_batches=micro_batches, costs=costs, offload=True)


@pytest.fixture(scope="module")
def pattern() -> Pattern:
    """Three micro-batches in 105."""
    found = _Model(problem_of(), 105 / 90, step=3).solve(60, 0)
    assert found is not None
    return found


def test_micro_batches_of_a_period_may_do_different_things(pattern: Pattern) -> None:
    away = [sum(op.kind is Kind.O and op.stage == s for op in pattern.moments) for s in range(4)]
    assert any(0 < count < 3 for count in away)
    assert (pattern.step, pattern.time) == (3, 35)


def test_three_micro_batches_fit_where_each_alone_needs_longer() -> None:
    problem = problem_of(offload=40)
    assert _Model(problem, 36 / 30).solve(60, 0) is None
    together = _Model(problem, 106 / 90, step=3).solve(60, 0)
    assert together is not None
    assert together.time < 36


def test_unrolled_a_period_more_takes_a_period_longer(pattern: Pattern) -> None:
    values = [problem.value(unrolled(problem, pattern)) for problem in map(problem_of, (24, 27, 30))]
    assert values[1] - values[0] == values[2] - values[1] == 105


def test_a_seedling_repeats_whole_periods(pattern: Pattern) -> None:
    problem = problem_of(61)
    seedling = _Seedling.of(problem, pattern)
    assert (problem.micro_batches - seedling.small.micro_batches) % 3 == 0
    searched = seedling.searched(1.0, seed=0, workers=1)
    more = replace(problem, micro_batches=64)
    assert more.value(searched.grown(more)) - problem.value(searched.grown(problem)) == 105


def test_patterns_take_the_faster_of_one_and_several_micro_batches() -> None:
    problem = problem_of()
    one = next(pattern for stretch in (1.35, 1.6) if (pattern := _Model(problem, stretch).solve(5, 0)) is not None)
    best = next(patterns(problem, 1, seconds=20))
    assert best.time < one.time
