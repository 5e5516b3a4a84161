"""What dispatching says that an order takes is what the simulator says, and memory is kept."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Kind, Placement, check
from debubble.search.constructive.building_blocks import FIRST, BlockCandidate, pattern_of, repeated
from debubble.search.constructive.order_following import PATIENT, Manner, Step, follow
from tests.strategies import stage_costs


@st.composite
def followed(draw: Any) -> Any:
    """A step of a V or a line, its costs and room, and a candidate."""
    devices, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    costs = draw(stage_costs(stages=devices * chunks)).replace(communication_model="latency")
    placement = Placement.v_shape(devices, chunks)
    room = [draw(st.integers(1, 3 * devices)) * sum(costs.activation[s] for s in held) for held in placement.stages_of]
    candidate = BlockCandidate.of(draw(st.sampled_from(FIRST[2 * chunks])))
    return placement, draw(st.integers(1, 8)), costs, room, candidate


@settings(max_examples=150, deadline=None)
@given(followed())
def test_a_followed_order_takes_the_time_and_memory_that_the_simulator_says(case: Any) -> None:
    placement, m, costs, room, candidate = case
    pattern = pattern_of(placement, costs, candidate.shape)
    outcome = pattern and follow(Step(placement, m, costs, room), repeated(pattern, m), candidate.manner)
    if not outcome:
        return
    schedule = db.Schedule.of("followed", placement, m, outcome.orders)
    check(schedule)
    timeline = db.simulate(schedule, costs)
    if candidate.manner.late:
        # What may overtake from some moment on starts then, although it had arrived before.
        assert (outcome.makespan, outcome.span) >= (timeline.makespan, timeline.span)
    else:
        assert (outcome.makespan, outcome.span) == (timeline.makespan, timeline.span)
    assert all(peak <= limit for peak, limit in zip(timeline.peak_memory, room, strict=True))


def two_devices(manner: Any, *, room: Any) -> Any:
    """Device 0 wants F0, I0, F1; the message is slow, so F1 could go first."""
    costs = db.StageCosts.of(stages=2, communication=5, activation=1, activation_after_input=1)
    lists = [[(0, 0), (1, 0), (0, 1), (1, 1)], [(2, 0), (3, 0), (2, 1), (3, 1)]]
    return follow(Step(Placement.linear(2), 2, costs, [room, 2]), lists, manner)


def test_what_has_arrived_overtakes_into_a_gap() -> None:
    assert [op.name for op in two_devices(Manner(0, 0), room=2).orders[0]] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]


@pytest.mark.parametrize(("manner", "room"), [(Manner(0, PATIENT), 2), (Manner(0, 0), 1), (Manner(0, 0, late=True), 2)])
def test_nothing_overtakes_if_patient_short_of_memory_or_before_the_cool_down(manner: Any, room: int) -> None:
    outcome = two_devices(manner, room=room)
    assert [op.name for op in outcome.orders[0][:2]] == ["0F0", "0I0"]


def test_an_order_that_memory_cannot_hold_gets_stuck() -> None:
    costs = db.StageCosts.of(stages=1)
    step = Step(Placement.linear(1), 2, costs, [1])
    assert follow(step, [[(0, 0), (0, 1), (1, 0), (1, 1)]], Manner(0, PATIENT)) is None


def test_room_is_counted_exactly() -> None:
    costs = db.StageCosts.of(stages=1, activation=Fraction(1, 3), activation_after_input=Fraction(1, 3))
    step = Step(Placement.linear(1), 3, costs, [1])
    forwards_first = [[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]]
    outcome = follow(step, forwards_first, Manner(0, PATIENT))
    assert outcome is not None
    assert [op.kind for op in outcome.orders[0][:3]] == [Kind.F] * 3
