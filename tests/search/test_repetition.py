"""Schedules grown from a periodic block that the search has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.ir import Kind, Placement
from debubble.search.annealing.walker import Walker
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.periodic.modulo import find_patterns, unroll
from debubble.search.periodic.repetition import PeriodicCore, periodic_schedule
from tests.search.orders import uniform


@pytest.fixture(scope="module")
def core() -> PeriodicCore:
    problem = uniform(4, 64, offload=10, limit=6)
    return PeriodicCore.of(problem, next(find_patterns(problem, 1, effort=Effort(20))))


@pytest.mark.parametrize("seed", [0, 1])
def test_moves_keep_the_block_periodic(core: PeriodicCore, seed: int) -> None:
    walker = Walker(core.small, core.best, seed=seed, block=core.block)
    walker.restart(core.best)
    assert walker.walk(3000, temperature=0.1, target=0) == 3000
    improved = walker.take_improvement()
    assert improved is not None
    begins = core.block.begins(improved)
    for order, begin, window in zip(improved.orders, begins, core.block.windows, strict=True):
        kinds = sorted(op.kind.name for op in order[begin : begin + window])
        assert kinds == sorted({op.kind.name for op in order})


def test_each_further_micro_batch_takes_a_period(core: PeriodicCore) -> None:
    improved = core.improve(Effort(1.0), seed=0, workers=1)
    problems = [uniform(4, m, offload=10, limit=6) for m in (64, 65, 128)]
    values = [problem.value(improved.extend(problem)) for problem in problems]
    assert values[1] - values[0] == 30
    assert values[2] - values[1] == 63 * 30


def test_many_micro_batches_meet_the_bound() -> None:
    problem = uniform(4, 256, offload=10, limit=6)
    # With this effort some core improves so that its repetitions would deadlock: it is not taken.
    schedule = periodic_schedule(problem, effort=Effort(6))
    assert schedule is not None
    assert problem.value(schedule) == lower_bound(problem) == 7713
    assert sum(op.kind is Kind.F for order in schedule.orders for op in order) == 4 * 256


def test_too_few_micro_batches_give_the_pattern_unrolled() -> None:
    problem = uniform(4, 12, offload=10, limit=6)
    pattern = next(find_patterns(problem, 1, effort=Effort(20)))
    assert periodic_schedule(problem, effort=Effort(20)) == unroll(problem, pattern)


def test_uneven_micro_batches_have_no_pattern() -> None:
    problem = uniform(4, 64, offload=10, limit=6)
    uneven = replace(problem, costs=problem.costs.replace(micro_batch_scale=[1, *([2] * 63)]))
    assert periodic_schedule(uneven, effort=Effort(5)) is None


def test_little_memory_for_several_chunks_has_a_pattern_that_is_improved_at_both_ends() -> None:
    problem = replace(uniform(16, 32, limit=16, activation_after_input=0), placement=Placement.v_shape(8))
    schedule = periodic_schedule(problem, effort=Effort(2))
    assert schedule is not None
    # The fastest of zb-v, v-half and v-min takes 2230.
    assert problem.value(schedule) < 2230
