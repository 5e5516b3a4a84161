"""Schedules grown from a periodic block that the search has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.ir import Kind
from debubble.search.annealing.walker import Walker
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.periodic.modulo import patterns, unrolled
from debubble.search.periodic.repetition import _Seedling, grown
from tests.search.orders import uniform


@pytest.fixture(scope="module")
def seedling() -> _Seedling:
    problem = uniform(4, 64, offload=10, limit=6)
    return _Seedling.of(problem, next(patterns(problem, 1, effort=Effort(20))))


@pytest.mark.parametrize("seed", [0, 1])
def test_moves_keep_the_block_periodic(seedling: _Seedling, seed: int) -> None:
    walker = Walker.of(seedling.small, seedling.best, seed=seed, block=seedling.block)
    walker.restart(seedling.best)
    assert walker.walk(3000, temperature=0.1, target=0) == 3000
    found = walker.news()
    assert found is not None
    begins = seedling.block.begins(found)
    for order, begin, window in zip(found.orders, begins, seedling.block.windows, strict=True):
        kinds = sorted(op.kind.name for op in order[begin : begin + window])
        assert kinds == sorted({op.kind.name for op in order})


def test_each_further_micro_batch_takes_a_period(seedling: _Seedling) -> None:
    searched = seedling.searched(Effort(1.0), seed=0, workers=1)
    problems = [uniform(4, m, offload=10, limit=6) for m in (64, 65, 128)]
    values = [problem.value(searched.grown(problem)) for problem in problems]
    assert values[1] - values[0] == 30
    assert values[2] - values[1] == 63 * 30


def test_many_micro_batches_meet_the_bound() -> None:
    problem = uniform(4, 256, offload=10, limit=6)
    schedule = grown(problem, effort=Effort(20))
    assert schedule is not None
    assert problem.value(schedule) == lower_bound(problem) == 7713
    assert sum(op.kind is Kind.F for order in schedule.orders for op in order) == 4 * 256


def test_too_few_micro_batches_give_the_pattern_unrolled() -> None:
    problem = uniform(4, 12, offload=10, limit=6)
    pattern = next(patterns(problem, 1, effort=Effort(20)))
    assert grown(problem, effort=Effort(20)) == unrolled(problem, pattern)


def test_what_is_not_periodic_is_not_grown() -> None:
    problem = uniform(4, 64, offload=10, limit=6)
    uneven = replace(problem, costs=problem.costs.replace(micro_batch_scale=[1, *([2] * 63)]))
    assert grown(uneven, effort=Effort(5)) is None
