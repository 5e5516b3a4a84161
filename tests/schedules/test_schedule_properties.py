from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Placement, Schedule, ScheduleError, StageCosts, check
from debubble.schedules.registry import ScheduleEntry


@st.composite
def cases(draw: Any, name: Any) -> Any:
    """Devices, micro-batches, chunks and random integer costs for one schedule."""
    entry = db.schedules[name]
    p = draw(st.integers(2, 16))
    m = draw(st.integers(1, 64))
    v = draw(st.integers(1, 4)) if "chunks" in entry.options else entry.default_chunks
    stages = p * v
    number = st.integers(1, 20)
    per_stage = st.lists(number, min_size=stages, max_size=stages)
    times = {k: draw(st.one_of(number, per_stage)) for k in ("forward", "backward_input", "backward_weight")}
    activation = draw(st.lists(st.integers(2, 9), min_size=stages, max_size=stages))
    after = [draw(st.integers(0, a)) for a in activation]
    costs = db.StageCosts.of(
        stages=stages, **times, activation=activation, activation_after_input=after,
        communication=draw(st.integers(0, 5)), offload=draw(st.integers(0, 10)),
    )  # fmt: skip
    return p, m, v, costs


def busiest(schedule: Any, costs: Any) -> Any:
    """A lower bound: a device has all of its work after the first forward reaches it."""
    device_of = schedule.placement.device_of
    reached: dict[Any, Any] = {}
    now = 0
    for s, d in enumerate(device_of):
        if s and device_of[s - 1] != d:
            now += costs.communication[s - 1]
        reached.setdefault(d, now)
        now += costs.forward[s]
    return max(
        reached[d] + schedule.micro_batches * sum(costs.work(s) for s in stages)
        for d, stages in enumerate(schedule.placement.stages_of)
    )


def passes(costs: Any) -> Any:
    """The time of one micro-batch forwards and backwards through all stages."""
    return sum(costs.forward) + sum(costs.backward_input)


@pytest.mark.parametrize("name", list(db.schedules))
@settings(max_examples=5)
@given(data=st.data())
def test_every_schedule_is_complete_bounded_and_deterministic(name: Any, data: Any) -> None:
    p, m, v, costs = data.draw(cases(name))
    entry = db.schedules[name]
    options = {k: x for k, x in {"chunks": v, "tries": 4}.items() if k in entry.options}
    schedule = entry(devices=p, micro_batches=m, costs=costs, **options)
    check(schedule)
    run = db.simulate(schedule, costs)
    assert run.makespan >= max(busiest(schedule, costs), passes(costs))
    assert entry(devices=p, micro_batches=m, costs=costs, **options) == schedule
    if entry.peak is not None and not schedule.peers:
        for d, stages in enumerate(schedule.placement.stages_of):
            assert run.peak_memory[d] <= entry.peak(p, m, v) * v * max(costs.activation[s] for s in stages)


@pytest.mark.parametrize("name", list(db.schedules))
def test_a_limit_below_one_activation_is_refused(name: str) -> None:
    entry = db.schedules[name]
    costs = db.StageCosts.of(stages=2 * entry.default_chunks, memory_limit=0.5)
    with pytest.raises(db.DebubbleError):
        db.simulate(entry(devices=2, micro_batches=4, costs=costs), costs)


@pytest.mark.parametrize("name", list(db.schedules))
def test_costs_for_another_number_of_stages_are_refused(name: str) -> None:
    with pytest.raises(db.InputError, match="The costs are for 3 stages"):
        db.schedules[name](devices=4, micro_batches=6, costs=db.StageCosts.of(stages=3))


def run_in_groups(name: str, p: int, v: int, group: int) -> None:
    db.simulate(
        db.schedules[name](devices=p, micro_batches=16, chunks=v, group=group),
        db.StageCosts.of(stages=p * v, offload=0.5),
    )


@pytest.mark.parametrize("name", ["group-interleaved", "pipeoffload"])
@pytest.mark.parametrize(("p", "v", "group"), [(5, 2, 1), (5, 2, 2), (8, 3, 3), (8, 3, 7)])
def test_invalid_groups_are_refused_with_a_valid_size(name: str, p: int, v: int, group: int) -> None:
    if 2 * group >= p - 1:
        run_in_groups(name, p, v, group)
        return
    with pytest.raises(db.InputError, match=f"in groups of {group}: a group needs {p // 2} micro-batches or more"):
        run_in_groups(name, p, v, group)
    run_in_groups(name, p, v, p // 2)


@pytest.mark.parametrize("name", [name for name, entry in db.schedules.items() if "chunks" in entry.options])
def test_zero_chunks_are_refused(name: str) -> None:
    with pytest.raises(db.InputError, match="A device needs at least one chunk, not 0"):
        db.schedules[name](devices=3, micro_batches=4, chunks=0, costs=db.StageCosts.of(stages=3))


def test_an_incomplete_schedule_of_a_plug_in_is_named() -> None:
    def build(*, devices: int, micro_batches: int, costs: StageCosts | None) -> Schedule:
        return Schedule.of("any", Placement.linear(devices), micro_batches, [["0F0"]])

    mine = ScheduleEntry(name="mine", build=build, paper="", bubble="", memory="", default_chunks=1, peak=None)
    with pytest.raises(ScheduleError, match="The schedule 'mine' is wrong: The backward of stage 0, micro-batch 0 is"):
        mine(devices=1, micro_batches=1)


@pytest.mark.parametrize("name", list(db.schedules))
def test_a_schedule_has_the_placement_that_it_declares(name: str) -> None:
    entry = db.schedules[name]
    schedule = entry(devices=4, micro_batches=8)
    assert schedule.placement == entry.placement(4, entry.default_chunks)


def test_recomputing_stages_must_be_a_set() -> None:
    with pytest.raises(db.InputError, match="'recomputing' of 'zb' is 3; it must be a set of stages"):
        db.schedules["zb"](devices=4, micro_batches=8, recomputing=3)
