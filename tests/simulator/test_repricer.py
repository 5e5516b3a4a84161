import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Placement, Schedule, StageCosts
from debubble.simulator import Price, Repricer, Timeline
from tests.strategies import random_schedules, stage_costs


@st.composite
def cases(draw: st.DrawFn, *, offload: bool) -> tuple[Schedule, StageCosts]:
    schedule = draw(random_schedules(offload=offload, shares=not offload, deeper=True))
    costs = stage_costs(
        stages=schedule.stages, offload=offload, deeper=True, messages=("latency", "exclusive", "receiver")
    )
    return schedule, draw(costs)


def agrees(price: Price, timeline: Timeline) -> bool:
    return price == Price(float(timeline.makespan), float(timeline.span), tuple(map(float, timeline.peak_memory)))


@given(case=cases(offload=False), data=st.data())
@settings(max_examples=30)
def test_repricing_agrees_with_simulation(case: tuple[Schedule, StageCosts], data: st.DataObject) -> None:
    schedule, costs = case
    scales = st.lists(st.integers(1, 3), min_size=schedule.micro_batches, max_size=schedule.micro_batches)
    costs = costs.replace(micro_batch_scale=data.draw(scales), recompute_workspace_input=data.draw(st.integers(1, 4)))
    repricer, timeline = Repricer(schedule), db.simulate(schedule, costs)
    assert agrees(repricer.price(costs), timeline)
    assert repricer.peak_memory(costs, fused_recompute=schedule.fused_recompute) == timeline.peak_memory


@given(case=cases(offload=True), data=st.data())
@settings(max_examples=30)
def test_offload_is_priced_without_the_memory_limit(case: tuple[Schedule, StageCosts], data: st.DataObject) -> None:
    schedule, costs = case
    repricer = Repricer(schedule)
    for link in ("full-duplex", "half-duplex"):
        other = costs.replace(host_link=link, offload=data.draw(st.integers(1, 9)))
        assert agrees(repricer.price(other.with_limit(1)), db.simulate(schedule, other))


def test_host_steps_and_their_transfers_are_priced() -> None:
    """Gradients offload, the host steps and parameters load on a half-duplex link."""
    schedule = Schedule.of("host", Placement.linear(1), 2, [["0P0", "0F0", "0B0", "0F1", "0B1", "0G1", "0D1", "0S1"]])
    costs = StageCosts.of(
        stages=1, parameter_load=3, gradient_reduce=2, gradient_offload=5, host_step=7, host_link="half-duplex"
    )
    assert agrees(Repricer(schedule).price(costs), db.simulate(schedule, costs))


@pytest.mark.parametrize("recomputed", [0, 2])
def test_recomputing_stages_may_change_without_lowering(recomputed: int) -> None:
    costs = StageCosts.of(stages=4, recompute_workspace=0.25, micro_batch_scale=[1, 2, 1, 3])
    repricer = Repricer(db.schedules["1f1b"](devices=4, micro_batches=4))
    price = repricer.price(costs, fused_recompute=frozenset(range(recomputed)))
    timeline = db.simulate(db.schedules["1f1b"](devices=4, micro_batches=4, recomputed_stages=recomputed), costs)
    assert price.makespan == timeline.makespan
    assert price.peak_memory == timeline.peak_memory


def test_lanes_shared_by_arrival_are_simulated_in_full() -> None:
    blocking = StageCosts.of(stages=2, communication=1, communication_model="blocking")
    plain = db.schedules["1f1b"](devices=2, micro_batches=4)
    assert agrees(Repricer(plain).price(blocking), db.simulate(plain, blocking))
    shared = StageCosts.of(stages=2, offload=4, link_groups=[[0, 1]])
    offloading = Schedule.of(
        "offload", Placement.linear(2), 1, [["0F0", "0O0", "0L0", "0B0"], ["1F0", "1O0", "1L0", "1B0"]]
    )
    assert agrees(Repricer(offloading).price(shared), db.simulate(offloading, shared))
