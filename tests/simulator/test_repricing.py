from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Schedule, StageCosts
from debubble.simulator import Repricer
from tests.strategies import random_schedules, stage_costs


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageCosts]:
    schedule = draw(random_schedules(offload=False))
    return schedule, draw(stage_costs(stages=schedule.stages))


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_repricing_agrees_with_simulation(case: tuple[Schedule, StageCosts]) -> None:
    schedule, costs = case
    timeline = db.simulate(schedule, costs)
    price = Repricer(schedule).price(costs)
    assert price.makespan == timeline.makespan
    assert price.span == timeline.span
    assert price.peak_memory == timeline.peak_memory


@pytest.mark.parametrize("recomputed", [0, 2])
def test_another_choice_of_recomputing_stages_needs_no_new_lowering(recomputed: int) -> None:
    costs = StageCosts.of(stages=4, recompute_workspace=0.25, micro_batch_scale=[1, 2, 1, 3])
    repricer = Repricer(db.schedules["1f1b"](devices=4, micro_batches=4))
    price = repricer.price(costs, fused_recompute=frozenset(range(recomputed)))
    timeline = db.simulate(db.schedules["1f1b"](devices=4, micro_batches=4, recomputed_stages=recomputed), costs)
    assert price.makespan == timeline.makespan
    assert price.peak_memory == timeline.peak_memory


def test_blocking_messages_and_offload_are_priced_by_full_simulation() -> None:
    costs = StageCosts.of(stages=2, communication=1, communication_model="blocking")
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    assert Repricer(schedule).price(costs).makespan == db.simulate(schedule, costs).makespan
