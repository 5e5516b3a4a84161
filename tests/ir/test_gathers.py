from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InputError, Kind, Placement, Schedule, StageCosts
from debubble.ir.ops import RESHARDS, UNSHARDS
from debubble.simulator import Price, Repricer, Timeline
from tests.strategies import random_schedules, stage_costs

USERS = (Kind.F, Kind.R, Kind.B, Kind.I)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageCosts]:
    """A random schedule, and costs of stages whose parameters are gathered."""
    schedule = draw(random_schedules())
    costs = draw(stage_costs(stages=schedule.stages, offload=True))
    sizes = draw(st.lists(st.integers(1, 9), min_size=schedule.stages, max_size=schedule.stages))
    return schedule, costs.replace(gathered=sizes, parameter_gather=draw(st.integers(0, 9)), static=2 * max(sizes))


def at_any_speed(data: st.DataObject, schedule: Schedule, costs: StageCosts) -> Timeline:
    """The timeline of the program with random durations."""
    program = db.lower(schedule, costs)
    factors = data.draw(st.lists(st.integers(0, 5), min_size=20, max_size=20))
    return db.simulate(replace(program, duration=program.duration * np.resize(factors, len(program.duration)) + 1))


@given(case=cases(), data=st.data())
@settings(max_examples=25)
def test_a_stage_computes_only_while_its_parameters_exist(
    case: tuple[Schedule, StageCosts], data: st.DataObject
) -> None:
    timeline = at_any_speed(data, *case)
    for stage in range(case[0].stages):
        of_stage = [o for o in timeline.operations if o.op.stage == stage]
        gathers = sorted(o.end for o in of_stage if o.op.kind in UNSHARDS)
        frees = sorted(o.start for o in of_stage if o.op.kind in RESHARDS)
        assert len(gathers) == len(frees)
        for user in of_stage:
            if user.op.kind in USERS:
                assert any(begin <= user.start and user.end <= end for begin, end in zip(gathers, frees, strict=True))


@given(case=cases(), data=st.data())
@settings(max_examples=25)
def test_at_most_two_stages_of_a_device_are_gathered(case: tuple[Schedule, StageCosts], data: st.DataObject) -> None:
    schedule, costs = case
    nothing = costs.replace(activation=0, activation_recomputed=0, activation_after_input=0)
    timeline = at_any_speed(data, schedule, nothing)
    for device, stages in enumerate(schedule.placement.stages_of):
        capacity = costs.gathered_bytes(stages)
        assert capacity == sum(sorted(costs.gathered[s] for s in stages)[-2:])
        used = [size - timeline.program.static[device] for _, size in timeline.memory[device]]
        assert max(used) <= capacity
        assert timeline.program.static[device] == costs.static_of(device) - capacity
        assert used[-1] == 0


@given(case=cases(), data=st.data())
@settings(max_examples=25)
def test_a_gathering_program_fits_its_limit_at_any_speed(
    case: tuple[Schedule, StageCosts], data: st.DataObject
) -> None:
    schedule, costs = case
    limit = data.draw(st.integers(1, int(max(db.simulate(schedule, costs).peak_memory)) + 4))
    try:
        timeline = at_any_speed(data, schedule, costs.with_limit(limit))
    except db.OutOfMemoryError:
        return
    assert max(timeline.peak_memory) <= limit


@given(case=cases())
@settings(max_examples=25)
def test_gathers_are_priced_as_they_are_simulated(case: tuple[Schedule, StageCosts]) -> None:
    schedule, costs = case
    timeline = db.simulate(schedule, costs)
    price = Price(float(timeline.makespan), float(timeline.span), tuple(map(float, timeline.peak_memory)))
    assert Repricer(schedule).price(costs) == price


def gathers_of(schedule: Schedule) -> list[str]:
    costs = StageCosts.of(stages=schedule.stages, gathered=1, parameter_gather=1, static=2)
    timeline = db.simulate(schedule, costs)
    return [o.name for o in sorted(timeline.operations, key=lambda o: o.start) if o.op.kind in UNSHARDS]


def test_a_device_of_one_stage_gathers_it_once_per_step() -> None:
    assert gathers_of(db.schedules["1f1b"](devices=1, micro_batches=3)) == ["0UNSHARD_F0"]


def test_two_alternating_stages_are_gathered_once() -> None:
    orders = [["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]]
    assert gathers_of(Schedule.of("two", Placement.of([0, 0]), 2, orders)) == ["0UNSHARD_F0", "1UNSHARD_F0"]


def test_the_next_of_three_stages_is_gathered_during_compute() -> None:
    orders = [["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]]
    schedule = Schedule.of("three", Placement.of([0, 0, 0]), 1, orders)
    costs = StageCosts.of(stages=3, forward=4, gathered=5, parameter_gather=3, static=10)
    ops = db.simulate(schedule, costs).by_name
    assert [n for n in ops if "SHARD" in n] == [
        "0UNSHARD_F0", "1UNSHARD_F0", "0RESHARD_F0", "2UNSHARD_F0", "2RESHARD_B0", "0UNSHARD_B0", "1RESHARD_B0",
        "0RESHARD_B0",
    ]  # fmt: skip
    assert ops["2UNSHARD_F0"].start == ops["1F0"].start
    assert ops["2F0"].start == ops["1F0"].end


def test_weight_gradients_need_no_parameters() -> None:
    orders = [["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"]]
    schedule = Schedule.of("split", Placement.of([0, 0]), 1, orders)
    timeline = db.simulate(schedule, StageCosts.of(stages=2, gathered=1, parameter_gather=1, static=2))
    assert timeline.by_name["0RESHARD_B0"].start == timeline.by_name["0I0"].end


def test_parameters_load_from_the_host_before_their_gather() -> None:
    orders = [["0P0", "0F0", "0B0", "0D0", "0S0"]]
    schedule = Schedule.of("host", Placement.linear(1), 1, orders)
    costs = StageCosts.of(stages=1, parameter_load=5, gathered=1, parameter_gather=2, static=1)
    ops = db.simulate(schedule, costs).by_name
    assert (ops["0UNSHARD_F0"].start, ops["0F0"].start) == (5, 7)


def test_a_program_of_forwards_gathers_parameters() -> None:
    schedule = db.schedules["interleaved"](devices=1, micro_batches=1, chunks=3)
    program = db.ir.lower_forwards(schedule, StageCosts.of(stages=3, gathered=1, parameter_gather=1, static=2))
    gathers = [i.op.name for i in program.instructions if i.op.kind in UNSHARDS]
    assert gathers == ["0UNSHARD_F0", "1UNSHARD_F0", "2UNSHARD_F0"]


def test_static_bytes_without_gathered_parameters_are_refused() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    with pytest.raises(InputError, match=r"'static' of device 0 is 3, which has no room .* \(4\): add them to it"):
        db.lower(schedule, StageCosts.of(stages=2, gathered=4, static=3))
