"""A schedule for another number of micro-batches: a periodic one is what its rule builds for that number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.build_cache import shipped_problems

from debubble.ir import Placement, StageCosts
from debubble.schedules import schedules
from debubble.search import cache
from debubble.search.bounds import lower_bound
from debubble.search.micro_batch_count import resized
from debubble.search.problem import OrderProblem


@pytest.mark.parametrize("micro_batches", [8, 11, 12, 20])
def test_1f1b_of_12_micro_batches_becomes_1f1b_of_any_number(micro_batches: int) -> None:
    costs = StageCosts.of(stages=4)
    twelve = schedules["1f1b"](devices=4, micro_batches=12, costs=costs)
    problem = OrderProblem(placement=Placement.linear(4), micro_batches=micro_batches, costs=costs)
    found = resized(twelve, problem)
    assert found is not None
    assert found.orders == schedules["1f1b"](devices=4, micro_batches=micro_batches, costs=costs).orders


@pytest.mark.parametrize("micro_batches", [20, 32])
def test_a_shipped_schedule_that_is_periodic_stays_optimal(micro_batches: int) -> None:
    shipped = next(p for p in shipped_problems() if (p.devices, p.micro_batches, p.costs.memory_limit) == (4, 16, (8,)))
    schedule = cache.nearest(shipped, cache.SHIPPED)
    assert schedule is not None
    problem = replace(shipped, micro_batches=micro_batches)
    found = resized(schedule, problem)
    assert found is not None
    assert problem.value(found) == lower_bound(problem)
