from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError, Number, Placement, Schedule, StageCosts
from debubble.search.annealing.arrays import arrays_of, decode, encode
from debubble.search.annealing.evaluate import evaluate
from debubble.search.annealing.moves import shift
from debubble.search.constructive.initial import one_at_a_time
from debubble.search.problem import Objective, OrderProblem
from debubble.simulator import simulate
from tests.strategies import random_schedules, stage_costs


def evaluated(problem: OrderProblem, schedule: Schedule, *, threshold: float = np.inf) -> float:
    layout, floats, ints, scale = arrays_of(problem)
    orders, lengths = encode(problem, schedule)
    return evaluate(layout, floats, ints, orders, lengths, threshold * scale) / scale


def simulated(schedule: Schedule, costs: StageCosts, objective: Objective) -> Number | None:
    try:
        timeline = simulate(schedule, costs)
    except DebubbleError:
        return None
    return timeline.makespan if objective == "makespan" else timeline.span


@given(data=st.data(), objective=st.sampled_from(["makespan", "span"]))
@settings(max_examples=50)
def test_evaluator_equals_simulation_on_any_schedule(data: st.DataObject, objective: Objective) -> None:
    schedule = data.draw(random_schedules(shares=True, deeper=True))
    costs = data.draw(stage_costs(stages=schedule.stages, offload=True, deeper=True))
    fractions = data.draw(st.booleans())
    if fractions:
        costs = costs.replace(communication=Fraction(1, 3), forward=[Fraction(f) / 7 for f in costs.forward])
    costs = costs.with_limit(data.draw(st.none() | st.integers(5, 60)))
    # With offload fractions, simulation mixes floats and fractions, so that turns on a link would depend on rounding.
    if not fractions and data.draw(st.booleans()):
        shared = data.draw(st.lists(st.integers(0, schedule.devices - 1), unique=True, max_size=schedule.devices))
        costs = costs.replace(link_groups=[shared])
    expected = simulated(schedule, costs, objective)
    value = evaluated(OrderProblem.from_schedule(schedule, costs, objective=objective), schedule)
    # Whole numbers agree to the last bit.
    assert value == pytest.approx(np.inf if expected is None else float(expected), rel=1e-12, abs=0)


@given(data=st.data(), schedule=random_schedules())
@settings(max_examples=60)
def test_simultaneous_transfers_go_in_the_order_of_devices(data: st.DataObject, schedule: Schedule) -> None:
    # Transfers of stages with equal times are often ready simultaneously.
    time, overlap = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(1)]))
    costs = StageCosts.of(
        stages=schedule.stages, forward=1, backward_input=time, backward_weight=1, communication=0, offload=1, reload=1,
        activation=1, link_groups=[range(schedule.devices)], offload_overlap=overlap, reload_overlap=overlap,
        recompute_overlap=overlap,
    )  # fmt: skip
    expected = simulated(schedule, costs, "makespan")
    value = evaluated(OrderProblem.from_schedule(schedule, costs), schedule)
    assert value == (np.inf if expected is None else expected)


@given(data=st.data())
@settings(max_examples=25)
def test_evaluator_rejects_values_above_the_threshold(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules())
    costs = data.draw(stage_costs(stages=schedule.stages, offload=True))
    makespan = float(simulate(schedule, costs).makespan)
    problem = OrderProblem.from_schedule(schedule, costs)
    assert evaluated(problem, schedule, threshold=makespan) == makespan
    assert evaluated(problem, schedule, threshold=makespan - 0.5) == np.inf


@given(data=st.data(), objective=st.sampled_from(["makespan", "span"]))
@settings(max_examples=30)
def test_lists_without_transfers_take_the_simulated_time(data: st.DataObject, objective: Objective) -> None:
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    costs = data.draw(stage_costs(stages=p)).with_limit(data.draw(st.none() | st.integers(19, 60)))
    problem = OrderProblem(placement=Placement.linear(p), micro_batches=m, costs=costs, objective=objective)
    layout, floats, ints, scale = arrays_of(problem)
    numbers, lengths = encode(problem, one_at_a_time(problem))
    for op, by in data.draw(st.lists(st.tuples(st.integers(0, 3 * p * m - 1), st.integers(-6, 6)), max_size=40)):
        shift(layout, ints, numbers, lengths, op, by)
    schedule = decode(problem, numbers, lengths, name="any")
    value = evaluate(layout, floats, ints, numbers, lengths, np.inf) / scale
    expected = simulated(schedule, costs, objective)
    assert value == pytest.approx(np.inf if expected is None else float(expected), rel=1e-12, abs=0)


@given(data=st.data())
@settings(max_examples=50)
def test_evaluator_includes_host_steps_and_their_transfers(data: st.DataObject) -> None:
    p, chunks, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    placement = data.draw(st.sampled_from([Placement.looped(p, chunks), Placement.v_shape(p, chunks)]))
    stages = placement.stages
    times = st.lists(st.integers(0, 40), min_size=stages, max_size=stages)
    costs = data.draw(stage_costs(stages=stages)).replace(
        host_step=data.draw(times), gradient_offload=data.draw(times), parameter_load=data.draw(times),
        link_groups=data.draw(st.sampled_from([(), (range(p),), (range(p // 2), range(p // 2, p))])),
        host_link=data.draw(st.sampled_from(["full-duplex", "half-duplex"])),
    )  # fmt: skip
    hosted = data.draw(st.frozensets(st.integers(0, stages - 1)))
    problem = OrderProblem(placement=placement, micro_batches=m, costs=costs, host_steps=hosted)
    schedule = one_at_a_time(problem)
    assert evaluated(problem, schedule) == pytest.approx(float(problem.value(schedule)), rel=1e-12)
