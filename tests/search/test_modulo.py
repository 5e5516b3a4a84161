"""Periodic patterns: what they repeat, and that several micro-batches a period pay where the link is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.ir import Kind, Placement
from debubble.search.effort import Effort
from debubble.search.periodic.modulo import (
    ModuloModel,
    Pattern,
    StageTimes,
    find_pattern_of_chunks,
    find_patterns,
    unroll,
)
from debubble.search.periodic.repetition import PeriodicCore
from debubble.search.problem import OrderProblem
from debubble.simulator import simulate
from tests.search.orders import uniform


def _model(problem: OrderProblem, period: int, *, step: int = 1) -> ModuloModel:
    return ModuloModel(problem, StageTimes.of(problem), period, step=step)


@pytest.fixture(scope="module")
def pattern() -> Pattern:
    """Three micro-batches in 105."""
    found = _model(uniform(4, 24, offload=35, limit=6), 105, step=3).solve(Effort(60), 0)
    assert found is not None
    return found


def test_micro_batches_of_a_period_may_do_different_things(pattern: Pattern) -> None:
    away = [sum(op.kind is Kind.O and op.stage == s for op in pattern.moments) for s in range(4)]
    assert any(0 < count < 3 for count in away)
    assert (pattern.step, pattern.time) == (3, 35)


def test_three_micro_batches_fit_where_each_alone_needs_longer() -> None:
    problem = uniform(4, 24, offload=40, limit=6)
    assert _model(problem, 36).solve(Effort(60), 0) is None
    together = _model(problem, 106, step=3).solve(Effort(60), 0)
    assert together is not None
    assert together.time < 36


def test_unrolled_a_period_more_takes_a_period_longer(pattern: Pattern) -> None:
    problems = [uniform(4, m, offload=35, limit=6) for m in (24, 27, 30)]
    values = [problem.value(unroll(problem, pattern)) for problem in problems]
    assert values[1] - values[0] == values[2] - values[1] == 105


def test_a_core_repeats_whole_periods(pattern: Pattern) -> None:
    problem = uniform(4, 61, offload=35, limit=6)
    core = PeriodicCore.of(problem, pattern)
    assert (problem.micro_batches - core.small.micro_batches) % 3 == 0
    improved = core.improve(Effort(1.0), seed=0, workers=1)
    more = replace(problem, micro_batches=64)
    assert more.value(improved.extend(more)) - problem.value(improved.extend(problem)) == 105


def test_patterns_take_the_faster_of_one_and_several_micro_batches() -> None:
    problem = uniform(4, 24, offload=35, limit=6)
    one = next(pattern for period in (41, 48) if (pattern := _model(problem, period).solve(Effort(5), 0)) is not None)
    best = next(find_patterns(problem, 1, effort=Effort(20)))
    assert best.time < one.time


def two_chunks(m: int, *, limit: int, communication: int = 0) -> OrderProblem:
    """A V on four devices, where 1F1B holds activations of 16."""
    alike = uniform(8, m, limit=limit, communication=communication, offload=None)
    return replace(alike, placement=Placement.v_shape(4))


def test_a_pattern_of_a_v_has_no_idle_time_with_half_of_1f1bs_memory() -> None:
    problems = [two_chunks(m, limit=12) for m in (16, 17, 18)]
    pattern = find_pattern_of_chunks(problems[0], effort=Effort(20))
    assert pattern is not None
    values = [problem.value(unroll(problem, pattern)) for problem in problems]
    assert values[1] - values[0] == values[2] - values[1] == 60


@pytest.mark.parametrize("times", [(10, 11, 9), (7, 16, 8)])
def test_a_pattern_of_equal_times_fits_the_memory_whatever_they_are(times: tuple[int, int, int]) -> None:
    problem = two_chunks(16, limit=12, communication=1)
    forward, backward_input, backward_weight = times
    costs = problem.costs.replace(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    pattern = find_pattern_of_chunks(replace(problem, costs=costs), effort=Effort(20))
    assert pattern is not None
    assert max(simulate(unroll(problem, pattern), costs).peak_memory) <= 12


def test_what_goes_to_the_host_has_no_pattern_of_chunks() -> None:
    problem = two_chunks(16, limit=12)
    moved = replace(problem, costs=problem.costs.replace(offload=10, reload=10), offload=True)
    assert find_pattern_of_chunks(moved, effort=Effort(20)) is None
